"""Which releases of SGLang are served on: declared in one place, and the rest refused in one line."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sgl_ragged import cli, contract_checks
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.plan import ATTRIBUTE
from sgl_ragged.sglang_contract import RELEASES
from tests.models import make_llama

ROOT = Path(__file__).parent.parent
SERVED = ["0.5.23", "0.5.23.post2", "0.5.23+cu130"]
NOT_SERVED = ["0.5.20", "0.5.22", "0.5.22.post1", "0.5.24", "0.5.24rc1", "0.5.24.dev3+g1a2b3c4", "0.6", "1.0.5.23"]

load_plugins()


def sglang_requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(one for one in map(Requirement, project["dependencies"]) if one.name == "sglang")


def pretend(monkeypatch, release: str) -> None:
    """Another SGLang, by its version alone: its functions match."""
    for module in (contract_checks, cli):
        monkeypatch.setattr(module, "installed_release", lambda: release)


@pytest.mark.parametrize("release", [*SERVED, *NOT_SERVED])
def test_the_package_asks_for_what_is_served(release):
    assert contract_checks.is_tested(release) == (release in SERVED)
    assert sglang_requirement().specifier.contains(release, prereleases=True) == (release in SERVED)


def test_the_release_that_is_tested_is_the_last():
    """The README names it."""
    assert Version(importlib.metadata.version("sglang")).base_version == RELEASES[-1]
    named = re.findall(r"`(sglang[<>=][^`]+)`", (ROOT / "README.md").read_text())
    assert [Requirement(one) for one in named] == [sglang_requirement()]
    assert list(RELEASES) == sorted(RELEASES, key=Version)


@pytest.mark.parametrize("release", ["0.5.23", "0.5.23.post2"])
def test_check_passes(monkeypatch, capsys, release):
    pretend(monkeypatch, release)
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "check"])
    cli.main()
    assert capsys.readouterr().out.startswith(f"SGLang {release} is supported: all ")


@pytest.mark.parametrize("release", ["0.5.22", "0.5.24"])
def test_check_refuses_releases_that_were_not_tested(monkeypatch, capsys, release):
    pretend(monkeypatch, release)
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "check"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    message = str(ended.value.code)
    assert message.startswith(f"sgl-ragged: SGLang {release} is not supported: a server was tested with 0.5.23 alone")
    assert "install sglang==0.5.23" in message
    assert "\n" not in message
    assert capsys.readouterr().out == ""


def test_without_sglang_there_is_one_line(monkeypatch):
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(RaggedConfigError, match="SGLang is not installed; install sglang=="):
        contract_checks.installed_release()


def test_the_launcher_refuses_only_what_it_was_asked_for(monkeypatch, tmp_path):
    """On another release the flags are refused, and without them SGLang starts as ever."""
    model = make_llama(tmp_path / "model")
    pretend(monkeypatch, "0.5.22")
    for flags in (("--kv-pool", "ragged"), ("--kv-bytes", "1GiB")):
        with pytest.raises(SystemExit, match=r"^sgl_ragged: SGLang 0\.5\.22 is not supported: "):
            prepare_server_args(["--model-path", str(model), "--device", "cpu", *flags]).resolve_once()
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu"])
    args.resolve_once()
    assert not hasattr(args, ATTRIBUTE)
