"""Slabs of few bits in Triton's interpreter: the bits that torch stores, and attention against a dense mask."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels import codes, seal
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.quantise import stored_rows
from sgl_ragged.mem_pool.slab_format import FORMATS, INT8
from tests.harness import KEPT, SEGMENT, Harness, Sequence
from tests.kernels.operations import TRITON
from tests.kernels.test_seal import generator
from tests.mem_pool.test_quantise import QUANTISED, compare, sealed_slots
from tests.open_segments import pages_beside, tokens_in

MIXED = KEPT[:1]
EDGES = [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 4 * SEGMENT + 7]
SHORT = [SEGMENT - 1, SEGMENT + 1]
LONG = [10 * SEGMENT + 7]
thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda one: one.name)
@pytest.mark.parametrize("dim", [16, thorough(64), 80, 96, 128, thorough(240), thorough(256)])
@pytest.mark.parametrize("source", ["tails", "chunk"])
def test_gather_stores_the_bits_that_torch_stores(form, dim, source):
    """Of rows with an outlier, of zeros and of NaN, too."""
    segment, kept = 48, np.array([[16, 48, 32]])
    layout = SlabLayout(kept, dim, segment, form=form)
    # 11 tokens a page, of which the fifth has four.
    tails, pages = torch.randn(13, 1, 2, 3, 11, dim, generator=generator(2)), pages_beside(2, 5, 1)
    tails[pages[0, 0], 0, :, 0, 5, 3], tails[pages[0, 4], 0, :, 1, 3], tails[pages[0, 1], 0, :, 2, 9, 1] = (
        1e4,
        0.0,
        torch.nan,
    )
    # Far from zero but for one token, whose key stays uncentred.
    tails[:, :, 0] += 20 * torch.randn(3, 1, dim, generator=generator(5))
    tails[pages[0, 2], 0, 0, 2, 1] = torch.randn(dim, generator=generator(6))
    held = tokens_in(tails, pages, segment)
    slabs = torch.full((6, layout.slab_elems), 7, dtype=torch.uint8)
    slots = torch.tensor([4, 1])
    counts = torch.tensor(kept.ravel(), dtype=torch.int32)
    positions = seal.choose(torch.rand(2, 3, segment, generator=generator(3)), torch.ones(2, dtype=torch.int32), counts)
    blocks = torch.tensor(layout.key_offset.ravel() // 16)
    where = seal.Source.of_tails(tails, pages, None)
    if source == "chunk":
        keys, values = (held[:, 0, part].transpose(1, 2).flatten(0, 1).contiguous() for part in (0, 1))
        where = seal.Source.of_chunk(keys, values, torch.tensor([0, segment]))
    seal.gather(where, slabs, slots, positions, counts, blocks, 48, dim, form)
    want = torch.full_like(slabs, 7)
    for number, slot in enumerate(slots):
        for head, count in enumerate(kept[0]):
            chosen = positions[number, head, :count].long()
            keys, values = held[number, 0, :, head]
            stored = stored_rows(keys[chosen], values[chosen], form)
            start = int(layout.key_offset[0, head]) - form.header_elems(dim)
            want[slot, start : start + len(stored)] = stored
    # A NaN may have any of its bits.
    nan = want.view(torch.float16).isnan()
    assert torch.equal(slabs.view(torch.float16).isnan(), nan)
    assert torch.equal(slabs.view(torch.int16)[~nan], want.view(torch.int16)[~nan])


@pytest.mark.parametrize(
    ("form", "scorer", "per_head", "dim", "lengths"),
    [
        (FORMATS["k8v4"], "keydiff", 4, 64, SHORT),
        thorough(FORMATS["k8v4"], "keydiff", 4, 64, EDGES),
        thorough(FORMATS["k8v4"], "keydiff", 4, 64, LONG),
        (FORMATS["k8v4"], "key_norm", 1, 128, [1, SEGMENT, 3 * SEGMENT + 7]),
        thorough(FORMATS["k8v4"], "value_key_norm", 8, 256, [SEGMENT + 7]),
        (FORMATS["k8v4"], "fastkvzip", 2, 80, [SEGMENT + 7, 2 * SEGMENT]),
        (FORMATS["k4v4"], "keydiff", 4, 64, SHORT),
        thorough(FORMATS["k4v4"], "keydiff", 4, 64, EDGES),
        thorough(FORMATS["k4v4"], "key_norm", 1, 128, [1, SEGMENT, 3 * SEGMENT + 7]),
        (FORMATS["k4v4"], "fastkvzip", 2, 80, [SEGMENT + 7, 2 * SEGMENT]),
        thorough(FORMATS["k4v4"], "keydiff", 2, 16, LONG),
        thorough(FORMATS["k4v4"], "keydiff", 2, 256, [SEGMENT + 7]),
        (FORMATS["k6v4"], "keydiff", 4, 64, EDGES),
        thorough(FORMATS["k6v4"], "key_norm", 1, 128, [1, SEGMENT, 3 * SEGMENT + 7]),
        (FORMATS["k6v4"], "fastkvzip", 2, 80, [SEGMENT + 7, 2 * SEGMENT]),
        (FORMATS["k5v6"], "fastkvzip", 2, 80, [SEGMENT + 7, 2 * SEGMENT]),
        (FORMATS["k3v3"], "keydiff", 4, 16, EDGES),
        thorough(FORMATS["k5v5"], "keydiff", 4, 64, EDGES),
        thorough(FORMATS["k8v3"], "keydiff", 2, 96, EDGES),
        thorough(FORMATS["k6v4"], "keydiff", 2, 16, LONG),
        thorough(FORMATS["k6v4"], "keydiff", 2, 256, [SEGMENT + 7]),
        (INT8, "keydiff", 2, 16, [3 * SEGMENT + 7]),
        thorough(INT8, "keydiff", 2, 16, LONG),
        (INT8, "value_key_norm", 4, 96, [1, SEGMENT, SEGMENT + 7]),
        thorough(FORMATS["k8v4"], "keydiff", 4, 80, EDGES),
        thorough(FORMATS["k8v4"], "key_norm", 1, 240, [SEGMENT + 7]),
        thorough(INT8, "keydiff", 2, 48, EDGES),
        thorough(INT8, "snapkv", 2, 64, EDGES),
        thorough(INT8, "keydiff", 2, 256, [SEGMENT + 7]),
    ],
)
def test_prefill_in_one_launch_then_decode_with_padding(form, scorer, per_head, dim, lengths):
    steps = 2
    sequences = [Sequence(n + steps, *MIXED.shape, per_head, dim, scorer, seed) for seed, n in enumerate(lengths)]
    harness = Harness(MIXED, dim, scorer, len(lengths), 12, per_head, kernel=TRITON, form=form)
    expected = [sequence.expected(MIXED, form=form.name) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    if scorer == "fastkvzip":
        # Its scores are the same numbers in both.
        in_torch = Harness(MIXED, dim, scorer, len(lengths), 12, per_head, form=form)
        in_torch.extend(sequences, [0] * len(lengths), lengths)
        sealed = sealed_slots(harness, lengths)
        assert torch.equal(harness.store.slabs[sealed], in_torch.store.slabs[sealed]), "the same codes, bit for bit"
    for step in range(steps):
        outputs.append(harness.decode(sequences, [length + step for length in lengths], padding=2))
    want = [e[:n] for e, n in zip(expected, lengths, strict=True)]
    want += [torch.stack([e[n + step] for e, n in zip(expected, lengths, strict=True)]) for step in range(steps)]
    compare(outputs, want, form)


def test_sinks_and_divided_heads_of_codes():
    sinks = torch.randn(*MIXED.shape, 2, generator=torch.Generator().manual_seed(5)) * 2
    lengths = [6 * SEGMENT + 7]
    sequence = Sequence(lengths[0] + 1, *MIXED.shape, 2, 96, "keydiff", seed=1)
    harness = Harness(MIXED, 96, "keydiff", 1, 12, kernel=TRITON, sinks=sinks, form=FORMATS["k8v4"])
    expected = sequence.expected(MIXED, sinks=sinks, form="k8v4")
    compare(harness.extend([sequence], [0], lengths), [expected[: lengths[0]]])
    compare([harness.decode([sequence], lengths, padding=1)], [expected[lengths[0] :]])


@triton.jit
def _levels_of(codes_ptr, found_ptr, BITS: tl.constexpr, HALVES: tl.constexpr):
    at = tl.arange(0, 64)
    dtype: tl.constexpr = tl.float16 if HALVES else tl.float32
    tl.store(found_ptr + at, codes._level(tl.load(codes_ptr + at), dtype, BITS).to(tl.float32))


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_codes_are_exact_numbers_in_every_dtype(bits):
    """The interpreter has no numbers in bf16: their bits are checked in torch."""
    every = torch.arange(64, dtype=torch.uint8) % 2**bits
    wanted = every.float() + 0.5 - 2 ** (bits - 1)
    for halves in (False, True):
        found = torch.zeros(64)
        _levels_of[(1,)](every, found, BITS=bits, HALVES=halves)
        assert torch.equal(found, wanted)
    for of_triton, of_torch in ((tl.bfloat16, torch.bfloat16), (tl.float16, torch.float16)):
        whole, half = codes.half_numbers(of_triton)
        numbers = (every.to(torch.int16) * 2 * half | whole | half).view(of_torch)
        assert torch.equal(numbers.float() - (64 + 2 ** (bits - 1)), wanted)
