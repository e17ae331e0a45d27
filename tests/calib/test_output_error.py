"""Error curves: their definition against a dense computation, and the residual stream of made-up layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calib.output_error import error_curves, kept_counts, left_over, query_positions, weighed
from calib.residual_stream import ResidualStream
from sgl_ragged.fitting.references import References
from sgl_ragged.scorers import rank_positions
from tests.fitting.test_attention_matching import DIM, HEADS, SCALE, SEGMENT, codebook

PER_HEAD, SEGMENTS, WIDTH = 2, 3, 24
LENGTH = SEGMENTS * SEGMENT + 20


def content() -> tuple[torch.Tensor, ...]:
    """Queries [T, heads, q_per_kv, d] times the scale, keys, values [heads, T, d], scores, a projection, a stream."""
    generator = torch.Generator().manual_seed(3)
    shapes = (LENGTH, HEADS, PER_HEAD, DIM), (HEADS, LENGTH, DIM), (HEADS, LENGTH, DIM), (SEGMENTS, HEADS, SEGMENT)
    queries, *rest = (torch.randn(shape, generator=generator) for shape in shapes)
    shapes = (HEADS * PER_HEAD * DIM, WIDTH), (LENGTH, WIDTH)
    return 2 * SCALE * queries, *rest, *(torch.randn(shape, generator=generator) for shape in shapes)


def found(references: References | None = None) -> torch.Tensor:
    queries, keys, values, scores, projection, stream = content()
    positions = query_positions(LENGTH, SEGMENT)

    def behind(outputs: torch.Tensor):
        return lambda change: change @ projection, (stream[positions] + outputs @ projection).square().sum(dim=1)

    ranked = rank_positions(scores, torch.arange(SEGMENTS) == 0)
    return left_over(queries[positions], keys, values, positions, ranked, references, behind)


def test_errors_are_what_the_definition_says():
    queries, keys, values, scores, projection, stream = (x.double().numpy() for x in content())
    ranked = rank_positions(torch.from_numpy(scores), torch.arange(SEGMENTS) == 0).numpy()

    def outputs(head: int, kept: np.ndarray) -> np.ndarray:
        """[T, q_per_kv, d] of queries that see their own segment and `kept`, bool [T], of those before."""
        answers = []
        for place in range(SEGMENT, LENGTH):
            own = np.arange(LENGTH) // SEGMENT == place // SEGMENT
            seen = (own | kept) & (np.arange(LENGTH) <= place)
            logits = queries[place, head] @ keys[head, seen].T
            shares = np.exp(logits - logits.max(1, keepdims=True))
            answers.append(shares / shares.sum(1, keepdims=True) @ values[head, seen])
        return np.stack(answers)

    everything = np.stack([outputs(head, np.ones(LENGTH, bool)) for head in range(HEADS)], axis=1)
    flat = (LENGTH - SEGMENT, -1)
    squares = np.square(stream[SEGMENT:] + everything.reshape(flat) @ projection).sum(1)
    for head in range(HEADS):
        for count, error in zip(kept_counts(SEGMENT), found()[head], strict=True):
            kept = np.zeros(LENGTH, bool)
            for segment in range(SEGMENTS):
                kept[segment * SEGMENT + ranked[segment, head, :count]] = True
            change = np.zeros_like(everything)
            change[:, head] = outputs(head, kept) - everything[:, head]
            wanted = (np.square(change.reshape(flat) @ projection).sum(1) / squares).mean()
            assert error == pytest.approx(wanted, rel=1e-4)


def test_what_is_fitted_leaves_less():
    """By queries like those that ask: the sample's own, as they are seen from a segment's end."""
    book = codebook()
    queries = content()[0].transpose(0, 1).flatten(1, 2)[:, : book["codebook_queries"].shape[1]] / SCALE
    book["codebook_queries"] = queries.half()
    book["rope_frequencies"] = torch.zeros_like(book["rope_frequencies"])
    # Where most tokens are kept, queries at random leave nothing to gain.
    assert (found(References.from_statistics(book, SCALE)) < 0.9 * found())[:, 0].all()


def test_curves_fall_to_nothing_and_weigh_coverage():
    assert kept_counts(256) == (16, 48, 96, 160, 224)
    assert kept_counts(32) == (16,)
    errors = np.array([[[0.1, 0.2, 0.01, 0.001, 0.0]]])
    curve = error_curves(errors, 256)[0, 0]
    assert (np.diff(curve) <= 0).all()
    assert curve[[0, 2, 5, 9, 15]] == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.0])
    coverage = np.linspace(1, 4, 16)[None, None]
    steps = np.diff(weighed(coverage, error_curves(errors, 256)))[0, 0]
    assert steps == pytest.approx(np.sqrt(0.2 * -np.diff(curve)))
    assert weighed(coverage, error_curves(errors, 256))[0, 0, 0] == pytest.approx(steps[0])
    assert weighed(coverage, error_curves(np.zeros((1, 1, 5)), 256)).max() < 1e-3


class RowParallelLinear(torch.nn.Linear):
    tp_size = 1


class Attention(torch.nn.Module):
    layer_id, tp_k_head_num, sliding_window_size = 0, 1, -1

    def __init__(self, look) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = x.tanh()
        self.look(outputs)
        return outputs


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x if residual is None else x + residual
        return self.weight * x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()


class Layer(torch.nn.Module):
    def __init__(self, look, *, sandwich: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        if sandwich:
            self.pre_feedforward_layernorm = Norm()
        self.self_attn = torch.nn.Module()
        self.self_attn.attn, self.self_attn.o_proj = Attention(look), RowParallelLinear(WIDTH, WIDTH, bias=not sandwich)
        self.sandwich = sandwich

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        outputs = self.self_attn.attn(self.input_layernorm(hidden, residual=residual))
        return hidden + residual + self.added(outputs)

    def added(self, outputs: torch.Tensor) -> torch.Tensor:
        found = self.self_attn.o_proj(outputs)
        return self.post_attention_layernorm(found) if self.sandwich else found


@pytest.mark.parametrize("sandwich", [False, True])
@torch.no_grad()
def test_the_stream_is_what_layers_add_to(sandwich):
    torch.manual_seed(1)
    looks, positions = [], torch.tensor([4, 1, 7])

    def look(outputs: torch.Tensor) -> None:
        assert stream.known
        apply, squares = stream.after_attention(outputs[positions])
        change = 1e-3 * torch.randn(3, WIDTH)
        looks.append((outputs[positions], squares, change, apply(change)))

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Layer(look, sandwich=sandwich) for _ in range(2)])
    stream = ResidualStream.hook_into(model, lambda length: positions if length > 3 else None)
    hidden = torch.randn(9, WIDTH)
    for layer in model.layers:
        after = layer(hidden, torch.randn(9, WIDTH))
        own, squares, change, found = looks.pop()
        bias = 0.0 if sandwich else layer.self_attn.o_proj.bias
        torch.testing.assert_close(squares, (after[positions] - bias).square().sum(dim=1), rtol=1e-4, atol=1e-4)
        wanted = layer.added(own + change) - layer.added(own)
        if sandwich:
            # The size of what is normed changes, too: along itself a change does nothing.
            unit = layer.self_attn.o_proj(own)
            unit = unit / unit.norm(dim=1, keepdim=True)
            plain = layer.self_attn.o_proj(change)
            across = (plain * unit).sum(dim=1, keepdim=True) * unit
            found = found * (plain - across) / plain
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-5)
        hidden = after
    # Nothing is looked at in passes of few tokens.
    before = stream._stream
    model.layers[0].input_layernorm(torch.randn(2, WIDTH))
    assert stream._stream is before


def test_models_of_other_parts_are_not_looked_at():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Layer(None, sandwich=False)])
    model.layers[0].self_attn.o_proj.tp_size = 2
    assert ResidualStream.hook_into(model, lambda _: None) is None
    model.layers[0].self_attn.o_proj = torch.nn.Linear(WIDTH, WIDTH)
    assert ResidualStream.hook_into(model, lambda _: None) is None
