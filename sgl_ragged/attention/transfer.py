"""Memory layout of tensors for kernels: contiguous rows of heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

RowCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int], int], None]
"""`attention.kernels.row_copy.copy_rows`."""


def head_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor if only its first stride may differ from a contiguous one, else a contiguous copy."""
    return x if x[0].is_contiguous() else x.contiguous()
