"""The cache of profiles: what makes another file, and what two processes at once make of it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from benchmarks.storm.material import scorer_statistics
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch import calibrating, calibration_process
from sgl_ragged.launch.command_line import make_options
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.profile_cache import (
    VARIABLE,
    ProfileKey,
    cache_folder,
    locked,
    weights_identity,
)
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER, CachedProfile
from tests.character_model import make_character_model
from tests.launch.test_placing import settled
from tests.models import make_profile

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


def test_sglang_has_nothing_to_say_about_the_variable():
    """It renames variables that begin with SGL_, and warns of each."""
    code = "import sglang.srt.environ"
    environment = os.environ | {VARIABLE: "/x"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "RAGGED_CACHE" not in done.stderr


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


def test_a_snapshot_is_known_before_its_weights_are_there(tmp_path):
    """Else the second start would not find what the first one has calibrated before the weights came."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    before = weights_identity(snapshot)
    (snapshot / "model.safetensors").write_bytes(b"1234")
    assert weights_identity(snapshot) == before
    other = snapshot.parent / "4567cdef"
    other.mkdir()
    assert weights_identity(other) != before


def test_a_single_file_has_an_identity_of_its_own(tmp_path):
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"1234")
        os.utime(tmp_path / name, ns=(1, 1))
    one, two = (weights_identity(tmp_path / name) for name in ("one.gguf", "two.gguf"))
    assert len({one, two, weights_identity(tmp_path)}) == 3


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


def test_a_child_that_inherits_the_lock_holds_it(tmp_path):
    with locked(KEY.path, lambda: None) as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    log = tmp_path / "log"
    waiting = multiprocessing.get_context("fork").Process(target=_hold, args=(KEY.path, log))
    waiting.start()
    try:
        while not (log.is_file() and log.read_text()):
            time.sleep(0.01)
        assert log.read_text() == "waited\n"
    finally:
        child.kill()
        child.wait()
    waiting.join(20)
    assert log.read_text() == "waited\nin\nout\n"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    with (
        pytest.raises(RaggedConfigError, match="set SGLANG_RAGGED_CACHE to another folder") as refused,
        locked(KEY.path, lambda: None),
    ):
        pass
    assert "\n" not in str(refused.value)


# What a server gets.

AUTO = ("--ragged-profile", "auto", "--ragged-scorer", "keydiff")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama that has a tokenizer."""
    return make_character_model(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def calibrations(llama, monkeypatch) -> list[list[str]]:
    """Commands that would have calibrated; in their place a profile is written."""
    commands: list[list[str]] = []

    def run(command, lock):
        commands.append(command)
        target = Path(command[command.index("-o") + 1])
        scorer = command[command.index("--scorer") + 1]
        make_profile(llama, target, scorer=scorer, segment=int(command[command.index("--segment") + 1]))
        return 0

    monkeypatch.setattr(calibration_process, "_run", run)
    return commands


def passed_on(command: list[str]) -> dict[str, object]:
    """Settings of the engine that calibrates."""
    return json.loads(command[command.index("--engine-args") + 1])


def test_the_first_start_calibrates_and_the_second_does_not(llama, cache, calibrations, capfd):
    first = settled(llama, *AUTO)
    said = capfd.readouterr().err
    assert "calibrating keydiff, once, before the server starts" in said
    assert "--ragged-profile uniform serves at once" in said
    assert str(cache) in said
    assert (first.scorer, Path(first.profile).parent) == ("keydiff", cache)
    (command,) = calibrations
    assert command[command.index("--segment") + 1] == "128"
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".safetensors"]
    # Whoever made it may have been ended before it had deleted the recordings.
    (cache / f"{Path(first.profile).stem}.recordings-x").mkdir()
    again = settled(llama, *AUTO)
    assert again.profile == first.profile
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".safetensors"]
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
    monkeypatch.setattr(calibration_process, "_run", lambda *_: 1)
    with pytest.raises(SystemExit, match="or serve with --ragged-profile uniform") as refused:
        settled(llama, "--ragged-profile", "auto")
    assert "\n" not in str(refused.value)


def test_calibration_without_its_packages_is_refused_with_the_way_out(llama, monkeypatch):
    monkeypatch.setattr(calibration_process, "NEEDED", ("scipy", "no_such_package"))
    with pytest.raises(SystemExit, match="calibrating it needs no_such_package") as refused:
        settled(llama, "--ragged-profile", "auto")
    assert "install sgl-ragged[calibrate]" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_the_model_is_read_with_is_handed_on(llama, tmp_path, calibrations):
    elsewhere = shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "tokenizer").mkdir()
    for path in elsewhere.glob("tokenizer*"):
        path.rename(tmp_path / "tokenizer" / path.name)
    flags = ("--trust-remote-code", "--tokenizer-path", str(tmp_path / "tokenizer"), "--revision", "main")
    settled(elsewhere, *AUTO, *flags)
    given = passed_on(calibrations[0])
    assert given["trust_remote_code"] is True
    assert given["tokenizer_path"] == str(tmp_path / "tokenizer")
    assert given["revision"] == "main"


def test_without_tokenizer_a_server_says_what_helps(llama, tmp_path, calibrations, cache):
    """--skip-tokenizer-init is no hindrance where there is one: the samples of calibration are texts."""
    settled(llama, *AUTO, "--skip-tokenizer-init")
    assert len(calibrations) == 1
    bare = shutil.copytree(llama, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(SystemExit, match="has no tokenizer that can be read") as refused:
        settled(bare, *AUTO, "--skip-tokenizer-init")
    for words in ("--tokenizer-path", "--ragged-profile FILE", "--ragged-profile uniform"):
        assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(calibrations) == 1
    assert not list(cache.glob("*.recordings*"))


def test_what_an_ended_calibration_left_is_handed_to_the_next(llama, calibrations, cache, monkeypatch):
    finish = calibration_process._run
    monkeypatch.setattr(calibration_process, "_run", lambda *_: 1)
    for _ in range(2):
        with pytest.raises(SystemExit):
            settled(llama, *AUTO)
    left = sorted(map(str, cache.glob("*.recordings-*")))
    assert len(left) == 2
    monkeypatch.setattr(calibration_process, "_run", finish)
    settled(llama, *AUTO)
    (command,) = calibrations
    assert command[command.index("--resume-from") + 1 : command.index("--quality-ratios")] == left
    assert command[command.index("--work") + 1] not in left


@pytest.mark.parametrize("path", ["s3://bucket/model", "gs://bucket/model", "az://container/model", "redis://host:1/m"])
def test_weights_elsewhere_are_refused_in_one_line(path):
    options = make_options({"kv_pool": "ragged"}, from_command_line=True)
    view = SimpleNamespace(model_path=path, revision=None, load_format="auto", dtype="auto")
    with pytest.raises(RaggedConfigError, match="not on this machine") as refused:
        calibrating.settle_profile(options, view, SimpleNamespace(fingerprint="unknown"), 0.5)
    assert "--ragged-profile FILE" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_name_that_no_hub_knows_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RaggedConfigError, match="cannot be found") as refused:
        calibrating.model_folder(SimpleNamespace(model_path="nobody/nothing", revision=None))
    assert "\n" not in str(refused.value)


def test_a_gguf_file_is_calibrated_by_its_own_name(llama, tmp_path, calibrations):
    """SGLang reads the config beside the file; two files in one folder are two models."""
    for name in ("one.gguf", "two.gguf"):
        shutil.copytree(llama, tmp_path / "model", dirs_exist_ok=True)
        (tmp_path / "model" / name).write_bytes(b"GGUF" + name.encode())
    plans = [settled(tmp_path / "model" / f"{name}.gguf", *AUTO) for name in ("one", "two")]
    assert len({plan.profile for plan in plans}) == len(calibrations) == 2
    assert [passed_on(command)["load_format"] for command in calibrations] == ["gguf", "gguf"]


# Words and folders.


def test_uniform_is_no_file_of_the_cache(llama, calibrations, monkeypatch, tmp_path):
    """With the cache in the working folder, a path `uniform` would be one of its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, ".")
    plan = settled(llama, "--ragged-profile", "uniform")
    assert plan.profile == "uniform"
    assert plan.source.startswith("--ragged-profile uniform: every head keeps the same share")
    assert not calibrations
    assert not list(tmp_path.iterdir())
    assert Path(settled(llama, *AUTO).profile).parent == tmp_path
    assert len(calibrations) == 1


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user without rights: root may enter every folder."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("writing", [False, True])
def test_a_cache_that_may_not_be_entered_is_one_line(cache, writing):
    """Another user's, with mode 700; or one that may be read, but not written to."""
    cache.mkdir(mode=0)
    if writing:
        cache.chmod(0o555)
        for folder in cache.parents:
            if folder.stat().st_uid == os.geteuid() and Path(tempfile.gettempdir()) in folder.parents:
                folder.chmod(folder.stat().st_mode | 0o711)
    options = make_options({"kv_pool": "ragged"}, from_command_line=True)
    view = SimpleNamespace(model_path="m")
    words = "cannot be written to" if writing else "cannot be read"
    with as_nobody(), pytest.raises(RaggedConfigError, match=rf"{words} \(Permission denied\)") as refused:
        calibrating.calibrate_if_missing("gate", CachedProfile(KEY.path), options, view, SimpleNamespace(), 0.3)
    assert f"set {VARIABLE} to another folder" in str(refused.value)
    assert str(cache) in str(refused.value)
    assert "\n" not in str(refused.value)
    if not writing:
        with as_nobody(), pytest.raises(RaggedConfigError, match="Permission denied"):
            calibrating.is_missing(CachedProfile(KEY.path))
        with as_nobody(), pytest.raises(RaggedConfigError, match="cannot be read: Permission denied"):
            load_profile(cache / "p.safetensors")


def test_without_a_home_folder_the_cache_says_what_to_set(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(RaggedConfigError, match="set SGLANG_RAGGED_CACHE to another folder"):
        cache_folder()


# Models with a bundled profile.


@pytest.fixture
def llama_8b(llama, tmp_path) -> Path:
    """The geometry of Llama-3.1-8B, of which there is a bundled profile; no weights."""
    folder = shutil.copytree(llama, tmp_path / "llama-8b", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((BUNDLED_FOLDER / "configs" / "llama-3.1-8b-instruct.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama", "dtype": "bfloat16"}))
    return folder


def test_a_model_with_a_bundled_profile_is_calibrated_like_any_other(llama_8b, cache, monkeypatch):
    def run(command, lock):
        path = Path(command[command.index("-o") + 1])
        made = make_profile(llama_8b, path, scorer="gate", segment=128, codebook=True)
        geometry = ModelGeometry.from_config(json.loads((llama_8b / "config.json").read_text()), "m")
        gates = scorer_statistics("gate", geometry, 4096, np.random.default_rng(0))
        dataclasses.replace(made, statistics=MappingProxyType({**made.statistics, **gates})).save(path)
        return 0

    monkeypatch.setattr(calibration_process, "_run", run)
    plan = settled(llama_8b, "--ragged-profile", "auto")
    assert plan.scorer == "gate"
    assert plan.unfitted is None
    assert Path(plan.profile).parent == cache
    assert plan.source.startswith("budgets from profile")
    # The second start finds it.
    monkeypatch.setattr(calibration_process, "_run", lambda *_: 1)
    assert settled(llama_8b, "--ragged-profile", "auto").digest == plan.digest


def test_a_bundled_profile_is_served_where_it_is_asked_for(llama_8b, llama, calibrations):
    plan = settled(llama_8b, "--ragged-profile", "bundled")
    assert plan.scorer == "keydiff"
    assert Path(plan.profile).parent == BUNDLED_FOLDER
    assert plan.source.startswith("budgets from bundled profile")
    assert "the profile has no codebook" in plan.unfitted
    assert settled(llama_8b, "--ragged-profile", "bundled", "--ragged-scorer", "snapkv").scorer == "snapkv"
    with pytest.raises(SystemExit, match=r"no bundled profile fits .* use --ragged-profile auto") as refused:
        settled(llama, "--ragged-profile", "bundled")
    assert "\n" not in str(refused.value)
    assert not calibrations
