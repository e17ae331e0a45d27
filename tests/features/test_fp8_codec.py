"""Slabs in eight bits: what comes back, by hand and as properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.features.host_tier.codecs import CODECS
from sgl_ragged.features.host_tier.fp8_codec import Fp8Codec
from sgl_ragged.features.host_tier.slab_transfer import SlabTransfer
from sgl_ragged.features.host_tier.tier_plan import CODEC_NAMES
from sgl_ragged.mem_pool.layout import SlabLayout

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEPT = np.array([[16, 48], [32, 16], [64, 64], [16, 16], [48, 32]])
LAYOUT = SlabLayout(kept=KEPT, head_dim=8, segment=64)


def through(slabs: torch.Tensor, layout: SlabLayout) -> torch.Tensor:
    codec = Fp8Codec(layout, slabs.dtype)
    rows = codec.encode(slabs, list(range(len(slabs))))
    assert rows.shape == (len(slabs), codec.row_bytes)
    assert rows.dtype == torch.uint8
    return codec.decode(rows, 0, layout.num_layers, CPU)


def parts(slabs: torch.Tensor, layout: SlabLayout) -> list[torch.Tensor]:
    """Keys and values of every head on its own, [slabs, kept, head_dim] each."""
    found = []
    for offsets in (layout.key_offset, layout.value_offset):
        for start, kept in zip(offsets.ravel(), layout.kept.ravel(), strict=True):
            if kept:
                found.append(slabs[:, start : start + kept * layout.head_dim].unflatten(1, (-1, layout.head_dim)))
    return found


def assert_close_enough(found: torch.Tensor, slabs: torch.Tensor, layout: SlabLayout) -> None:
    rounding = torch.finfo(slabs.dtype).eps
    for mine, was in zip(parts(found, layout), parts(slabs, layout), strict=True):
        mine, was = mine.double(), was.double()
        assert mine.isfinite().all()
        scale = was.abs().amax(dim=(1, 2), keepdim=True).clamp_min(448 * torch.finfo(torch.float32).tiny) / 448
        bound = torch.maximum(was.abs() / 16, scale / 1024) * (1 + 1e-5) + was.abs() * rounding
        # Below the smallest normal number, the cache's own dtype rounds more coarsely.
        assert ((mine - was).abs() <= bound + torch.finfo(slabs.dtype).smallest_normal * rounding).all()


def test_by_hand():
    """One head: K up to 896, so a scale of 2; V up to 448, so a scale of 1."""
    layout = SlabLayout(kept=np.array([[16]]), head_dim=2, segment=64)
    slab = torch.zeros(1, layout.slab_elems)
    slab[0, :5] = torch.tensor([896.0, -34.0, 35.0, 2.0**-9, 3 * 2.0**-9])
    slab[0, 32:36] = torch.tensor([448.0, 433.0, -17.0, 2.0**-9])
    codec = Fp8Codec(layout, torch.float32)
    row = codec.encode(slab, [0])
    assert row[:, :8].view(torch.float32).tolist() == [[2.0, 1.0]]
    back = codec.decode(row, 0, 1, CPU)
    # 17 is midway between 16 and 18, and goes to the even mantissa; 17.5 goes to 18.
    # The smallest number is 2^-9: half of it goes to zero, one and a half to twice it.
    assert back[0, :5].tolist() == [896.0, -32.0, 36.0, 0.0, 2.0**-7]
    assert back[0, 32:36].tolist() == [448.0, 448.0, -16.0, 2.0**-9]
    assert not back[0, 5:32].any()
    assert not back[0, 36:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_a_row(dtype):
    codec = Fp8Codec(LAYOUT, dtype)
    assert codec.row_bytes == LAYOUT.slab_elems + LAYOUT.kept.size * 2 * 4
    assert codec.row_bytes % dtype.itemsize == 0


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    kept=st.lists(st.lists(st.sampled_from(range(16, 80, 16)), min_size=3, max_size=3), min_size=1, max_size=4),
    powers=st.lists(st.integers(-44, 38), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_errors_stay_below_what_the_scale_allows(dtype, kept, powers, seed):
    layout = SlabLayout(kept=np.array(kept), head_dim=4, segment=64)
    random = torch.Generator().manual_seed(seed)
    slabs = torch.randn((len(powers), layout.slab_elems), generator=random, dtype=torch.float64)
    most = torch.finfo(dtype).max
    slabs = (slabs * 10.0 ** torch.tensor(powers, dtype=torch.float64)[:, None]).clamp(-most, most).to(dtype)
    assert_close_enough(through(slabs, layout), slabs, layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_come_back_finite(dtype):
    info = torch.finfo(dtype)
    slabs = torch.zeros(4, LAYOUT.slab_elems, dtype=dtype)
    slabs[1] = info.max
    slabs[2] = -info.max
    slabs[3] = info.smallest_normal
    back = through(slabs, LAYOUT)
    assert not back[0].any()
    assert_close_enough(back, slabs, LAYOUT)
    slabs[0, 0], slabs[0, 1] = torch.inf, torch.nan
    back = through(slabs, LAYOUT)
    assert back.isfinite().all()
    assert back[0, 0] > 0.9 * info.max
    assert back[0, 1] == 0


def test_heads_have_scales_of_their_own():
    slabs = torch.full((1, LAYOUT.slab_elems), 1e-6)
    start = int(LAYOUT.key_offset[2, 1])
    slabs[0, start : start + 64 * 8] = 1e6
    torch.testing.assert_close(through(slabs, LAYOUT), slabs, rtol=1e-6, atol=0)


def test_heads_that_store_nothing_here():
    """Of a head that is divided among ranks, this one may have no part."""
    kept, total = np.array([[0, 32], [16, 16]]), np.array([[48, 32], [16, 32]])
    layout = SlabLayout(kept=kept, head_dim=8, segment=64, total=total)
    slabs = torch.randn((2, layout.slab_elems), generator=torch.Generator().manual_seed(0))
    assert_close_enough(through(slabs, layout), slabs, layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_through_rows_of_the_host(dtype):
    random = torch.Generator().manual_seed(1)
    slabs = torch.randn((24, LAYOUT.slab_elems), generator=random).to(dtype)
    codec = Fp8Codec(LAYOUT, dtype)
    expected = through(slabs, LAYOUT)
    rows = torch.zeros((30, codec.row_bytes), dtype=torch.uint8)
    transfer = SlabTransfer(codec, rows)
    # More than are encoded at once.
    slots = torch.randperm(24, generator=random)[:20]
    pages = torch.randperm(30, generator=random)[:20]
    transfer.back_up(slabs, slots, pages)
    back = torch.full_like(slabs, 7)
    for layer in range(LAYOUT.num_layers):
        transfer.restore(back, torch.tensor([3, 9]), pages[[17, 2]], layer)
        until = int(LAYOUT.layer_start[layer + 1])
        assert torch.equal(back[[3, 9], :until], expected[slots[[17, 2]], :until]), "there when its turn is over"
    others = [slot for slot in range(24) if slot not in (3, 9)]
    assert (back[others] == 7).all(), "nothing else was written"


def test_what_is_offered_is_there():
    assert tuple(CODECS) == CODEC_NAMES
