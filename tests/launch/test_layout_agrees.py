"""`sgl-ragged layout` and a server decide alike: the same scorer, profile, budgets and placement for the same flags."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from sgl_ragged import cli
from sgl_ragged.launch import calibration_process
from sgl_ragged.launch.plan import ATTRIBUTE
from sgl_ragged.profiles.profile_cache import VARIABLE
from tests.character_model import make_character_model
from tests.launch.test_plugin import resolved
from tests.models import make_profile


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Llama with a tokenizer, without which nothing is calibrated."""
    return make_character_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, model) -> Path:
    """An empty cache; a calibration writes a random profile."""

    def run(command, lock):
        value = {name: command[command.index(name) + 1] for name in ("-o", "--scorer", "--segment")}
        make_profile(model, Path(value["-o"]), scorer=value["--scorer"], segment=int(value["--segment"]), codebook=True)
        return 0

    monkeypatch.setattr(calibration_process, "_run", run)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def layout(monkeypatch, capsys, *flags: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", *flags, "--json"])
    cli.main()
    return json.loads(capsys.readouterr().out)


FLAGS = ("--kv-bytes", "64MiB", "--max-running-requests", "4", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    "flags",
    [
        ("--ragged-scorer", "keydiff"),
        ("--ragged-scorer", "h2o", "--ragged-segment", "128", "--ragged-ratio", "0.2"),
        ("--ragged-scorer", "keydiff", "--tp", "2"),
        ("--ragged-scorer", "keydiff", "--tp", "2", "--ragged-fairkv", "none", "--ragged-slab-dtype", "wide"),
        ("--ragged-profile", "uniform", "--pp-size", "2"),
        ("--ragged-ratio", "1"),
    ],
)
def test_layout_decides_what_a_server_decides(model, monkeypatch, capsys, flags):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    plan = getattr(resolved(model, "--kv-pool", "ragged", *FLAGS, "--ragged-profile", "auto", *flags), ATTRIBUTE).plan
    capsys.readouterr()
    shown = layout(monkeypatch, capsys, "--model-path", str(model), *FLAGS, *flags)
    assert (shown["scorer"], shown["profile"], shown["fairkv"]) == (plan.scorer, plan.profile, plan.fairkv)
    assert shown["profile_source"] == plan.source
    assert shown["kept"] == plan.kept.tolist()
    assert shown["slab_dtype"] == plan.form.name
    assert shown["stage_slab_bytes"] == plan.stage_slab_bytes(2)


def test_without_a_cached_profile_layout_says_what_it_assumed(model, cache, monkeypatch, capsys):
    """It calibrates nothing, and takes a config.json and the short names of flags, too."""
    monkeypatch.setattr(calibration_process, "_run", lambda *_: pytest.fail("layout must not calibrate"))
    shown = layout(monkeypatch, capsys, "--model", str(model / "config.json"), *FLAGS, "--ratio", "0.3")
    assert shown["scorer"] == "gate"
    assert Path(shown["profile"]).parent == cache
    assert "its first start calibrates gate; assumed here: every head keeps the same share" in shown["profile_source"]
    assert "\n" not in shown["profile_source"]
    kept = np.array(shown["kept"])
    assert kept.max() - kept.min() <= 16
    assert not cache.exists()


def test_a_model_of_the_hub_is_found_in_its_cache(model, tmp_path, monkeypatch, capsys):
    """By its name, without network; its profile is the one that a server of this name has."""
    hub = tmp_path / "hub" / "models--somebody--model"
    (hub / "snapshots").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0123abcd")
    (hub / "snapshots" / "0123abcd").symlink_to(model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shown = layout(monkeypatch, capsys, "--model", "somebody/model", *FLAGS)
    assert "no profile of somebody/model is cached" in shown["profile_source"]
    assert Path(shown["profile"]).name.startswith("model-gate-")
