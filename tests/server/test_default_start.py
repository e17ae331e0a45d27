"""What a server with default budgets says of itself, and `sgl-ragged layout` of the same flags."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.recall import MODEL
from benchmarks.storm.material import RECALL, Material
from sgl_ragged import cli
from sgl_ragged.launch import calibration_process
from sgl_ragged.profiles.profile_cache import VARIABLE
from tests.launch.test_plugin import resolved
from tests.server.client import server_settings

pytestmark = pytest.mark.server


def test_a_cached_profile_is_served_and_layout_says_the_same(servers, tmp_path, monkeypatch, capsys):
    """The launcher's part for a model that has a bundled profile is in tests/launch/test_profile_cache.py: such models
    are too large for a server on CPUs."""
    profile = Material(tmp_path).profile(RECALL, "gate", 256)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(
        calibration_process, "_run", lambda command, _: shutil.copy(profile, command[command.index("-o") + 1]) and 0
    )
    flags = ["--kv-pool", "ragged", "--ragged-profile", "auto", "--ragged-slab-dtype", "auto", "--dtype", "bfloat16"]
    flags += ["--ragged-kernel", "auto"]
    flags += ["--kv-bytes", "32MiB", "--max-running-requests", "4", "--ragged-ratio", "0.3"]
    resolved(MODEL, *flags)
    env = {VARIABLE: str(tmp_path / "cache")}
    with servers.serve(MODEL, *flags, log=tmp_path / "server.log", env=env) as server:
        settings = server_settings(server)
    assert (settings["scorer"], settings["fitted"], settings["slab_dtype"]) == ("gate", True, "k6v6")
    assert settings["kernel"] == "numba"
    assert Path(settings["profile"]).parent == tmp_path / "cache"
    assert list(Path(tmp_path / "cache" / "numba").rglob("*.nbc")), "compiled code is kept beside profiles"
    assert settings["profile_source"].startswith(f"budgets from profile {settings['profile']}")

    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", "--model-path", str(MODEL), *flags, "--json"])
    cli.main()
    shown = json.loads(capsys.readouterr().out)
    for name in ("summary", "scorer", "profile", "profile_source", "slab_bytes", "open_page_tokens", "total_bytes"):
        assert shown[name] == settings[name], name
