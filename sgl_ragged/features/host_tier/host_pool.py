"""SGLang's host pool with rows of slabs in place of tokens."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.features.host_tier.open_store import OpenStore
from sgl_ragged.features.host_tier.score_transfer import ScoreTransfer, score_bytes
from sgl_ragged.features.host_tier.slab_codec import SlabCodec
from sgl_ragged.features.host_tier.slab_transfer import SlabTransfer
from sgl_ragged.features.host_tier.stored_page import FOOTER_BYTES, read_page, write_page
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.serve.pool import RaggedTokenToKVPool


class RaggedHostPool(HostKVCache):
    """Rows of slabs on the host: `kv_buffer` is uint8 [pages, codec.row_bytes].

    SGLang hands out host indices per token, whole segments at a time; index i is in row i // segment. Where segments
    leave bounded histories by a score, `scores` holds the score of each row's segment.

    Args:
        pool: the device's pool.
        codec: writes a slab to its row.
        pages: rows, of which one is SGLang's padding; each takes `tier_row_bytes`.
        layout: SGLang's name of a host layout, which only decides on which device SGLang's controller passes indices.
        identity: digest of all settings that decide the bytes of a row (`stored_page`).
    """

    def __init__(self, pool: RaggedTokenToKVPool, codec: SlabCodec, pages: int, layout: str, identity: str) -> None:
        self.codec = codec
        self.identity = identity
        self.storage_format_tag = f"ragged-{identity}"
        self.layer_num = self.target_layer_num = pool.sizes.layout.num_layers
        self.row_bytes = tier_row_bytes(pool, codec)
        self._device_type = torch.device(pool.device).type
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=pool.size,
            size_per_token=-(-self.row_bytes // pool.page_size),
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            host_to_device_ratio=0,
            host_size=0,
            page_size=pool.page_size,
            layout=layout,
            pin_memory=self._device_type == "cuda",
            device="cpu",
            host_token_capacity=pages * pool.page_size,
        )
        row_copy = None
        if self._device_type == "cuda" and layout != DIRECT_LAYOUT:
            from sgl_ragged.attention.kernels.row_copy import copy_rows, warm_up

            row_copy = copy_rows
            warm_up(torch.device(pool.device))
        self._row_copy = row_copy
        self._slabs = SlabTransfer(codec, self.kv_buffer, row_copy)
        known = segment_scores(pool)
        self.scores = None if known is None else ScoreTransfer(known, self.page_num, row_copy)

    def open_store(self, store: SlabStore, pages: int) -> OpenStore:
        """Make a store of open segments with `pages` host pages."""
        page_bytes = store.slabs[0].nbytes
        rows = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=self._device_type == "cuda")
        return OpenStore(store, rows, self._row_copy)

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def _allocate_host_buffer(self) -> None:
        # `controller.host_pages` has checked free memory, with the same result on all ranks.
        self.kv_buffer = self.init_kv_buffer()
        self.fd = getattr(self.allocator, "fd", None)

    def init_kv_buffer(self) -> torch.Tensor:
        return ALLOC_MEMORY_FUNCS[self._device_type](
            (self.page_num, self.codec.row_bytes),
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,
            registration_granularity_bytes=self.codec.row_bytes,
        )

    def pages_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows, or slots of the device's pool, of token indices [segments * segment]."""
        return indices[:: self.page_size] // self.page_size

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        slots, pages = self.pages_of(device_indices), self.pages_of(host_indices)
        self._slabs.back_up(device_pool.store.slabs, slots, pages)
        if self.scores is not None:
            self.scores.back_up(slots, pages)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        self.restore(device_pool, self.pages_of(device_indices), self.pages_of(host_indices), layer_id)

    def restore(self, device_pool: RaggedTokenToKVPool, slots: torch.Tensor, pages: torch.Tensor, layer: int) -> None:
        """Read a layer's part of rows into slots; call it for all layers in order. Scores come with the first."""
        if layer == 0 and self.scores is not None:
            self.scores.restore(slots, pages)
        self._slabs.restore(device_pool.store.slabs, slots, pages, layer)

    def restore_all(self, device_pool: RaggedTokenToKVPool, slots: list[int], pages: list[int]) -> None:
        """Read whole slabs back. Does not wait for the device."""
        own, other = torch.tensor(slots), torch.tensor(pages)
        if self._slabs.indexed_on_device:
            device = device_pool.store.slabs.device
            own, other = (one.pin_memory().to(device, non_blocking=True) for one in (own, other))
        for layer in range(device_pool.layer_num):
            self.restore(device_pool, own, other, layer)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return a row as it is stored: the slab, its segment's scores if any, and the footer."""
        page = int(index) // self.page_size
        row = self.kv_buffer[page]
        if self.scores is not None:
            row = torch.cat([row, self.scores.page(page)])
        return write_page(row, self.identity)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(self.row_bytes + FOOTER_BYTES, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a stored page to a row. Raises ValueError, without change, unless it is whole and of this identity."""
        row = read_page(data_page, self.identity)
        if row is None or len(row) != self.row_bytes:
            raise ValueError("not a whole page of this model, profile and pool")
        page, slab = int(index) // self.page_size, self.codec.row_bytes
        self.kv_buffer[page].copy_(row[:slab])
        if self.scores is not None:
            self.scores.page(page).copy_(row[slab:])


def segment_scores(pool: RaggedTokenToKVPool) -> SegmentScores | None:
    """Return the scores by which segments leave bounded histories; None if there are no such scores."""
    histories = pool.attached.get("history")
    return None if histories is None else histories.scores


def tier_row_bytes(pool: RaggedTokenToKVPool, codec: SlabCodec) -> int:
    """Return the bytes of a segment on the host: its slab's row, and its scores."""
    return codec.row_bytes + (0 if segment_scores(pool) is None else score_bytes(pool.sizes.layout.num_layers))


DIRECT_LAYOUT = "page_first_direct"
"""Layout with which SGLang's controller passes indices on the host; each slab is a separate copy."""

KERNEL_LAYOUT = "page_first"
"""Layout with which SGLang's controller passes indices on the device, so that the host does not wait for them."""
