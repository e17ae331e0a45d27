"""The sealing kernels in the interpreter against the scorers and the selection that they stand in for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention.kernels import append, quantize_fp8, seal
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.mem_pool.kv_dtype import FP8, KvScales, to_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.segments import InTails
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import SegmentData, get_scorer, keep_positions, rank_positions

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

    tails = torch.randn(4, 2, 2, HEADS, segment, DIM, generator=generator(1))
    rows = torch.tensor([3, 1])
    data = SegmentData(tails[rows, :, 0].flatten(1, 2), tails[rows, :, 1].flatten(1, 2))
    found = seal.score(seal.Source.of_tails(tails, rows, None), scorer, segment, DIM)
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
    store = SlabStore(layout, get_scorer("keydiff"), 4, 3, torch.float32, "cpu")
    if kernels:
        store.sealer = TritonSealer(layout, torch.device("cpu"))
    store.tails.data.copy_(torch.randn(store.tails.data.shape, generator=generator(2)))
    told = []
    store.on_seal.append(lambda _, sealed: told.append(sealed))
    rows, slots = torch.tensor([2, 1]), torch.tensor([3, 1])
    store.seal(layer, InTails(rows, slots, torch.tensor([0, 4])))
    (sealed,) = told
    assert list(sealed.layers) == ([0, 1] if layer is None else [layer])
    for number in sealed.layers:
        mask = sealed.kept(number, 48)
        for band in layout.bands[number]:
            for place, head in enumerate(band.heads):
                stored = store.kept_rows(number, band, slots, torch.float32)[:, place, 0]
                want = torch.stack([store.tails.data[row, number, 0, head, :48][own] for row, own in
                                    zip(rows, mask[:, head], strict=True)])  # fmt: skip
                assert torch.equal(stored, want), (number, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gather_writes_the_chosen_rows_and_nothing_else(dtype):
    segment, kept = 48, np.array([[16, 48, 32], [32, 16, 16]])
    layout = SlabLayout(kept, DIM, segment)
    tails = torch.randn(3, 2, 2, HEADS, segment, DIM, generator=generator(2)).to(dtype)
    slabs = torch.full((6, layout.slab_elems), 7.0, dtype=dtype)
    rows, slots = torch.tensor([2, 1]), torch.tensor([4, 1])
    counts = torch.tensor(kept.ravel(), dtype=torch.int32)
    scores = torch.rand(2, 2 * HEADS, segment, generator=generator(3))
    positions = seal.choose(scores, torch.ones(2, dtype=torch.int32), counts)
    blocks = torch.tensor(layout.key_offset.ravel() // 16)
    seal.gather(seal.Source.of_tails(tails, rows, None), slabs, slots, positions, counts, blocks, 48, DIM)
    want = torch.full_like(slabs, 7.0)
    for number, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        for layer, head in np.ndindex(*kept.shape):
            chosen = positions[number, layer * HEADS + head, : kept[layer, head]].long()
            for part, offset in enumerate((layout.key_offset, layout.value_offset)):
                start = int(offset[layer, head])
                rows_kept = tails[row, layer, part, head, chosen].flatten()
                want[slot, start : start + len(rows_kept)] = rows_kept
    assert torch.equal(slabs, want)


def test_append_writes_its_tokens_and_nothing_else():
    tails = torch.full((4, 2, 2, HEADS, 32, DIM), 7.0)
    keys, values = torch.randn(2, 9, HEADS, DIM, generator=generator(4))
    tokens, requests, places = torch.tensor([[8, 0, 3], [1, 0, 1], [31, 0, 5]], dtype=torch.int32)
    rows = torch.tensor([3, 2])
    append.append(tails, 1, keys, values, tokens, requests, places, rows)
    want = torch.full_like(tails, 7.0)
    for token, request, place in zip(tokens, requests, places, strict=True):
        want[rows[request], 1, 0, :, place], want[rows[request], 1, 1, :, place] = keys[token], values[token]
    assert torch.equal(tails, want)


@pytest.mark.parametrize("dtype", FP8)
def test_append_and_narrow_store_the_bits_that_torch_stores(dtype):
    """Of tokens that lie apart, with numbers that are too large, next to zero, and none."""
    qkv = torch.randn(9, 3 * HEADS * DIM, generator=generator(5)) * 30
    qkv[3, ::7], qkv[4, ::5], qkv[5, ::3] = 1e30, 1e-3, torch.nan
    keys, values = (qkv[:, i * HEADS * DIM : (i + 1) * HEADS * DIM].unflatten(1, (HEADS, DIM)) for i in (0, 2))
    scales = KvScales(0.3, 0.07)
    stored = quantize_fp8.quantize_fp8(keys, values, scales, dtype)
    want = to_fp8(keys, scales.keys, dtype), to_fp8(values, scales.values, dtype)
    tails = torch.zeros(2, 1, 2, HEADS, 16, DIM).to(dtype)
    numbers = torch.arange(9, dtype=torch.int32)
    append.append(tails, 0, keys, values, numbers, torch.zeros_like(numbers), numbers, torch.tensor([1]), scales)
    for part in (0, 1):
        assert torch.equal(stored[part].view(torch.uint8), want[part].view(torch.uint8))
        appended = tails[1, 0, part, :, :9].transpose(0, 1).contiguous()
        assert torch.equal(appended.view(torch.uint8), want[part].view(torch.uint8))
