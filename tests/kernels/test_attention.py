"""Triton attention in the interpreter against the dense mask, at ragged edges."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_ragged.attention import triton_ops
from tests.attention.test_torch_ops import BOUNDS
from tests.harness import KEPT, LARGEST, SCALES, SEGMENT, Harness, Kernel, Sequence
from tests.kernels.operations import TRITON, triton_operations, triton_sealer

MIXED, FULL = KEPT[:1], KEPT[2:]
EDGES = [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 4 * SEGMENT + 7]
LONG = [10 * SEGMENT + 7]
SHORT = [1, SEGMENT, 3 * SEGMENT + 7]


thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


def harness_for(kept, dim, scorer, requests, segments, per_head, method="exact", dtype=torch.float32) -> Harness:
    kernel = Kernel(functools.partial(triton_operations, method=method), triton_sealer)
    return Harness(kept, dim, scorer, requests, segments, per_head, kernel=kernel, dtype=dtype)


@pytest.mark.parametrize(
    ("kept", "scorer", "per_head", "dim", "method", "lengths"),
    [
        (MIXED, "keydiff", 4, 64, "exact", EDGES),
        thorough(MIXED, "keydiff", 4, 64, "exact", LONG),
        thorough(FULL, "keydiff", 2, 64, "exact", SHORT),
        (MIXED, "key_norm", 1, 128, "algorithm1", SHORT),
        thorough(MIXED, "value_key_norm", 8, 16, "uniform", SHORT),
        (MIXED, "value_key_norm", 2, 16, "uniform", [SEGMENT + 7]),
        thorough(MIXED, "streaming", 3, 32, "none", SHORT),
        thorough(MIXED, "keydiff", 16, 16, "exact", [SEGMENT + 7]),
        thorough(MIXED, "keydiff", 2, 256, "exact", SHORT),
        thorough(MIXED, "snapkv", 2, 16, "exact", SHORT),
        thorough(MIXED, "h2o", 5, 16, "exact", SHORT),
        thorough(KEPT[:2], "expected_attention", 2, 16, "exact", SHORT),
        (MIXED, "fastkvzip", 1, 16, "exact", SHORT),
        # Rows that are narrower than the tiles they are in.
        (MIXED, "keydiff", 4, 80, "exact", [1, SEGMENT - 1, SEGMENT + 1]),
        (MIXED, "value_key_norm", 2, 96, "uniform", [1, SEGMENT + 7]),
        thorough(MIXED, "keydiff", 2, 48, "exact", SHORT),
        thorough(MIXED, "key_norm", 3, 160, "algorithm1", SHORT),
        thorough(MIXED, "keydiff", 2, 240, "exact", [SEGMENT + 7]),
    ],
)
def test_prefill_in_one_launch_then_decode_with_padding(kept, scorer, per_head, dim, method, lengths):
    """All lengths in one batch; then decode steps, which cross segment borders, with padded rows of length 0 and 1."""
    steps = 2
    sequences = [Sequence(n + steps, *kept.shape, per_head, dim, scorer, seed) for seed, n in enumerate(lengths)]
    harness = harness_for(kept, dim, scorer, len(lengths), 12, per_head, method)
    expected = [sequence.expected(kept) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    for output, want, length in zip(outputs, expected, lengths, strict=True):
        torch.testing.assert_close(output.double(), want[:length], atol=1e-5, rtol=1e-4)
    for step in range(steps):
        output = harness.decode(sequences, [length + step for length in lengths], padding=2)
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [SHORT, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_sinks_take_their_share(lengths):
    """Heads of one CTA and of several, in prefill and in decode."""
    sinks = torch.randn(*MIXED.shape, 2, generator=torch.Generator().manual_seed(5)) * 2
    sequences = [Sequence(length + 1, *MIXED.shape, 2, 80, "keydiff", seed) for seed, length in enumerate(lengths)]
    harness = Harness(MIXED, 80, "keydiff", len(lengths), 12, kernel=TRITON, sinks=sinks)
    expected = [sequence.expected(MIXED, sinks=sinks) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    outputs.append(harness.decode(sequences, lengths, padding=1))
    want = [e[:length] for e, length in zip(expected, lengths, strict=True)]
    want.append(torch.stack([e[length] for e, length in zip(expected, lengths, strict=True)]))
    for output, right in zip(outputs, want, strict=True):
        torch.testing.assert_close(output.double(), right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bound", [pytest.param(BOUNDS[0], marks=pytest.mark.thorough), BOUNDS[1]], ids=str)
def test_views_may_leave_segments_out(bound):
    """Every query segment sees a few of the segments before it."""
    lengths, steps = [5 * SEGMENT + 7, SEGMENT - 1], 2
    sequences = [Sequence(n + steps, *MIXED.shape, 2, 16, "keydiff", seed) for seed, n in enumerate(lengths)]
    harness = Harness(MIXED, 16, "keydiff", len(lengths), 7, kernel=TRITON, bound=bound)
    expected = [sequence.expected(MIXED, sequence.seen(bound)) for sequence in sequences]
    outputs, want = [], []
    # What leaves is known one segment ahead; the first three need not know.
    for begin, stop in ((0, 3), (3, 4), (4, 6)):
        starts, ends = [min(begin * SEGMENT, n) for n in lengths], [min(stop * SEGMENT, n) for n in lengths]
        outputs += harness.extend(sequences, starts, ends)
        want += [e[start:end] for e, start, end in zip(expected, starts, ends, strict=True)]
    for step in range(steps):
        outputs.append(harness.decode(sequences, [length + step for length in lengths]))
    want += [torch.stack([e[n + step] for e, n in zip(expected, lengths, strict=True)]) for step in range(steps)]
    for output, right in zip(outputs, want, strict=True):
        torch.testing.assert_close(output.double(), right, atol=1e-5, rtol=1e-4)


CUTS = ([SEGMENT - 3, SEGMENT + 5], [10, 20, 3 * SEGMENT], [2 * SEGMENT, 2 * SEGMENT + 1])
SCORERS = ("keydiff", "snapkv", "fastkvzip")


@pytest.mark.parametrize(
    ("scorer", "cuts", "dtype"),
    [
        (SCORERS[0], CUTS[0], torch.float32),
        *(
            thorough(scorer, cuts, dtype)
            for scorer, cuts, dtype in itertools.product(SCORERS, CUTS, (torch.float32, *LARGEST))
            if (scorer, cuts, dtype) != (SCORERS[0], CUTS[0], torch.float32)
        ),
    ],
)
def test_chunks_and_decode_steps_in_turn_give_the_same(scorer, cuts, dtype):
    """Chunks that start and end anywhere, each after three decode steps, equal one pass."""
    total, kept = 3 * SEGMENT + 10, KEPT[:2]
    sequence = Sequence(total, *kept.shape, 2, 16, scorer, seed=3)
    harness = harness_for(kept, 16, scorer, 1, 5, 2, dtype=dtype)
    outputs = []
    for begin, end in itertools.pairwise([0, *cuts, total]):
        steps = min(3, end - begin)
        outputs += [harness.decode([sequence], [begin + step]) for step in range(steps)]
        if begin + steps < end:
            outputs += harness.extend([sequence], [begin + steps], [end])
    want = sequence.stored(dtype, SCALES).expected(kept)
    torch.testing.assert_close(torch.cat(outputs).double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("chunks", "per_head", "dim", "with_sinks"),
    [([3], 2, 96, True), thorough([3], 2, 96, False), thorough([1, 5, 8], 4, 16, False)],
)
def test_short_chunks_after_long_histories_are_divided_and_merged(chunks, per_head, dim, with_sinks, monkeypatch):
    """Histories of different lengths; parts without rows; the last part alone sees tail and chunk."""
    sinks = None
    if with_sinks:
        sinks = torch.randn(*MIXED.shape, per_head, generator=torch.Generator().manual_seed(5)) * 2
    monkeypatch.setattr(triton_ops, "LONG_CONTEXT", 3 * SEGMENT)
    begins = [3 * SEGMENT + 5, 6 * SEGMENT, 7][: len(chunks)]
    ends = [begin + chunk for begin, chunk in zip(begins, chunks, strict=True)]
    sequences = [Sequence(end, *MIXED.shape, per_head, dim, "key_norm", seed) for seed, end in enumerate(ends)]
    harness = Harness(MIXED, dim, "key_norm", len(chunks), 8, per_head, kernel=TRITON, sinks=sinks)
    harness.extend(sequences, [0] * len(chunks), begins)
    described = []
    describe = harness.operations.describe_extend
    monkeypatch.setattr(
        harness.operations, "describe_extend", lambda *a: described.append(describe(*a)) or described[-1]
    )
    outputs = harness.extend(sequences, begins, ends)
    assert described[0].scratch is not None
    assert len(described[0].work[0].ctas) > MIXED.shape[1]
    for output, sequence, begin in zip(outputs, sequences, begins, strict=True):
        want = sequence.expected(MIXED, sinks=sinks)[begin:]
        torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)


def test_half_precision_is_as_good_as_its_inputs():
    lengths = [SEGMENT + 1, 4 * SEGMENT + 7]
    sequences = [Sequence(n + 1, *MIXED.shape, 4, 64, "keydiff", seed) for seed, n in enumerate(lengths)]
    for sequence in sequences:
        # Rounded first, so that scores see what the cache holds.
        sequence.q, sequence.k, sequence.v = (x.half().float() for x in (sequence.q, sequence.k, sequence.v))
    harness = harness_for(MIXED, 64, "keydiff", 2, 6, 4, dtype=torch.float16)
    harness.store.slabs[:] = torch.nan
    outputs = harness.extend(sequences, [0, 0], lengths)
    outputs.append(harness.decode(sequences, lengths, padding=1))
    expected = [sequence.expected(MIXED) for sequence in sequences]
    want = [*(e[:-1] for e in expected), torch.stack([e[-1] for e in expected])]
    for output, right in zip(outputs, want, strict=True):
        assert output.dtype == torch.float16
        torch.testing.assert_close(output.double(), right, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("dtype", "scorer"),
    [
        (torch.float8_e4m3fn, "keydiff"),
        (torch.float8_e5m2, "value_key_norm"),
        thorough(torch.float8_e4m3fn, "snapkv"),
        thorough(torch.float8_e5m2, "key_norm"),
    ],
)
def test_an_fp8_cache_is_attended_and_scored_as_it_was_stored(dtype, scorer):
    """A chunk that seals, one that starts in a tail, and decode steps over a segment border, with saturated values."""
    lengths, starts, ends = [SEGMENT + 5, 7], [2 * SEGMENT + 3, SEGMENT - 1], [2 * SEGMENT + 9, SEGMENT + 2]
    sequences = [Sequence(n + 2, *MIXED.shape, 2, 16, scorer, seed) for seed, n in enumerate(ends)]
    for sequence in sequences:
        sequence.v[0, :, :, 0] = 1e9
    harness = harness_for(MIXED, 16, scorer, 2, 4, 2, dtype=dtype)
    expected = [sequence.stored(dtype, SCALES).expected(MIXED) for sequence in sequences]
    found = [[], []]
    for begin, end in itertools.pairwise([[0, 0], lengths, starts, ends]):
        for own, output in zip(found, harness.extend(sequences, begin, end), strict=True):
            own.append(output)
    for step in range(2):
        for own, output in zip(found, harness.decode(sequences, [end + step for end in ends], padding=1), strict=True):
            own.append(output[None])
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(own).double(), right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kept", [np.array([[32]]), thorough(np.array([[16, 16, 64, 64, 48, 48, 16, 16]]))])
def test_one_head_and_eight(kept):
    lengths = [2 * SEGMENT + 9, 5]
    sequences = [Sequence(n + 1, *kept.shape, 2, 16, "key_norm", seed) for seed, n in enumerate(lengths)]
    harness = harness_for(kept, 16, "key_norm", 2, 4, 2)
    outputs = harness.extend(sequences, [0, 0], lengths)
    outputs.append(harness.decode(sequences, lengths))
    expected = [sequence.expected(kept) for sequence in sequences]
    want = [*(e[:-1] for e in expected), torch.stack([e[-1] for e in expected])]
    for output, right in zip(outputs, want, strict=True):
        torch.testing.assert_close(output.double(), right, atol=1e-5, rtol=1e-4)


class NoWaiting(TorchDispatchMode):
    """Fails on operations that make the host wait for a device, as those do whose result has a shape unknown to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "item")
        assert not any(name in str(func) for name in forbidden), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scorer", ["keydiff", *map(thorough, ("key_norm", "value_key_norm", "streaming"))])
def test_a_decode_step_and_its_seals_do_not_wait_for_the_device(scorer, monkeypatch):
    """And the buffers stay where they are: a description made for other requests reads what the last one wrote."""
    kept, lengths = KEPT[:2], [SEGMENT - 1, 2 * SEGMENT + 5]
    sequences = [Sequence(n + 2, *kept.shape, 2, 16, scorer, seed) for seed, n in enumerate(lengths)]
    harness = harness_for(kept, 16, scorer, 2, 4, 2)
    harness.extend(sequences, [0, 0], lengths)
    operations = harness.operations
    captured = operations.describe_decode(harness.table, torch.zeros(2, dtype=torch.int64), *[torch.ones(2).int()] * 2)
    describe = operations.describe_decode

    def refill(*arguments):
        with NoWaiting():
            describe(*arguments)
        return captured

    monkeypatch.setattr(operations, "describe_decode", refill)
    decode, flush = operations.decode, harness.store.flush_pending_seals
    sealed_layers = []

    def quiet_decode(*arguments):
        with NoWaiting():
            return decode(*arguments)

    def quiet_seal():
        with NoWaiting():
            sealed_layers.append(harness.store.has_pending)
            flush()

    monkeypatch.setattr(operations, "decode", quiet_decode)
    monkeypatch.setattr(harness.store, "flush_pending_seals", quiet_seal)
    expected = [sequence.expected(kept) for sequence in sequences]
    for step in range(2):
        output = harness.decode(sequences, [length + step for length in lengths])
        want = torch.stack([e[length + step] for e, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)
    assert sealed_layers == [False, True]


def test_a_batch_larger_than_the_buffers_is_an_error():
    harness = harness_for(MIXED, 16, "keydiff", 1, 2, 2)
    size = 13
    with pytest.raises(RuntimeError):
        harness.operations.describe_decode(
            harness.table, torch.zeros(size, dtype=torch.int64), *[torch.ones(size).int()] * 2
        )
