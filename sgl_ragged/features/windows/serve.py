"""The hook of sliding windows in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_ragged.launch.options import RaggedOptions


def make_room(
    options: RaggedOptions,
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
    """Gives SGLang room for all that windows can hold: how much they do hold is known on the device alone.

    Where there is none, SGLang makes a tensor of a size that it asks the device for, and waits for all that runs.
    """
    if window_kv_indices is None:
        window_kv_indices = torch.empty(bs * sliding_window_size, dtype=torch.int64, device=device)
    about = req_pool_indices, sliding_window_size, seq_lens, bs, device, token_to_kv_pool, window_kv_indices
    return original(window_kv_indptr, translator, plan, *about)
