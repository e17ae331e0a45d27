"""Training of gates: what they are to foresee, that they learn it, and that they learn it the same twice."""

from __future__ import annotations

import math

import pytest
import torch

from calib import gate
from sgl_ragged.scorers.gate import Gate

SIZE, HEADS, SEGMENT, LAYERS = 12, 2, 16, 2


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(gate, "STEPS", 200)
    monkeypatch.setattr(gate, "BATCH", 256)


def samples(count: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states [tokens, size], and peaks [heads, tokens] that follow from them, the second not linearly."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(4 * SEGMENT, SIZE, generator=generator) * 3 + 1 for _ in range(count)]
    peaks = [torch.stack([(x[:, 0] / 3).exp(), (x[:, 1] / 3).abs().exp()]) / 100 for x in inputs]
    return inputs, peaks


def test_the_target_is_centred_in_each_segment():
    peaks = torch.tensor([[0.1, 0.1 * math.e, 0.0, 1e-6 * math.e**2]])
    found = gate.target(peaks, 2)
    torch.testing.assert_close(found, torch.tensor([[-0.5], [0.5], [-1.0], [1.0]]))


def test_what_follows_from_hidden_states_is_learned(quick):
    inputs, peaks = samples(24, seed=0)
    goals = [gate.target(p, SEGMENT) for p in peaks]
    weights = [gate.weight(p) for p in peaks]
    tensors, (trained, held_out) = gate.train_layer(inputs, goals, weights, seed=3)
    assert trained < held_out < 0.4
    again, _ = gate.train_layer(inputs, goals, weights, seed=3)
    other, _ = gate.train_layer(inputs, goals, weights, seed=4)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert not torch.equal(tensors["hidden"], other["hidden"])
    # It ranks tokens that it has not seen.
    (new,), (peak,) = samples(1, seed=9)
    scores = Gate().token_scores(new, tensors)
    for head in range(HEADS):
        assert torch.corrcoef(torch.stack([scores[:, head], peak[head].log()]))[0, 1] > 0.8


def test_every_layer_has_its_own_and_serving_gives_the_recorded_scores(quick, tmp_path):
    inputs, peaks = samples(9, seed=1)
    asked: list[int] = []

    def hidden_states(layer):
        asked.append(layer)
        return [(x.flip(1) if layer else x).half() for x in inputs]

    recordings = [{"peaks.all": torch.stack([p, p])} for p in peaks]
    done = []
    trained = gate.train(recordings, hidden_states, SEGMENT, tmp_path, lambda: done.append(1))
    assert len(done) == LAYERS
    assert trained.losses.shape == (LAYERS, 2)
    assert set(trained.statistics) == set(Gate.statistics)
    for name, tensor in trained.statistics.items():
        assert tensor.dtype == torch.float16
        assert tensor.shape[:2] == (LAYERS, 1 if name in Gate.shared_statistics else HEADS)
    scores = trained.scores[0]
    assert scores.shape == (4, LAYERS, HEADS, SEGMENT)
    layer = {name: tensor[1] for name, tensor in trained.statistics.items()}
    want = Gate().token_scores(inputs[0].flip(1).half(), layer)
    torch.testing.assert_close(scores[:, 1].transpose(1, 2).flatten(0, 1), want)
    # Interrupted, it goes on with the layers that are missing, and comes out the same.
    (tmp_path / "gate-all-00001.safetensors").unlink()
    again = gate.train(recordings, hidden_states, SEGMENT, tmp_path, lambda: done.append(1))
    assert asked == [0, 1, 1]
    assert all(torch.equal(tensor, again.statistics[name]) for name, tensor in trained.statistics.items())
    assert (again.losses == trained.losses).all()
