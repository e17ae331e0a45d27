"""The Triton operations on a test store."""

from __future__ import annotations

from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.split_map import build_split_map

RESIDENT_CTAS = 24


def triton_operations(store: SlabStore, max_segments: int, method: str = "exact", max_batch: int = 12) -> TritonOps:
    split_map = build_split_map(store.layout.kept, RESIDENT_CTAS, [1, 2, 4, 8, 16], method)
    return TritonOps(store, split_map, max_batch, max_segments, chunk_ctas=RESIDENT_CTAS)
