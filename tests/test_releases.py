"""Releases of SGLang: those that were tested serve; others are compared, and then warned of or refused in one line."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sgl_ragged import check_command, cli, contract_checks
from sgl_ragged.contract_checks import resolve
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import contracts
from sgl_ragged.launch.plan import ATTRIBUTE
from sgl_ragged.sglang_contract import CONFIGURATOR, PROFILE_BYTES, RELEASES, TREE, WINDOW_BUFFER
from tests.models import make_llama
from tests.sglang_digests import installed_digests

ROOT = Path(__file__).parent.parent
TESTED = ["0.5.23", "0.5.23+cu130"]
OTHERS = ["0.5.23.post2", "0.5.24", "0.5.24rc1", "0.5.24.dev3+g1a2b3c4", "0.6", "1.0.5.23"]
TOO_OLD = ["0.5.20", "0.5.22", "0.5.22.post1"]

SIZING = f"{CONFIGURATOR}._resolve_memory_pool_config"
EVICT, LEFT_WINDOWS = f"{TREE}.evict", f"{TREE}.evict_sliding_windows"

load_plugins()


def sglang_requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(one for one in map(Requirement, project["dependencies"]) if one.name == "sglang")


def pretend(monkeypatch, release: str) -> None:
    """Another SGLang, by its version alone: its functions match."""
    for module in (contract_checks, check_command):
        monkeypatch.setattr(module, "installed_release", lambda: release)


def checked(monkeypatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "check", *flags])
    cli.main()


def change_source(monkeypatch, tmp_path, target: str, edit: Callable[[str], str]) -> None:
    """Put a function in place of SGLang's whose source is edited."""
    original = resolve(target)
    file = tmp_path / f"{target}.py"
    source = edit(inspect.getsource(original))
    file.write_text(f"if True:\n{source}" if source[0] == " " else source)
    names = dict(vars(sys.modules[original.__module__]))
    exec(compile(file.read_text(), str(file), "exec"), names)
    owner, _, name = target.rpartition(".")
    monkeypatch.setattr(resolve(owner), name, names[name])


def with_a_statement(method: str) -> str:
    return f"{method.rstrip()}\n        pass\n"


@pytest.mark.parametrize("release", [*TESTED, *OTHERS, *TOO_OLD])
def test_the_package_asks_for_releases_that_may_serve(release):
    assert contract_checks.is_tested(release) == (release in TESTED)
    assert sglang_requirement().specifier.contains(release, prereleases=True) == (release not in TOO_OLD)


def test_the_release_that_is_tested_is_the_last():
    """The README names it."""
    assert Version(importlib.metadata.version("sglang")).base_version == RELEASES[-1]
    named = re.findall(r"`(sglang[<>=][^`]+)`", (ROOT / "README.md").read_text())
    assert [Requirement(one) for one in named] == [sglang_requirement()]
    assert list(RELEASES) == sorted(RELEASES, key=Version)


def test_digests_are_those_of_the_installed_release():
    assert json.loads(contract_checks.DIGESTS.read_text()) == installed_digests(), "run `make digests`"


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("0.5.23", "was tested with this plugin"),
        ("0.5.24", "was not tested with this plugin (0.5.23 was): servers start with a warning"),
    ],
)
def test_check_tells_tested_releases_from_others(monkeypatch, capsys, release, words):
    pretend(monkeypatch, release)
    checked(monkeypatch)
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first == f"SGLang {release} {words}"
    assert header.split() == ["functions", "same", "other", "source", "other", "parameters", "missing"]
    assert [row.split()[-4:] for row in rows] == [[str(len(one)), "0", "0", "0"] for one in contracts().values()]


def test_check_names_other_sources(monkeypatch, capsys, tmp_path):
    pretend(monkeypatch, "0.5.24")
    change_source(monkeypatch, tmp_path, EVICT, with_a_statement)
    change_source(monkeypatch, tmp_path, WINDOW_BUFFER, lambda source: source.replace("window_kv_indptr", "indptr"))
    checked(monkeypatch)
    shown = capsys.readouterr().out
    assert f"{EVICT} (other source): for every server" in shown
    assert f"{WINDOW_BUFFER} (takes indptr, translator, plan" in shown
    assert "servers start with a warning" in shown, "what a feature needs is refused with the feature"
    checked(monkeypatch, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["sglang"], told["tested"]) == ("0.5.24", False)
    differing = [(one["function"], one["state"]) for one in told["functions"] if one["state"] != "same"]
    assert differing == [(EVICT, "other source"), (WINDOW_BUFFER, "other parameters")]
    assert len(told["functions"]) == sum(map(len, contracts().values()))


def test_check_fails_where_no_server_would_start(monkeypatch, capsys):
    pretend(monkeypatch, "0.5.24")
    monkeypatch.delattr(resolve(SIZING.rpartition(".")[0]), SIZING.rpartition(".")[2])
    with pytest.raises(SystemExit) as ended:
        checked(monkeypatch)
    message = str(ended.value.code)
    assert message.startswith(f"sgl-ragged: SGLang 0.5.24 is not supported: {SIZING} (missing); install sglang==0.5.23")
    assert "\n" not in message
    assert "servers do not start" in capsys.readouterr().out


def test_without_sglang_there_is_one_line(monkeypatch):
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(RaggedConfigError, match="SGLang is not installed; install sglang=="):
        contract_checks.installed_release()


def started(model: Path, *flags: str) -> None:
    prepare_server_args(["--model-path", str(model), "--device", "cpu", *flags]).resolve_once()


RAGGED = ("--kv-pool", "ragged", "--ragged-profile", "uniform", "--kv-bytes", "64MiB")


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    """Messages of the check. SGLang takes away the handlers that pytest has set up."""
    messages: list[str] = []
    monkeypatch.setattr(contract_checks.logger, "warning", lambda text, *parts: messages.append(text % parts))
    return messages


@pytest.mark.parametrize("flags", [RAGGED, ("--kv-bytes", "64MiB")])
def test_another_release_with_equal_functions_starts_with_one_warning(monkeypatch, tmp_path, warned, flags):
    model = make_llama(tmp_path / "model")
    started(model, *flags)
    assert warned == []
    pretend(monkeypatch, "0.5.24")
    started(model, *flags)
    assert len(warned) == 1
    assert re.fullmatch(
        r"SGLang 0\.5\.24 was not tested with this plugin \(0\.5\.23 was\); of the \d+ functions that this server "
        r"needs, none has changed\. Compare answers before you rely on them: sgl-ragged verify",
        warned[0],
    )


def test_other_sources_are_named_in_the_warning(monkeypatch, tmp_path, warned):
    """Functions of a feature are compared only for a server that has it."""
    model = make_llama(tmp_path / "model")
    pretend(monkeypatch, "0.5.24")
    for target in (EVICT, LEFT_WINDOWS):
        change_source(monkeypatch, tmp_path, target, with_a_statement)
    started(model, *RAGGED)
    started(model, *RAGGED, "--ragged-history", "2048")
    assert [re.search(r", (\d+) have another source: (.+?)\. Compare", one).groups() for one in warned] == [
        ("1", EVICT),
        ("2", f"{EVICT}, {LEFT_WINDOWS}"),
    ]


@pytest.mark.parametrize("release", ["0.5.23", "0.5.24"])
def test_the_launcher_refuses_only_what_it_was_asked_for(monkeypatch, tmp_path, release):
    """Where functions differ the flags are refused, and without them SGLang starts as ever."""
    model = make_llama(tmp_path / "model")
    pretend(monkeypatch, release)
    monkeypatch.delattr(resolve(PROFILE_BYTES.rpartition(".")[0]), "_profile_available_bytes")
    for flags in (RAGGED, ("--kv-bytes", "1GiB")):
        with pytest.raises(SystemExit, match=rf"^sgl_ragged: SGLang {release} is not supported: .*_bytes \(missing\)"):
            started(model, *flags)
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu"])
    args.resolve_once()
    assert not hasattr(args, ATTRIBUTE)
