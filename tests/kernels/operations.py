"""The Triton operations on a test store."""

from __future__ import annotations

from sgl_ragged.attention.cta_map import build_cta_map
from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.mem_pool.slab_store import SlabStore

RESIDENT_CTAS = 24


def triton_operations(store: SlabStore, max_segments: int, method: str = "exact", max_batch: int = 12) -> TritonOps:
    cta_map = build_cta_map(store.layout.kept, RESIDENT_CTAS, [1, 2, 4, 8, 16], method)
    return TritonOps(store, cta_map, max_batch, max_segments, chunk_ctas=RESIDENT_CTAS)
