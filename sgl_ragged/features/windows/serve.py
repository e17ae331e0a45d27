"""Sliding windows in a worker: the hybrid pool, its allocator, and attention of the layers with windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.features.windows.attention import window_backend
from sgl_ragged.features.windows.pool import HybridAllocator, RaggedHybridPool
from sgl_ragged.serve.feature import Hook, ServeFeature, Worker


def make_room(
    original: Callable,
    window_kv_indptr: torch.Tensor,
    translator: Any,
    plan: Any,
    req_pool_indices: torch.Tensor,
    sliding_window_size: int,
    seq_lens: torch.Tensor,
    bs: int,
    device: Any = None,
    token_to_kv_pool: Any = None,
    window_kv_indices: torch.Tensor | None = None,
) -> Any:
    """Give SGLang a buffer for the most that windows can hold, since only the device knows how much they do hold.

    Without a buffer SGLang would make one of a size that it reads from the device, and wait for all that runs.
    """
    if window_kv_indices is None:
        window_kv_indices = torch.empty(bs * sliding_window_size, dtype=torch.int64, device=device)
    about = req_pool_indices, sliding_window_size, seq_lens, bs, device, token_to_kv_pool, window_kv_indices
    return original(window_kv_indptr, translator, plan, *about)


class WindowPool:
    """Pages of sliding-window layers in SGLang's hybrid pool; implements `SidePool`."""

    def pool_config(self, tokens: int, side_tokens: int) -> dict[str, int]:
        return {"full_max_total_num_tokens": tokens, "swa_max_total_num_tokens": side_tokens}

    def side_tokens(self, sizes: Any) -> int:
        return sizes.swa_max_total_num_tokens

    def allocator(self, found: Any, kvcache: Any, common: dict[str, Any]) -> Any:
        return HybridAllocator(found.size_full, found.size_swa, kvcache=kvcache, **common)

    def layer_backend(self, model_runner: Any, kernel: str) -> Any:
        return window_backend(model_runner, kernel)


class Windows(ServeFeature):
    """Settings: `launch.WindowSettings`."""

    name = "windows"
    hooks = (Hook(sglang.WINDOW_BUFFER, make_room),)
    side_pool = WindowPool()

    def attach(self, settings: Any, worker: Worker) -> Any:
        pool = worker.pool
        return RaggedHybridPool(
            pool,
            settings.windowed,
            pool.layer_numbers,
            window_tokens=worker.sizes.swa_max_total_num_tokens,
            num_heads=pool.sizes.layout.num_heads,
            dtype=pool.dtype,
            device=pool.device,
        )


FEATURE = Windows()
