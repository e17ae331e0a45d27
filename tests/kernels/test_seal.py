"""The sealing kernels in the interpreter against the scorers and the selection that they stand in for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention.kernels import append, quantize_fp8, seal
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.mem_pool.kv_dtype import FP8, KvScales, to_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore, seal_in_torch
from sgl_ragged.scorers import SegmentData, get_scorer, keep_positions, rank_positions
from tests.open_segments import full_segments, pages_beside, tokens_in

HEADS, DIM = 3, 48


def kept_counts(segment: int) -> torch.Tensor:
    return torch.tensor([16, max(segment // 32 * 16, 16), segment], dtype=torch.int32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("segment", [16, 48, 256])
@pytest.mark.parametrize("scorer", seal.SCORED)
def test_scores_are_those_of_the_scorer(scorer, segment):
    """Of a chunk whose keys and values lie apart, as slices of one projection, and of tails of all layers at once."""
    qkv = torch.randn(2 * segment + 7, 5 * HEADS * DIM, generator=generator(0))
    keys, values = (qkv[:, i * HEADS * DIM : (i + 1) * HEADS * DIM].unflatten(1, (HEADS, DIM)) for i in (1, 3))
    keys[5] = 0
    firsts = torch.tensor([3, segment + 7])
    source = seal.Source.of_chunk(keys, values, firsts)
    tokens = firsts[:, None] + torch.arange(segment)
    data = SegmentData(keys[tokens].transpose(1, 2), values[tokens].transpose(1, 2))
    want = get_scorer(scorer).score(data)
    torch.testing.assert_close(seal.score(source, scorer, segment, DIM), want, atol=1e-5, rtol=1e-5)

    # In one page, in several of which the last is not full, in many.
    for each in (segment, segment * 2 // 5 + 1, 2):
        most = -(-segment // each)
        tails = torch.randn(2 * most + 1, 2, 2, HEADS, each, DIM, generator=generator(1))
        pages = pages_beside(2, most, 1)
        held = tokens_in(tails, pages, segment)
        data = SegmentData(held[:, :, 0].flatten(1, 2), held[:, :, 1].flatten(1, 2))
        found = seal.score(seal.Source.of_tails(tails, pages, None), scorer, segment, DIM)
        torch.testing.assert_close(found, get_scorer(scorer).score(data), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segment", [16, 32, 48, 256, pytest.param(528, marks=pytest.mark.thorough)])
def test_choice_is_that_of_the_torch_selection(segment):
    """Few different scores, so that ties decide; infinities and NaN; sequences' first segments and others."""
    scores = torch.randint(0, 5, (4, HEADS, segment), generator=generator(segment)).float()
    scores[0, 0, ::3] = torch.nan
    scores[1, 1, ::5] = torch.inf
    scores[1, 1, 1::5] = torch.finfo(torch.float32).max
    scores[2, 2, ::4] = -torch.inf
    scores[3] = torch.nan
    numbers = torch.tensor([0, 1, 0, 7], dtype=torch.int32)
    kept = kept_counts(segment)
    positions = seal.choose(scores, numbers, kept)
    order = rank_positions(scores, numbers == 0)
    for head, count in enumerate(kept.tolist()):
        want = keep_positions(order[:, head : head + 1], count)[:, 0]
        assert (positions[:, head, :count] == want).all(), head


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("layer", [None, 1], ids=["all layers", "one layer"])
def test_sealers_say_what_they_kept(layer, kernels):
    """Who listens is told the positions whose keys are in the slabs, of heads that keep everything, too."""
    kept = np.array([[16, 32, 48], [48, 16, 16]])
    layout = SlabLayout(kept, DIM, 48)
    sealer = TritonSealer(layout, torch.device("cpu")) if kernels else seal_in_torch
    store = SlabStore(layout, get_scorer("keydiff"), 8, 3, torch.float32, "cpu", sealer=sealer)
    told = []
    store.add_seal_listener(lambda _, sealed: told.append(sealed))
    rows, slots = torch.tensor([2, 1]), torch.tensor([3, 1])
    tokens = torch.randn(2, 2, 2, HEADS, 48, DIM, generator=generator(2))
    store.seal(layer, full_segments(store, rows, slots, torch.tensor([0, 4]), tokens, 4))
    (sealed,) = told
    assert list(sealed.layers) == ([0, 1] if layer is None else [layer])
    for number in sealed.layers:
        mask = sealed.kept(number, 48)
        for band in layout.bands[number]:
            for place, head in enumerate(band.heads):
                stored = store.kept_rows(number, band, slots, torch.float32)[:, place, 0]
                held = zip(tokens[:, number, 0, head], mask[:, head], strict=True)
                want = torch.stack([keys[own] for keys, own in held])
                assert torch.equal(stored, want), (number, head)


@pytest.mark.parametrize("each", [48, 13, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gather_writes_the_chosen_rows_and_nothing_else(dtype, each):
    segment, kept = 48, np.array([[16, 48, 32], [32, 16, 16]])
    layout = SlabLayout(kept, DIM, segment)
    pages = pages_beside(2, -(-segment // each), 1)
    tails = torch.randn(pages.numel() + 1, 2, 2, HEADS, each, DIM, generator=generator(2)).to(dtype)
    held = tokens_in(tails, pages, segment)
    slabs = torch.full((6, layout.slab_elems), 7.0, dtype=dtype)
    slots = torch.tensor([4, 1])
    counts = torch.tensor(kept.ravel(), dtype=torch.int32)
    scores = torch.rand(2, 2 * HEADS, segment, generator=generator(3))
    positions = seal.choose(scores, torch.ones(2, dtype=torch.int32), counts)
    blocks = torch.tensor(layout.key_offset.ravel() // 16)
    seal.gather(seal.Source.of_tails(tails, pages, None), slabs, slots, positions, counts, blocks, 48, DIM)
    want = torch.full_like(slabs, 7.0)
    for number, slot in enumerate(slots):
        for layer, head in np.ndindex(*kept.shape):
            chosen = positions[number, layer * HEADS + head, : kept[layer, head]].long()
            for part, offset in enumerate((layout.key_offset, layout.value_offset)):
                start = int(offset[layer, head])
                rows_kept = held[number, layer, part, head, chosen].flatten()
                want[slot, start : start + len(rows_kept)] = rows_kept
    assert torch.equal(slabs, want)


def test_append_writes_its_tokens_and_nothing_else():
    tails = torch.full((9, 2, 2, HEADS, 12, DIM), 7.0)
    keys, values = torch.randn(2, 9, HEADS, DIM, generator=generator(4))
    tokens, requests, places = torch.tensor([[8, 0, 3], [1, 0, 1], [31, 0, 5]], dtype=torch.int32)
    pages = pages_beside(2, 3, 2)
    append.append(tails, 1, keys, values, tokens, requests, places, pages)
    want = torch.full_like(tails, 7.0)
    for token, request, place in zip(tokens, requests, places, strict=True):
        page = pages[request, place // 12]
        want[page, 1, 0, :, place % 12], want[page, 1, 1, :, place % 12] = keys[token], values[token]
    assert torch.equal(tails, want)


@pytest.mark.parametrize("dtype", FP8)
def test_every_number_is_rounded_as_torch_rounds_it(dtype):
    """All of float16 and the float32 numbers next to them: ties, subnormal numbers, both zeros, infinities, NaN."""
    halves = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    given = torch.cat([halves, halves.nextafter(torch.tensor(torch.inf)), halves.nextafter(torch.tensor(-torch.inf))])
    given = given.view(-1, 1, 1024)
    stored = quantize_fp8.quantize_fp8(given, given, KvScales(1.0, 1.0), dtype)
    want = to_fp8(given, 1.0, dtype)
    for part in stored:
        wrong = (part.view(torch.uint8) != want.view(torch.uint8)) & ~(part.float().isnan() & want.float().isnan())
        assert not wrong.any(), (given[wrong][:8], part[wrong].float()[:8], want[wrong].float()[:8])


@pytest.mark.parametrize("dtype", FP8)
def test_append_and_narrow_store_the_bits_that_torch_stores(dtype):
    """Of tokens that lie apart, with numbers that are too large, next to zero, and none."""
    qkv = torch.randn(9, 3 * HEADS * DIM, generator=generator(5)) * 30
    qkv[3, ::7], qkv[4, ::5], qkv[5, ::3] = 1e30, 1e-3, torch.nan
    keys, values = (qkv[:, i * HEADS * DIM : (i + 1) * HEADS * DIM].unflatten(1, (HEADS, DIM)) for i in (0, 2))
    scales = KvScales(0.3, 0.07)
    stored = quantize_fp8.quantize_fp8(keys, values, scales, dtype)
    want = to_fp8(keys, scales.keys, dtype), to_fp8(values, scales.values, dtype)
    tails, pages = torch.zeros(5, 1, 2, HEADS, 5, DIM).to(dtype), pages_beside(1, 2, 3)
    numbers = torch.arange(9, dtype=torch.int32)
    append.append(tails, 0, keys, values, numbers, torch.zeros_like(numbers), numbers, pages, scales)
    for part in (0, 1):
        assert torch.equal(stored[part].view(torch.uint8), want[part].view(torch.uint8))
        appended = tokens_in(tails.view(torch.uint8), pages, 9)[0, 0, part].transpose(0, 1)
        assert torch.equal(appended, want[part].view(torch.uint8))
