"""Moments of the queries before RoPE, and under the rotations of the positions that follow a segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers.expected_attention import rotate

FUTURE = 512
"""Number of positions after a segment over which rotations are averaged (as in the paper's implementation)."""


@dataclass(frozen=True)
class Rope:
    """Rotation of a model's queries and keys; r of d dimensions are rotated.

    Args:
        frequencies: float64 [r / 2], radians per position.
        order: int64 [d], dimensions: first elements of the rotated pairs, then second elements, then the rest.
    """

    frequencies: torch.Tensor
    order: torch.Tensor


def rope_of(model: torch.nn.Module, head_dim: int) -> Rope:
    """Read the rotation that all full-attention layers of a model loaded by SGLang share.

    Raises:
        RaggedConfigError: these layers have no rotation or several.
    """
    parents = [parent for parent in model.modules() if any(map(attends_to_everything, parent.children()))]
    # Some models have one rotary embedding outside of their layers.
    modules = [module for parent in parents for module in _rotary_modules(parent)] or _rotary_modules(model)
    tables = {id(module.cos_sin_cache): module for module in modules}
    ropes = [_read_rope(module, head_dim) for module in tables.values()]
    if not ropes or any(not torch.allclose(rope.frequencies, ropes[0].frequencies) for rope in ropes):
        raise RaggedConfigError(
            f"expected_attention needs one rotary embedding for all layers, and the model has {len(ropes)}; use "
            f"another scorer"
        )
    return ropes[0]


def _rotary_modules(module: torch.nn.Module) -> list[Any]:
    return [m for m in module.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "rotary_dim")]


def attends_to_everything(module: torch.nn.Module) -> bool:
    """Return whether the module is SGLang's attention of one layer, without a sliding window."""
    window = getattr(module, "sliding_window_size", None)
    return hasattr(module, "layer_id") and hasattr(module, "tp_k_head_num") and window is not None and window <= 0


def _read_rope(module: Any, head_dim: int) -> Rope:
    size = int(module.rotary_dim)
    pairs = torch.arange(size)
    if not module.is_neox_style:
        pairs = pairs.view(-1, 2).T.flatten()
    return Rope(_read_frequencies(module.cos_sin_cache), torch.cat([pairs, torch.arange(size, head_dim)]))


def _read_frequencies(table: torch.Tensor) -> torch.Tensor:
    """Compute frequencies float64 [r / 2] in radians per position from a table of cosines and sines [positions, r].

    The table may have any precision. One position of a table in bfloat16 alone would give angles that are a radian off
    after a few hundred positions. So the position is doubled step by step: each step refines the frequency, and the
    previous estimate gives the number of whole turns.
    """
    position, frequencies = 1, torch.zeros(table.shape[1] // 2, dtype=torch.float64)
    while position < len(table):
        cos, sin = table[position].double().cpu().chunk(2)
        angle = torch.atan2(sin, cos)
        turns = ((position * frequencies - angle) / (2 * torch.pi)).round() if position > 1 else 0.0
        frequencies = (angle + 2 * torch.pi * turns) / position
        position *= 2
    return frequencies


def before_rope(queries: torch.Tensor, first: int, rope: Rope) -> torch.Tensor:
    """Undo the rotation of queries [tokens, ..., d] at positions from `first` on.

    Returns:
        float64, shaped like `queries`, dimensions in `rope.order`.
    """
    positions = first + torch.arange(len(queries), dtype=torch.float64, device=queries.device)
    rows = queries.double()[..., rope.order.to(queries.device)]
    return rotate(rows, -positions.view(-1, *[1] * (queries.ndim - 2)), rope.frequencies.to(queries.device))


def seen_from_the_end(
    mean: torch.Tensor, covariance: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform moments by the rotation averaged over the next FUTURE positions, relative to the first of them.

    Args:
        mean, covariance: [..., d] and [..., d, d], before RoPE, dimensions in `Rope.order`.
        frequencies: [r / 2], radians per position.
    """
    size = mean.shape[-1]
    rotations = rotate(
        torch.eye(size, dtype=mean.dtype).expand(FUTURE, size, size), torch.arange(FUTURE)[:, None], frequencies
    )
    # Rows of `rotations` are rotated unit vectors: R' at every position.
    average = rotations.mean(dim=0)
    return mean @ average, average.T @ covariance @ average
