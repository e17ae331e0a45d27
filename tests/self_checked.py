"""Stores for the check of kernels, and faults that it must find."""

from __future__ import annotations

import numpy as np
import torch

from sgl_ragged.attention.self_check import SelfCheck, check_operations
from sgl_ragged.mem_pool.kv_dtype import KvScales, is_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_format import FORMATS
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.serve.store_maker import StoreMaker
from tests.fitting.test_attention_matching import DIM, HEADS, SEGMENT, codebook

KEPT = np.array([[16, 48], [64, 32]])


def checked(
    kernel: str,
    form: str = "wide",
    scorer: str = "keydiff",
    dtype: torch.dtype = torch.float32,
    fitted: bool = False,
    chain_tokens: int = 0,
    kept: np.ndarray = KEPT,
    layout: SlabLayout | None = None,
    statistics: list[dict[str, torch.Tensor]] | None = None,
) -> SelfCheck:
    """Check the kernels of a small server of 2 layers and heads, with queries of float32 if the cache is FP8."""
    layout = layout or SlabLayout(kept, DIM, SEGMENT, form=FORMATS[form])
    assert layout.num_heads == HEADS or not fitted
    layers = layout.num_layers
    statistics = statistics or [codebook(layer) if fitted else {} for layer in range(layers)]
    query_dtype = torch.float32 if is_fp8(dtype) else dtype
    maker = StoreMaker(
        layout, scorer, kernel, dtype, query_dtype, "cpu", 2, statistics, [DIM**-0.5 * (1 + n) for n in range(layers)]
    )

    def make_store(of_layers, requests: int, segments: int) -> SlabStore:
        store = maker.make_small(of_layers, requests, segments)
        store.use_kv_scales([KvScales(0.05 * (1 + layer), 0.03) for layer in of_layers])
        return store

    return check_operations(make_store, layout, kernel, chain_tokens)
