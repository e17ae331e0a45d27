"""Moments of the queries before RoPE, and under the rotations of the positions behind a segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers.expected_attention import turn

FUTURE = 512
"""Positions behind a segment that rotations are averaged over (as in the paper's implementation)."""


@dataclass(frozen=True)
class Rope:
    """frequencies: float64 [r / 2], radians per position. order: int64 [d], first ones of pairs, seconds, the rest."""

    frequencies: torch.Tensor
    order: torch.Tensor


def rope_of(model: torch.nn.Module, head_dim: int) -> Rope:
    """The rotation that all attention layers of a model loaded by SGLang share, but for those with sliding windows.

    Raises:
        RaggedConfigError: it has none, or several, or one that depends on more than the position.
    """
    whole = [parent for parent in model.modules() if any(map(attends_to_everything, parent.children()))]
    # Some models have one beside their layers.
    found = [rope for parent in whole for rope in _ropes(parent)] or _ropes(model)
    tables = {id(module.cos_sin_cache): module for module in found}
    ropes = [_rope(module, head_dim) for module in tables.values()]
    if not ropes or any(not torch.allclose(rope.frequencies, ropes[0].frequencies) for rope in ropes):
        raise RaggedConfigError(
            f"expected_attention needs one rotary embedding for all layers, and the model has {len(ropes)}; use "
            f"another scorer"
        )
    return ropes[0]


def _ropes(module: torch.nn.Module) -> list[Any]:
    return [m for m in module.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "rotary_dim")]


def attends_to_everything(module: torch.nn.Module) -> bool:
    """True for SGLang's module for the attention of one layer, without a window."""
    window = getattr(module, "sliding_window_size", None)
    return hasattr(module, "layer_id") and hasattr(module, "tp_k_head_num") and window is not None and window <= 0


def _rope(module: Any, head_dim: int) -> Rope:
    size = int(module.rotary_dim)
    pairs = torch.arange(size)
    if not module.is_neox_style:
        pairs = pairs.view(-1, 2).T.flatten()
    return Rope(_frequencies(module.cos_sin_cache), torch.cat([pairs, torch.arange(size, head_dim)]))


def _frequencies(table: torch.Tensor) -> torch.Tensor:
    """float64 [r / 2]: radians per position, of cosines and sines [positions, r] in any precision.

    From one position alone, a table in bfloat16 would give angles that are a radian off some hundred positions on. So
    each position that is twice as far says more exactly how fast a pair turns, and the one before how often it has.
    """
    position, found = 1, torch.zeros(table.shape[1] // 2, dtype=torch.float64)
    while position < len(table):
        cos, sin = table[position].double().cpu().chunk(2)
        angle = torch.atan2(sin, cos)
        turns = ((position * found - angle) / (2 * torch.pi)).round() if position > 1 else 0.0
        found = (angle + 2 * torch.pi * turns) / position
        position *= 2
    return found


def before_rope(queries: torch.Tensor, first: int, rope: Rope) -> torch.Tensor:
    """Queries [tokens, ..., d] from position `first` on, turned back: float64, dimensions in `rope.order`."""
    positions = first + torch.arange(len(queries), dtype=torch.float64, device=queries.device)
    rows = queries.double()[..., rope.order.to(queries.device)]
    return turn(rows, -positions.view(-1, *[1] * (queries.ndim - 2)), rope.frequencies.to(queries.device))


def seen_from_the_end(
    mean: torch.Tensor, covariance: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments under the rotation averaged over the next FUTURE positions, relative to the first of them.

    Args:
        mean: [..., d]; covariance: [..., d, d]; before RoPE, dimensions ordered.
        frequencies: [r / 2].
    """
    size = mean.shape[-1]
    rotations = turn(
        torch.eye(size, dtype=mean.dtype).expand(FUTURE, size, size), torch.arange(FUTURE)[:, None], frequencies
    )
    # Rows of `rotations` are turned unit vectors: R' of every position.
    average = rotations.mean(dim=0)
    return mean @ average, average.T @ covariance @ average
