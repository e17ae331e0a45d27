"""Rows of sealed segments after a corrector has changed them, as numbers or as codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool.quantise import RowCodes

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [segments, heads, S, head_dim], as the cache holds them, FP8 as bytes."""


@dataclass(frozen=True)
class CorrectedRows:
    """Rows of segments with corrections.

    rows: keys and values of whole segments.
    parts: by number of a band, what slabs store of its heads, uint8 [segments, heads of band, part bytes], where rows
        were corrected in codes.
    """

    rows: Rows
    parts: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class CodedHeads:
    """Corrected heads in codes.

    heads: int64 [heads], numbers of the heads among those that are sealed together.
    codes: [segments, heads, rows, d], rows that each head keeps on all ranks, followed by undefined ones.
    """

    heads: torch.Tensor
    codes: RowCodes
