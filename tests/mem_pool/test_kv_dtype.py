"""FP8 caches: what is too large is saturated, scales come from the model's layers, and what is beside stays wide."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.attention.kernel_choice import check_cache
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.codecs import CODECS, make_codec
from sgl_ragged.features.host_tier.tier_plan import TierPlan
from sgl_ragged.mem_pool.kv_dtype import FP8, KvScales, beside_cache, movable, to_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore, side_bytes
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.kv_scales import kv_scales
from tests.examples import examples
from tests.harness import LARGEST

LAYOUT = SlabLayout(np.array([[16, 32]]), head_dim=16, segment=32)


def fp8_store(scorer: str, dtype: torch.dtype, query_dtype: torch.dtype = torch.bfloat16) -> SlabStore:
    return SlabStore(LAYOUT, get_scorer(scorer), 3, 2, dtype, "cpu", q_per_kv=4, query_dtype=query_dtype)


@pytest.mark.parametrize("dtype", FP8)
def test_what_is_too_large_is_saturated_and_nan_stays(dtype):
    given = torch.tensor([1000.0, -1000.0, 1e30, -torch.inf, 1.0, 0.0, torch.nan])
    most = LARGEST[dtype]
    stored = to_fp8(given, 0.01, dtype).float()
    assert stored[:6].tolist() == [min(1e5, most), -min(1e5, most), most, -most, pytest.approx(100, rel=0.13), 0]
    assert stored[6].isnan()
    assert to_fp8(torch.tensor([1000.0]), 1.0, torch.float8_e4m3fn).item() == 448


@examples(50)
@given(x=st.floats(-1e6, 1e6, width=32), scale=st.floats(1e-4, 1e4), dtype=st.sampled_from(FP8))
def test_an_element_is_off_by_at_most_half_a_step(x, scale, dtype):
    """Of the largest number, of the element, or of the numbers next to zero, which are evenly spaced."""
    kept = to_fp8(torch.tensor([x]), scale, dtype).double().item() * scale
    info = torch.finfo(dtype)
    bounded = min(max(x, -info.max * scale), info.max * scale)
    assert abs(kept - bounded) <= max(abs(bounded) * info.eps / 2, info.smallest_normal * info.eps / 2 * scale) * 1.001


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-42])
def test_scales_that_cannot_be_divided_by_are_refused(scale):
    with pytest.raises(RaggedConfigError, match="no scale of an FP8 KV cache"):
        KvScales(keys=1.0, values=scale)


@pytest.mark.parametrize("dtype", FP8)
def test_scorers_see_what_the_cache_holds_and_sides_stay_wide(dtype):
    store = fp8_store("snapkv", dtype)
    store.use_kv_scales([KvScales(0.5, 4.0)] * LAYOUT.num_layers)
    assert store.tails.inputs.dtype == torch.bfloat16
    assert store.tails.data.dtype == store.slabs.dtype == dtype
    assert store.tails.inputs[0].nbytes == side_bytes(
        get_scorer("snapkv"), LAYOUT, 4, beside_cache(dtype, torch.bfloat16)
    )
    assert fp8_store("fastkvzip", dtype).tails.inputs.dtype == torch.float32
    keys, values = torch.randn(2, 5, 2, 16)
    for part, (x, scale) in enumerate(((keys, 0.5), (values, 4.0))):
        stored = store.to_cache(0, keys, values)[part]
        back = store.from_cache(0, part, stored)
        assert back.dtype == torch.float32
        assert torch.equal(back, (x / scale).to(dtype).float() * scale)
        # What has been stored once is not divided again.
        again = store.to_cache(0, *store.to_cache(0, keys, values))[part]
        assert torch.equal(movable(again), movable(stored))
    assert store.logit_scale(0) == 0.5 * store.softmax_scales[0]
    assert store.value_scale(0) == 4.0


def test_a_wide_store_is_not_scaled():
    store = SlabStore(LAYOUT, get_scorer("keydiff"), 3, 2, torch.bfloat16, "cpu")
    store.use_kv_scales([KvScales(0.5, 4.0)] * LAYOUT.num_layers)
    keys = torch.randn(5, 2, 16)
    assert torch.equal(store.to_cache(0, keys, keys)[0], keys.bfloat16())
    assert store.from_cache(0, 0, keys) is keys
    assert (store.logit_scale(0), store.value_scale(0)) == (store.softmax_scales[0], None)


@pytest.mark.parametrize(
    ("floats", "tensors", "want"),
    [
        ((None, None), (None, None), KvScales()),
        ((0.25, 0.5), (torch.tensor(0.25), torch.tensor(0.5)), KvScales(0.25, 0.5)),
        # As models read --quantization-param-path.
        ((None, None), (0.125, 0.125), KvScales(0.125, 0.125)),
    ],
)
def test_scales_are_those_that_sglang_loaded(floats, tensors, want):
    names = ("k_scale_float", "v_scale_float", "k_scale", "v_scale")
    layer = SimpleNamespace(**dict(zip(names, (*floats, *tensors), strict=True)))
    assert kv_scales([layer], None) == [want]
    if tensors[0] is not None:
        assert kv_scales([layer], "scales.json") == [want]
        return
    with pytest.raises(RaggedConfigError, match=r"took no scales from --quantization-param-path scales\.json"):
        kv_scales([layer], "scales.json")


@pytest.mark.parametrize("dtype", FP8)
def test_slabs_go_to_the_host_as_they_are_and_by_no_other_codec(dtype):
    slabs = torch.randn(3, LAYOUT.slab_elems).to(dtype)
    codec = make_codec("exact", LAYOUT, dtype)
    rows = codec.encode(slabs, [0, 1, 2])
    assert rows.shape == (3, codec.row_bytes) == (3, LAYOUT.slab_elems)
    assert torch.equal(movable(codec.decode(rows, 0, 1, torch.device("cpu"))), movable(slabs))
    for name in CODECS.keys() - {"exact"}:
        with pytest.raises(RaggedConfigError, match=f"--ragged-host-codec {name} is for a KV cache that is wider"):
            make_codec(name, LAYOUT, dtype)


def test_pages_are_known_by_dtype_and_scales():
    tier = TierPlan(codec="exact", served="", sized=False, restore="load")
    stores = [fp8_store("keydiff", dtype) for dtype in (*FP8, torch.bfloat16)]
    stores.append(fp8_store("keydiff", FP8[0]))
    stores[-1].use_kv_scales([KvScales(0.5, 1.0)] * LAYOUT.num_layers)
    assert len({tier.rank_identity(0, store.stored_as) for store in stores}) == len(stores)


def test_kernels_that_cannot_read_it_are_refused():
    for dtype in FP8:
        check_cache("torch", dtype, None)
        check_cache("triton", dtype, None)
        check_cache("triton", dtype, (8, 9))
        with pytest.raises(RaggedConfigError, match="not supported with --ragged-kernel flashinfer"):
            check_cache("flashinfer", dtype, (9, 0))
    check_cache("triton", torch.float8_e5m2, (8, 0))
    with pytest.raises(RaggedConfigError, match=r"compute capability 8\.6.*use --kv-cache-dtype fp8_e5m2"):
        check_cache("triton", torch.float8_e4m3fn, (8, 6))
