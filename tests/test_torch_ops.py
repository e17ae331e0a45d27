"""The torch operations against a dense mask that spells out the attention semantics, at ragged edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ragged.attention import torch_ops
from sgl_ragged.attention.batch import decode_batch, extend_batch
from sgl_ragged.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import PendingSeal, SlabStore
from sgl_ragged.scorers import get_scorer
from tests.oracle import Tokens, visible

SEGMENT = 64
# 16 is the guard alone and 64 all tokens; between them scores decide.
KEPT = np.array([[16, 48, 32, 64], [32, 32, 32, 32], [64, 64, 64, 64]])


class Sequence:
    """One sequence's queries, keys and values, and what attention over all of it must give."""

    def __init__(self, length: int, layers: int, heads: int, per_head: int, dim: int, scorer: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, layers, heads, per_head, dim, generator=generator)
        self.k = torch.randn(length, layers, heads, dim, generator=generator)
        self.v = torch.randn(length, layers, heads, dim, generator=generator)
        self.gates = torch.rand(length, layers, heads, 1, generator=generator)
        self.scorer = scorer

    def expected(self, kept: np.ndarray) -> torch.Tensor:
        output = torch.empty(self.q.shape, dtype=torch.float64)
        for layer, head in np.ndindex(*kept.shape):
            keys, values = self.k[:, layer, head].double(), self.v[:, layer, head].double()
            queries = self.q[:, layer, head].double()
            tokens = Tokens(
                keys=keys.numpy(),
                values=values.numpy(),
                queries=queries.transpose(0, 1).numpy(),
                scale=0.5,
                gates=self.gates[:, layer, head, 0].double().numpy(),
                statistics=statistics(queries.shape[1], keys.shape[1])[head],
            )
            mask = visible(self.scorer, tokens, int(kept[layer, head]), SEGMENT)
            logits = torch.einsum("tgd,sd->gts", self.q[:, layer, head].double(), keys) * 0.5
            weights = logits.masked_fill(torch.from_numpy(~mask), -torch.inf).softmax(-1)
            output[:, layer, head] = torch.einsum("gts,sd->tgd", weights, values)
        return output


def statistics(per_head: int, dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each head, a query mean [q_per_kv, d] and covariance [q_per_kv, d, d]."""
    rng = np.random.default_rng(11)
    roots = rng.normal(size=(KEPT.shape[1], per_head, dim, dim)) / dim**0.5
    return list(zip(rng.normal(size=(KEPT.shape[1], per_head, dim)), roots @ roots.swapaxes(-1, -2), strict=True))


class Rig:
    """A store with a request table that gives request i row i + 1 and slots of its own, in scattered order."""

    def __init__(
        self, kept: np.ndarray, dim: int, scorer: str, requests: int, segments: int, per_head: int = 2
    ) -> None:
        self.kept = kept
        mean, covariance = (torch.tensor(np.stack(x)).float() for x in zip(*statistics(per_head, dim), strict=True))
        count = requests * segments
        self.store = SlabStore(
            SlabLayout(kept=kept, head_dim=dim, segment=SEGMENT),
            get_scorer(scorer),
            count + 1,
            requests + 1,
            torch.float32,
            "cpu",
            q_per_kv=per_head,
            statistics=[{"query_mean": mean, "query_covariance": covariance}] * len(kept),
        )
        self.store.scales = [0.5] * len(kept)
        # Whatever is read by mistake shows: nothing may depend on memory that was not written.
        self.store.slabs[1:] = 1e4
        self.store.sides[:] = 1e4
        slots = torch.randperm(count, generator=torch.Generator().manual_seed(0)).view(requests, segments) + 1
        locations = slots[:, :, None] * SEGMENT + torch.arange(SEGMENT)
        self.table = torch.zeros(requests + 1, segments * SEGMENT, dtype=torch.int32)
        self.table[1:] = locations.flatten(1)

    def extend(self, sequences: list[Sequence], starts: list[int], ends: list[int]) -> list[torch.Tensor]:
        self.store.flush_seals()
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        batch = extend_batch(self.table, list(range(1, len(sequences) + 1)), starts, lengths, SEGMENT)
        layers = [
            torch_ops.extend(
                self.store,
                layer,
                *self._rows(sequences, starts, ends, layer),
                batch,
                self._sides(sequences, starts, ends, layer),
            )
            for layer in range(len(self.kept))
        ]
        return list(torch.stack(layers, dim=1).split(lengths))

    def decode(self, sequences: list[Sequence], positions: list[int]) -> torch.Tensor:
        self.store.flush_seals()
        rows = torch.arange(1, len(sequences) + 1)
        lengths = torch.tensor(positions) + 1
        batch = decode_batch(self.table, rows, lengths, lengths, SEGMENT)
        for row, position in enumerate(positions, start=1):
            if (position + 1) % SEGMENT == 0:
                slot = int(self.table[row, position]) // SEGMENT
                self.store.defer_seal(PendingSeal(row=row, slot=slot, segment_index=position // SEGMENT))
        ends = [position + 1 for position in positions]
        layers = [
            torch_ops.decode(
                self.store,
                layer,
                *self._rows(sequences, positions, ends, layer),
                batch,
                self._sides(sequences, positions, ends, layer),
            )
            for layer in range(len(self.kept))
        ]
        return torch.stack(layers, dim=1)

    def _rows(self, sequences: list[Sequence], starts: list[int], ends: list[int], layer: int) -> list[torch.Tensor]:
        return [
            torch.cat([getattr(s, name)[a:b, layer] for s, a, b in zip(sequences, starts, ends, strict=True)])
            for name in "qkv"
        ]

    def _sides(self, sequences: list[Sequence], starts: list[int], ends: list[int], layer: int) -> torch.Tensor | None:
        if not self.store.has_sides:
            return None
        source = "gates" if self.store.scorer.reads_hidden_states else "q"
        parts = [getattr(s, source)[a:b, layer] for s, a, b in zip(sequences, starts, ends, strict=True)]
        return torch.cat(parts).flatten(2)


@pytest.mark.parametrize(
    ("scorer", "per_head", "dim"),
    [
        ("keydiff", 1, 64),
        ("keydiff", 4, 128),
        ("key_norm", 8, 64),
        ("value_key_norm", 2, 16),
        ("streaming", 3, 8),
        ("snapkv", 4, 16),
        ("tova", 2, 64),
        ("h2o", 3, 16),
        ("expected_attention", 2, 16),
        ("fastkvzip", 1, 16),
    ],
)
def test_prefill_then_decode_at_ragged_edges(scorer, per_head, dim):
    """Lengths 1, S-1, S, S+1, 2S and 5S+7 in one batch, then decode over a segment border together."""
    lengths = [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 5 * SEGMENT + 7]
    steps = SEGMENT + 2
    sequences = [
        Sequence(length + steps, *KEPT.shape, per_head, dim, scorer, seed) for seed, length in enumerate(lengths)
    ]
    rig = Rig(KEPT, dim, scorer, len(lengths), 8, per_head)
    expected = [sequence.expected(KEPT) for sequence in sequences]
    outputs = rig.extend(sequences, [0] * len(lengths), lengths)
    for output, want, length in zip(outputs, expected, lengths, strict=True):
        torch.testing.assert_close(output.double(), want[:length], atol=1e-4, rtol=1e-4)
    for step in range(steps):
        output = rig.decode(sequences, [length + step for length in lengths])
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 4 * SEGMENT + 9), max_size=6),
    mix=st.integers(0, 3),
    scorer=st.sampled_from(["keydiff", "snapkv", "tova", "h2o", "fastkvzip"]),
)
def test_chunks_of_any_length_give_the_same(cuts, mix, scorer):
    """A prompt in chunks that end anywhere, also inside segments, and with decode steps between, equals one pass."""
    total = 4 * SEGMENT + 10
    sequence = Sequence(total, *KEPT.shape, 2, 8, scorer, seed=3)
    expected = sequence.expected(KEPT)
    rig = Rig(KEPT, 8, scorer, 1, 5)
    borders = [0, *sorted(set(cuts)), total]
    outputs = []
    for begin, end in itertools.pairwise(borders):
        for step in range(min(mix, end - begin)):
            outputs.append(rig.decode([sequence], [begin + step]))
        outputs += rig.extend([sequence], [begin + min(mix, end - begin)], [end])
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=1e-4, rtol=1e-4)


def test_a_foreign_nan_does_not_spread():
    """A request that leaves NaN in its tail and slabs does not touch the next one in the same row and slots."""
    rig = Rig(KEPT, 8, "keydiff", 2, 4)
    poisoned = Sequence(3 * SEGMENT - 1, *KEPT.shape, 2, 8, "keydiff", seed=5)
    for tensor in (poisoned.q, poisoned.k, poisoned.v):
        tensor.fill_(torch.nan)
    rig.extend([poisoned, poisoned], [0, 0], [3 * SEGMENT - 1] * 2)
    lengths = [5, 2 * SEGMENT + 3]
    sequences = [Sequence(length + 1, *KEPT.shape, 2, 8, "keydiff", seed=6 + length) for length in lengths]
    rig.extend(sequences, [0, 0], lengths)
    output = rig.decode(sequences, lengths)
    want = torch.stack([s.expected(KEPT)[n] for s, n in zip(sequences, lengths, strict=True)])
    torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)
