"""What SGLang could ask of the pool and of the attention backend that they must not answer in silence."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.backend import RaggedAttnBackend, attention_layers
from sgl_ragged.serve.pool import RaggedTokenToKVPool

HARMLESS = {
    # About the pool as a whole, not about tokens.
    "_finalize_allocation_log",
    "get_kv_cache_quant_method",
    "get_v_head_dim",
    "is_quantized_kv_cache",
    "maybe_get_custom_mem_pool",
    "register_layer_transfer_counter",
    "requires_physical_write_loc",
    "_check_physical_write_loc",
    "post_capture_active",
    "post_capture_backed_bytes",
    "cpu_copy_carries_mamba",
    "hicache_write_back_staging",
    "host_capacity_bytes",
    "host_capacity_tokens",
    "host_transfer_translate",
    "layer_shard_enabled",
    "_to_cpu_int_list",
    # Called by methods of the class that we override, or for buffers that only they make.
    "_alloc_post_capture_buffers",
    "_assign_post_capture_tensors",
    "_build_kv_buffer_descs",
    "_check_quantized_buffer_access_requirements",
    "_create_buffers_normal",
    "_create_quantized_buffers",
    "_finalize_backing_tokens",
    "_init_data_ptrs_and_strides",
    "_init_kv_copy_and_warmup",
    "_kv_buffer_shapes",
    "_kv_tokens_per_row",
    "_mha_buffer_info",
    "_mha_buffers",
    "_mha_scale_buffers",
    "_move_kv_cache_impl",
    "_move_native_fp4_scales",
    "_pd_registerable_tensors",
    "_prepare_dequant_decode_workspace",
    "_prepare_dequant_extend_workspace",
    "_quantized_scales",
    "_set_quantized_kv_buffer",
    "_slot_move_pointer_buffers",
    "_store_kv_layer",
}


@pytest.fixture(scope="module")
def pool():
    layout = SlabLayout(kept=np.full((2, 2), 16), head_dim=16, segment=32)
    plan = PoolSizes(layout=layout, itemsize=4, open_pages=OpenPages(layout.segment, 16), num_slots=4, num_rows=2)
    sizes = plan.num_slots, plan.num_rows, torch.float32, "cpu"
    store = SlabStore(layout, get_scorer("keydiff"), *sizes, pages=plan.open_pages)
    return RaggedTokenToKVPool(plan, store, device="cpu", layer_numbers=(0, 1))


def test_everything_that_sglang_asks_of_a_pool_is_overridden_or_harmless():
    asked = {name for name in dir(MHATokenToKVPool) if not name.startswith(("__", "_abc"))}
    assert asked - vars(RaggedTokenToKVPool).keys() - HARMLESS == set()


def test_what_is_asked_about_tokens_raises(pool):
    refused = [n for n, f in vars(RaggedTokenToKVPool).items() if f is RaggedTokenToKVPool._no_token_access]
    assert {"get_kv_buffer_shape", "set_kv_buffer_prefix_valid", "get_key_buffer"} <= set(refused)
    for name in refused:
        with pytest.raises(RuntimeError, match="no per-token buffers"):
            getattr(pool, name)(0)


def test_tokens_move_nowhere(pool):
    """SGLang has accepted drafts moved to where they belong, where those of a chain are."""
    pool.move_kv_cache(torch.tensor([7, 8, 0]), torch.tensor([7, 8, 0]))
    with pytest.raises(RuntimeError, match="no chain"):
        pool.move_kv_cache(torch.tensor([7, 8, 0]), torch.tensor([7, 9, 0]))


LAYER = SimpleNamespace(layer_id=3)
TOKENS = torch.zeros(1, 1, 16)


@pytest.mark.parametrize("forward", ["forward_extend", "forward_decode"])
@pytest.mark.parametrize(
    ("k", "options", "words"),
    [
        (TOKENS, {"sinks": torch.zeros(1), "k_rope": TOKENS}, "layer 3 asks attention for k_rope,"),
        (TOKENS, {"sinks": None, "k_rope": TOKENS}, "for k_rope,"),
        (TOKENS, {"save_kv_cache": False}, "save_kv_cache=False"),
        (None, {}, "without keys and values of its own"),
    ],
)
def test_a_layer_that_asks_for_more_than_causal_attention_is_refused(forward, k, options, words):
    backend = object.__new__(RaggedAttnBackend)
    backend.layer_indices = {3: 0}
    with pytest.raises(RaggedConfigError, match=words):
        getattr(backend, forward)(TOKENS, k, k, LAYER, None, **options)


class Block(torch.nn.Module):
    """An attention block as SGLang's models have it; `more` goes to its attention."""

    def __init__(self, layer_id: int = 0, **more: object) -> None:
        super().__init__()
        self.attn = RadixAttention(2, 16, 0.25, num_kv_heads=1, layer_id=layer_id, **more)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (lambda: Block(sliding_window_size=64), r"everything in layers \[\], and .* those of layers \[0\]"),
        (lambda: Block(logit_cap=30.0), "logit capping"),
        (lambda: Block(attn_type=AttentionType.ENCODER_ONLY), "non-causal attention"),
        (lambda: torch.nn.Sequential(Block(), Block()), r"layers \[0, 0\], and .* layers \[0\] \(layers that share"),
    ],
)
def test_a_model_whose_attention_is_another_is_refused(block, words):
    with pytest.raises(RaggedConfigError, match=words) as refused:
        attention_layers(block(), (0,))
    assert "loaded model" in str(refused.value)


def test_layers_in_slabs_are_those_without_windows():
    model = torch.nn.Sequential(Block(2), Block(1, sliding_window_size=64), Block(0))
    found = attention_layers(model, (0, 2))
    assert [layer.layer_id for layer in found] == [0, 2]
