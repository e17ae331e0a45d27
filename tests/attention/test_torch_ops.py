"""The torch operations against a dense mask that spells out the attention semantics, at ragged edges."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.attention import torch_ops
from sgl_ragged.features.history.bound import HistoryBound
from tests.examples import examples
from tests.harness import KEPT, LARGEST, SCALES, SEGMENT, Harness, Sequence


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
    harness = Harness(KEPT, dim, scorer, len(lengths), 8, per_head)
    expected = [sequence.expected(KEPT) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    for output, want, length in zip(outputs, expected, lengths, strict=True):
        torch.testing.assert_close(output.double(), want[:length], atol=1e-4, rtol=1e-4)
    for step in range(steps):
        output = harness.decode(sequences, [length + step for length in lengths])
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)


def test_sinks_take_their_share():
    """A sink is a logit more in the softmax of every query of its head."""
    lengths = [1, SEGMENT + 1, 3 * SEGMENT + 7]
    sinks = torch.randn(*KEPT.shape, 2, generator=torch.Generator().manual_seed(5)) * 2
    sequences = [Sequence(length + 2, *KEPT.shape, 2, 16, "keydiff", seed) for seed, length in enumerate(lengths)]
    harness = Harness(KEPT, 16, "keydiff", len(lengths), 8, 2, sinks=sinks)
    expected = [sequence.expected(KEPT, sinks=sinks) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    for output, want, length in zip(outputs, expected, lengths, strict=True):
        torch.testing.assert_close(output.double(), want[:length], atol=1e-5, rtol=1e-4)
    for step in range(2):
        output = harness.decode(sequences, [length + step for length in lengths], padding=1)
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scorer", ["keydiff", "value_key_norm", "snapkv", "expected_attention", "fastkvzip"])
@pytest.mark.parametrize("dtype", LARGEST)
def test_an_fp8_cache_is_attended_and_scored_as_it_was_stored(dtype, scorer):
    """In chunks and by decode steps: what a token is taken for does not depend on whether it came from the cache."""
    lengths, steps = [1, SEGMENT + 1, 3 * SEGMENT - 2], 4
    sequences = [Sequence(n + steps, *KEPT.shape, 2, 16, scorer, seed) for seed, n in enumerate(lengths)]
    # Some that no FP8 cache holds, so that they are saturated.
    for sequence in sequences:
        sequence.v[0, :, :, 0] = 1e9
    harness = Harness(KEPT, 16, scorer, len(lengths), 5, dtype=dtype)
    expected = [sequence.stored(dtype, SCALES).expected(KEPT) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    for step in range(steps):
        outputs.append(harness.decode(sequences, [length + step for length in lengths]))
    want = [e[:n] for e, n in zip(expected, lengths, strict=True)]
    want += [torch.stack([e[n + step] for e, n in zip(expected, lengths, strict=True)]) for step in range(steps)]
    for output, right in zip(outputs, want, strict=True):
        torch.testing.assert_close(output.double(), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("segments_at_once", [1, 7, 20])
def test_decode_in_parts_gives_the_same(segments_at_once, monkeypatch):
    """Requests that gather more than fits a cache attend one after the other; the longest decides how many at once."""
    lengths = [1, 5 * SEGMENT + 7, SEGMENT, 3 * SEGMENT + 1, 2 * SEGMENT, SEGMENT - 1, 1]
    sequences = [Sequence(length + 2, *KEPT.shape, 2, 16, "keydiff", seed) for seed, length in enumerate(lengths)]
    harness = Harness(KEPT, 16, "keydiff", len(lengths), 8, 2)
    harness.extend(sequences, [0] * len(lengths), lengths)
    widest = 4 * SEGMENT * 2 * 16 * 4
    monkeypatch.setattr(torch_ops, "CACHE_BYTES", segments_at_once * widest)
    parts = []
    attend = torch_ops._attend_part_of_batch
    monkeypatch.setattr(torch_ops, "_attend_part_of_batch", lambda *a: parts.append(len(a[2])) or attend(*a))
    output = harness.decode(sequences, lengths)
    want = torch.stack([s.expected(KEPT)[length] for s, length in zip(sequences, lengths, strict=True)])
    torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)
    # Seven requests of up to five segments are 35 of them: in 35, 5 and 2 pieces, as even as they can be.
    assert parts == {1: [1] * 7, 7: [2, 2, 2, 1], 20: [4, 3]}[segments_at_once] * len(KEPT)


@examples(20)
@given(
    cuts=st.lists(st.integers(1, 4 * SEGMENT + 9), max_size=6),
    mix=st.integers(0, 3),
    scorer=st.sampled_from(["keydiff", "snapkv", "tova", "h2o", "fastkvzip"]),
    dtype=st.sampled_from([torch.float32, *LARGEST]),
)
def test_chunks_of_any_length_give_the_same(cuts, mix, scorer, dtype):
    """A prompt in chunks that end anywhere, also inside segments, and with decode steps between, equals one pass."""
    total = 4 * SEGMENT + 10
    sequence = Sequence(total, *KEPT.shape, 2, 8, scorer, seed=3)
    expected = sequence.stored(dtype, SCALES).expected(KEPT)
    harness = Harness(KEPT, 8, scorer, 1, 5, dtype=dtype)
    borders = [0, *sorted(set(cuts)), total]
    outputs = []
    for begin, end in itertools.pairwise(borders):
        for step in range(min(mix, end - begin)):
            outputs.append(harness.decode([sequence], [begin + step]))
        outputs += harness.extend([sequence], [begin + min(mix, end - begin)], [end])
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=1e-4, rtol=1e-4)


def test_a_foreign_nan_does_not_spread():
    """A request that leaves NaN in its tail and slabs does not touch the next one in the same row and slots."""
    harness = Harness(KEPT, 8, "keydiff", 2, 4)
    poisoned = Sequence(3 * SEGMENT - 1, *KEPT.shape, 2, 8, "keydiff", seed=5)
    for tensor in (poisoned.q, poisoned.k, poisoned.v):
        tensor.fill_(torch.nan)
    harness.extend([poisoned, poisoned], [0, 0], [3 * SEGMENT - 1] * 2)
    lengths = [5, 2 * SEGMENT + 3]
    sequences = [Sequence(length + 1, *KEPT.shape, 2, 8, "keydiff", seed=6 + length) for length in lengths]
    harness.extend(sequences, [0, 0], lengths)
    output = harness.decode(sequences, lengths)
    want = torch.stack([s.expected(KEPT)[n] for s, n in zip(sequences, lengths, strict=True)])
    torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)


BOUNDS = (HistoryBound(2, "recency"), HistoryBound(3, "value_key_norm"))


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_views_may_leave_segments_out(bound):
    """Every query segment sees a few of the segments before it, in prefill and in decode."""
    lengths = [6 * SEGMENT + 7, SEGMENT - 1, 3 * SEGMENT]
    steps = SEGMENT + 2
    sequences = [Sequence(n + steps, *KEPT.shape, 2, 16, "keydiff", seed) for seed, n in enumerate(lengths)]
    harness = Harness(KEPT, 16, "keydiff", len(lengths), 8, bound=bound)
    expected = [sequence.expected(KEPT, sequence.seen(bound)) for sequence in sequences]
    # A segment at a time: what leaves is known one ahead.
    for begin in range(0, max(lengths), SEGMENT):
        starts, ends = [min(begin, n) for n in lengths], [min(begin + SEGMENT, n) for n in lengths]
        outputs = harness.extend(sequences, starts, ends)
        for output, want, start, end in zip(outputs, expected, starts, ends, strict=True):
            torch.testing.assert_close(output.double(), want[start:end], atol=1e-4, rtol=1e-4)
    for step in range(steps):
        output = harness.decode(
            sequences,
            [length + step for length in lengths],
        )
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-4, rtol=1e-4)
