"""The cache of profiles: what makes another file, and what two processes at once make of it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_ragged.bundled import FOLDER
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin import calibrating
from sgl_ragged.plugin.options import make_options
from sgl_ragged.profile import load_profile
from sgl_ragged.profile_cache import VARIABLE, ProfileKey, cache_folder, locked, weights_identity
from tests.models import make_llama, make_profile
from tests.test_placing import settled

KEY = ProfileKey("model", "w", "f", "gate", "", 256, "s", "auto")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_everything_in_the_key_makes_another_file(cache):
    others = [
        dataclasses.replace(KEY, **{field.name: 128 if field.name == "segment" else "other"})
        for field in dataclasses.fields(KEY)
    ]
    assert len({key.path for key in (KEY, *others)}) == len(others) + 1
    assert KEY.path.parent == cache
    assert KEY.path.name.startswith("model-gate-")


def test_the_folder_is_in_the_home_folder_unless_named(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/.cache/sgl_ragged")


def test_other_weights_have_another_identity(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1234")
    first = weights_identity(tmp_path)
    (tmp_path / "README.md").write_text("not weights")
    assert weights_identity(tmp_path) == first
    os.utime(file, ns=(1, 1))
    assert weights_identity(tmp_path) != first
    file.write_bytes(b"12345")
    os.utime(file, ns=(1, 1))
    assert weights_identity(tmp_path) != first


def test_snapshots_of_a_hub_are_known_by_their_content(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    blob = tmp_path / "blobs" / "abc"
    blob.write_bytes(b"1234")
    (tmp_path / "snapshot/model.safetensors").symlink_to(blob)
    first = weights_identity(tmp_path / "snapshot")
    os.utime(blob, ns=(1, 1))
    assert weights_identity(tmp_path / "snapshot") == first


def _hold(path: Path, log: Path) -> None:
    with locked(path, lambda: log.open("a").write("waited\n")):
        with log.open("a") as file:
            file.write("in\n")
        time.sleep(0.3)
        with log.open("a") as file:
            file.write("out\n")


def test_two_processes_take_turns(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_hold, args=(KEY.path, log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [line for line in log.read_text().split() if line != "waited"] == ["in", "out", "in", "out"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    with (
        pytest.raises(RaggedConfigError, match="set SGL_RAGGED_CACHE to another folder") as refused,
        locked(KEY.path, lambda: None),
    ):
        pass
    assert "\n" not in str(refused.value)


# What a server gets.


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def calibrations(llama, monkeypatch) -> list[list[str]]:
    """Commands that would have calibrated; in their place a profile is written."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        target = Path(command[command.index("-o") + 1])
        scorer = command[command.index("--scorer") + 1]
        Path(command[command.index("--work") + 1]).mkdir()
        make_profile(llama, target, scorer=scorer, segment=int(command[command.index("--segment") + 1]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(calibrating, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    return commands


def test_the_first_start_calibrates_and_the_second_does_not(llama, cache, calibrations, capfd):
    auto = ("--ragged-profile", "auto", "--ragged-scorer", "keydiff")
    first = settled(llama, *auto)
    said = capfd.readouterr().err
    assert "calibrating keydiff, once, before the server starts" in said
    assert "--ragged-profile uniform serves at once" in said
    assert str(cache) in said
    assert (first.scorer, Path(first.profile).parent) == ("keydiff", cache)
    (command,) = calibrations
    assert command[command.index("--segment") + 1] == "128"
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".safetensors"]
    again = settled(llama, *auto)
    assert again.profile == first.profile
    assert len(calibrations) == 1
    assert "calibrating" not in capfd.readouterr().err
    assert (again.kept != again.kept.mean()).any()


def test_without_a_scorer_calibration_makes_gates(llama, calibrations, monkeypatch):
    monkeypatch.setattr(calibrating, "CALIBRATED_SCORER", "h2o")
    assert settled(llama, "--ragged-profile", "auto").scorer == "h2o"
    assert calibrations[0][calibrations[0].index("--scorer") + 1] == "h2o"


@pytest.mark.parametrize("more", [("--ragged-ratio", "1"), ("--load-format", "dummy"), ("--ragged-profile", "uniform")])
def test_nothing_is_calibrated_for_what_has_no_use_for_it(llama, calibrations, more):
    plan = settled(llama, "--ragged-profile", "auto", *more)
    assert (plan.profile, plan.scorer) == ("uniform", "keydiff")
    assert not calibrations


def test_a_profile_brings_its_scorer(llama, tmp_path):
    make_profile(llama, tmp_path / "p.safetensors", scorer="h2o", segment=128)
    assert settled(llama, "--ragged-profile", str(tmp_path / "p.safetensors")).scorer == "h2o"


def test_a_calibration_that_fails_is_refused_with_the_way_out(llama, monkeypatch):
    failing = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1), DEVNULL=None)
    monkeypatch.setattr(calibrating, "subprocess", failing)
    with pytest.raises(SystemExit, match="or serve with --ragged-profile uniform") as refused:
        settled(llama, "--ragged-profile", "auto")
    assert "\n" not in str(refused.value)


def test_calibration_without_its_packages_is_refused_with_the_way_out(llama, monkeypatch):
    monkeypatch.setattr(calibrating, "NEEDED", ("scipy", "no_such_package"))
    with pytest.raises(SystemExit, match="calibrating it needs no_such_package") as refused:
        settled(llama, "--ragged-profile", "auto")
    assert "install sgl-ragged[calibrate]" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bundled_profiles_come_first():
    profile = load_profile(next(FOLDER.glob("*keydiff*")))
    options = make_options({"kv_pool": "ragged"}, from_command_line=True)
    geometry = SimpleNamespace(fingerprint=profile.model_fingerprint)
    scorer, path = calibrating.settle_profile(options, SimpleNamespace(load_format="auto"), geometry, 0.5)
    assert scorer == "keydiff"
    assert Path(path).parent == FOLDER
