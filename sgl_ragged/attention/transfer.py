"""How tensors come to kernels: rows of heads that lie together."""

from __future__ import annotations

from collections.abc import Callable

import torch

RowCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int], int], None]
"""`attention.kernels.row_copy.copy_rows`."""


def head_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if all but its first stride are those of a contiguous one, else a contiguous copy."""
    return x if x[0].is_contiguous() else x.contiguous()
