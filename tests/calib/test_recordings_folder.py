"""The folder of recordings: what is taken over from runs that ended, what fits on the disk, and what if it is full."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from calib import disk, recordings_folder
from calib.__main__ import is_full, main
from calib.disk import disk_need
from calib.hidden_states import HiddenStates
from calib.recorder import Recorder, failure_file, hidden_states_recording
from calib.recording import HIDDEN_STATES
from calib.recordings_folder import claim, save
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry
from tests.calib.test_recorder import content, make_settings, record

SAMPLES = [TokenizedSample("t", tuple(range(n, n + 600))) for n in range(3)]
GEOMETRY = ModelGeometry("m", "f", num_layers=6, num_heads=2, q_per_kv=2, head_dim=64)


def test_recordings_of_the_same_settings_are_taken_over(tmp_path):
    wanted, other = make_settings(), make_settings(segment=64)
    for name, settings in (("same", wanted), ("another", other)):
        claim(tmp_path / name, settings)
        save({"x": torch.tensor(len(name))}, tmp_path / name / f"sample-{name}.safetensors")
    (tmp_path / "same" / "sample-half.partial").write_text("not whole")
    (tmp_path / "never begun").mkdir()
    left = [tmp_path / name for name in ("same", "another", "never begun")]
    claim(tmp_path / "new", wanted, left)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["sample-same.safetensors", "settings.json"]
    assert int(load_file(tmp_path / "new" / "sample-same.safetensors")["x"]) == 4
    assert not any(folder.exists() for folder in left)
    with pytest.raises(RaggedConfigError, match="other settings or data"):
        claim(tmp_path / "new", other)


def test_another_device_records_the_same():
    one, other, third = (make_settings(engine_args=args) for args in ({"base_gpu_id": 1}, {}, {"quantization": "fp8"}))
    assert one.text() == other.text() != third.text()


# What fits


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes the disk says are free."""

    def say(count: int) -> None:
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=count))

    return say


def need(folder, hidden_size=512, at_a_time=None):
    return disk_need(
        folder, GEOMETRY, hidden_size, SAMPLES, 256, num_scorers=1, trained=True, max_hidden_states_bytes=at_a_time
    )


OF_LAYER = 2 * 512 * 3 * 512
"""Bytes: float16, of two segments that others follow in each of three samples."""


def test_hidden_states_are_kept_at_once_where_they_fit(tmp_path, free):
    free(1 << 40)
    found = need(tmp_path)
    assert (found.layers_at_once, found.hidden_states_bytes) == (6, 6 * OF_LAYER)
    assert "times" not in str(found)
    assert found.hidden_states_bytes + found.recordings_bytes < found.needed_bytes
    assert found.needed_bytes < 2 * (found.hidden_states_bytes + found.recordings_bytes)


@pytest.mark.parametrize(("layers", "passes"), [(1, 6), (2, 3), (4, 2), (5, 2)])
def test_no_more_of_them_than_was_said(tmp_path, free, layers, passes):
    free(1 << 40)
    found = need(tmp_path, at_a_time=layers * OF_LAYER + 5)
    assert found.layers_at_once == layers
    assert f"through the model {passes} times, for {layers} layers each" in str(found)
    with pytest.raises(RaggedConfigError, match=f"one layer.s hidden states take {OF_LAYER} bytes"):
        need(tmp_path, at_a_time=OF_LAYER - 1)


def test_half_of_what_is_free_is_left(tmp_path, free):
    free(1 << 40)
    recordings = need(tmp_path).recordings_bytes
    free(recordings + 2 * 4 * OF_LAYER)
    assert need(tmp_path).layers_at_once == 4
    # What an interrupted run has left is no less free than before.
    (tmp_path / "sample").write_bytes(bytes(OF_LAYER))
    free(recordings + 7 * OF_LAYER)
    assert need(tmp_path).layers_at_once == 4


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path, free):
    free(1000)
    with pytest.raises(RaggedConfigError, match=r"calibration needs \d+ bytes .* where 1000 bytes") as refused:
        need(tmp_path)
    assert "\n" not in str(refused.value)


# Some layers at a time


class Model:
    """Stands for the engine: hidden states say of which layer and sample they are."""

    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def record(self, sample, layers, *, alone):
        assert alone
        self.asked.append((sample.input_ids[0], layers))
        states = torch.tensor([[[10.0 * layer + sample.input_ids[0]]] for layer in layers]).half()
        save_file({HIDDEN_STATES: states}, hidden_states_recording(self.folder))
        return {}


def test_hidden_states_come_some_layers_at_a_time_and_go_behind(tmp_path):
    model = Model(tmp_path)
    hidden = HiddenStates(model, SAMPLES, tmp_path, at_once=4, layers=6)
    for layer in range(6):
        assert [float(states) for states in hidden.layer(layer)] == [10 * layer + n for n in range(3)]
        assert len(list(tmp_path.iterdir())) == 3
    assert model.asked == [(n, span) for span in (range(0, 4), range(4, 6)) for n in range(3)]
    # What is there is not recorded again, whatever was there beside it.
    next(tmp_path.glob("sample-00001*")).unlink()
    model.asked.clear()
    assert [float(states) for states in hidden.layer(5)] == [50, 51, 52]
    assert model.asked == [(1, range(5, 6))]


def test_the_recorder_writes_the_layers_that_are_wanted(tmp_path):
    hidden = torch.randn(2, 200, 5)
    recorder = Recorder(str(tmp_path), ("keydiff",), reads_hidden_states=True)
    (tmp_path / "layers.json").write_text("[1, 2, false]")
    beside = record(recorder, content(seed=2), [], hidden)
    states = load_file(hidden_states_recording(tmp_path))[HIDDEN_STATES]
    assert len(states) == 1
    assert torch.equal(states[0], hidden[1, : states.shape[1]].half())
    hidden_states_recording(tmp_path).unlink()
    # Nothing else, in another pass: the recording stays as it was.
    (tmp_path / "layers.json").write_text("[0, 2, true]")
    again = record(recorder, content(seed=3), [], hidden)
    assert all(torch.equal(beside[name], again[name]) for name in beside)
    assert torch.equal(load_file(hidden_states_recording(tmp_path))[HIDDEN_STATES][1:], states)


# A full disk


FULL = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: ... (os error 28)")]


@pytest.mark.parametrize("error", FULL, ids=["python", "safetensors"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch, error):
    claim(tmp_path, make_settings())
    save({"x": torch.tensor(1)}, tmp_path / "sample-00000.safetensors")

    def fails(tensors, name, **_):
        with open(name, "w") as file:
            file.write("half")
        raise error

    monkeypatch.setattr(recordings_folder, "save_file", fails)
    with pytest.raises(type(error)) as raised:
        save({"x": torch.tensor(2)}, tmp_path / "sample-00000.safetensors")
    assert is_full(raised.value)
    assert int(load_file(tmp_path / "sample-00000.safetensors")["x"]) == 1
    assert not list(tmp_path.glob("*.partial"))
    monkeypatch.setattr("calib.run.run", lambda _: save({"x": torch.tensor(2)}, tmp_path / "y.safetensors"))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--model", "m", "-o", "p"])
    assert "make room on that disk" in str(ended.value.code)
    assert "\n" not in str(ended.value.code)


def test_other_errors_are_no_full_disk():
    assert not is_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_full(SafetensorError("header too large"))


@pytest.mark.parametrize("error", FULL, ids=["python", "safetensors"])
def test_a_recorder_that_cannot_write_says_why(tmp_path, monkeypatch, error):
    """It runs in a worker, where an exception would end in tracebacks of three processes."""
    recorder = Recorder(str(tmp_path), ("keydiff",))
    record(recorder, content(seed=2), [])

    def fails(*_):
        raise error

    monkeypatch.setattr("calib.recorder.save_file", fails)
    with pytest.raises(FileNotFoundError):
        record(recorder, content(seed=2), [])
    assert failure_file(tmp_path).read_text() == str(error)
