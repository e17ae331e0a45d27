"""The Triton operations on a test store."""

from __future__ import annotations

import torch

from sgl_ragged.attention.cta_map import build_cta_map
from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from tests.harness import Kernel

RESIDENT_CTAS = 24


def triton_operations(
    store: SlabStore,
    max_segments: int,
    in_view: torch.Tensor | None = None,
    method: str = "exact",
    max_batch: int = 12,
) -> TritonOps:
    cta_map = build_cta_map(store.layout.kept, RESIDENT_CTAS, [1, 2, 4, 8, 16], method)
    return TritonOps(store, cta_map, max_batch, max_segments, RESIDENT_CTAS, in_view)


def triton_sealer(layout: SlabLayout) -> TritonSealer:
    return TritonSealer(layout, torch.device("cpu"))


TRITON = Kernel(triton_operations, triton_sealer)
