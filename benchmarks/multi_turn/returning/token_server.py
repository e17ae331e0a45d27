"""SGLang's server with SGLang's HiCache for the token pool, on CPUs.

SGLang 0.5.23 does not start it there: its host pool pins memory through CUDA, and its copies between host and device
are CUDA kernels. Both are replaced here, memory by plain memory and the copies of `--hicache-io-backend direct` by
torch's; radix tree, controller, layouts, eviction, write and prefetch policies and storage are SGLang's. It stands in
the place of `sglang.launch_server`, in a fork of the servers process: what is replaced has to reach the workers.
"""

from __future__ import annotations

import runpy
from itertools import pairwise
from typing import Any

import torch


def runs(src: torch.Tensor, dst: torch.Tensor) -> list[tuple[int, int, int]]:
    """Pages that follow each other on both sides, as (first of src, first of dst, count); src and dst are [pages]."""
    if not len(src):
        return []
    follows = (src[1:] == src[:-1] + 1) & (dst[1:] == dst[:-1] + 1)
    starts = [0, *(torch.nonzero(~follows).flatten() + 1).tolist(), len(src)]
    return [(int(src[a]), int(dst[a]), b - a) for a, b in pairwise(starts)]


def load_layer(
    *,
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of pages from the host, [pages, layers, page, ...], into the device's buffers, [tokens, ...]."""
    for first, to, count in runs(*(one[::page_size] // page_size for one in (src_indices, dst_indices))):
        for host, device in zip(src_ptrs, dst_ptrs, strict=True):
            there = device[to * page_size : (to + count) * page_size]
            there.view(count, page_size, *device.shape[1:]).copy_(host[first : first + count, layer_id])


def back_up_layers(
    *,
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of pages to the host; `src_ptrs` are the keys of all layers, then the values."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for first, to, count in runs(*(one[::page_size] // page_size for one in (src_indices, dst_indices))):
        for number, device in enumerate(src_ptrs):
            here = device[first * page_size : (first + count) * page_size]
            host = dst_ptrs[number // layers][to : to + count, number % layers]
            host.copy_(here.view(count, page_size, *device.shape[1:]))


def plain_memory(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
    """Memory of a host pool that no GPU reads; written once, so that its first use costs no page faults."""
    return torch.zeros(dims, dtype=dtype, device=device)


def replace() -> None:
    """Put these in the place of SGLang's."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    # A pool of ours may take these bytes, too: on a CPU nothing needs to be left for a host beside the device.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory
    mha.transfer_kv_per_layer_direct_pf_lf = load_layer
    mha.transfer_kv_all_layer_direct_lf_pf = back_up_layers
    pinned = mha.MHATokenToKVPoolHost.__init__

    def unpinned(self: Any, *args: Any, **more: Any) -> None:
        pinned(self, *args, **{"pin_memory": False} | more)

    mha.MHATokenToKVPoolHost.__init__ = unpinned


if __name__ == "__main__":
    replace()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
