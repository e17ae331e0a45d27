"""SGLang's host pool with rows of slabs in the place of tokens."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from sgl_ragged.mem_pool.slab_codec import SlabCodec
from sgl_ragged.mem_pool.slab_transfer import SlabTransfer
from sgl_ragged.mem_pool.stored_page import FOOTER_BYTES, read_page, write_page
from sgl_ragged.plugin.pool import RaggedTokenToKVPool


class RaggedHostPool(HostKVCache):
    """Rows of slabs on the host: `kv_buffer` is uint8 [pages, codec.row_bytes].

    SGLang hands out host indices per token, whole segments at a time; index i is in row i // segment.

    Args:
        pool: the device's pool.
        codec: how a slab lies in its row.
        pages: rows, of which one is SGLang's padding.
        layout: SGLang's name for a host layout; it decides how SGLang's controller hands over indices, no more.
        identity: names all that decides what rows hold (`stored_page`).
    """

    def __init__(self, pool: RaggedTokenToKVPool, codec: SlabCodec, pages: int, layout: str, identity: str) -> None:
        self.codec = codec
        self.identity = identity
        self.storage_format_tag = f"ragged-{identity}"
        self.layer_num = self.target_layer_num = pool.sizes.layout.num_layers
        self._device_type = torch.device(pool.device).type
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=pool.size,
            size_per_token=-(-codec.row_bytes // pool.page_size),
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
            from sgl_ragged.attention.kernels.row_copy import copy_rows

            row_copy = copy_rows
        self.transfer = SlabTransfer(codec, self.kv_buffer, row_copy)

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def _allocate_host_buffer(self) -> None:
        # Whether there is room was decided before (`host_tier.host_pages`), on all ranks alike.
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
        """Rows, or slots of the device's pool, that token indices [segments * segment] are in."""
        return indices[:: self.page_size] // self.page_size

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        self.transfer.back_up(device_pool.store.slabs, self.pages_of(device_indices), self.pages_of(host_indices))

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
        slots, pages = self.pages_of(device_indices), self.pages_of(host_indices)
        self.transfer.restore(device_pool.store.slabs, slots, pages, layer_id)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return write_page(self.kv_buffer[int(index) // self.page_size], self.identity)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(self.codec.row_bytes + FOOTER_BYTES, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Raises ValueError for bytes that are not a whole page of this identity; the row is as it was."""
        row = read_page(data_page, self.identity)
        if row is None:
            raise ValueError("not a whole page of this model, profile and pool")
        self.kv_buffer[int(index) // self.page_size].copy_(row)


DIRECT_LAYOUT = "page_first_direct"
"""With it, SGLang's controller hands over device indices on the host: slab by slab, each a copy of its own."""

KERNEL_LAYOUT = "page_first"
"""With it, all indices are on the device, and nothing waits for them."""
