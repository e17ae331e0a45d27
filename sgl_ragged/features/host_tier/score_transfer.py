"""Scores of segments on the host, beside the rows of their slabs: a segment that comes back leaves views as before."""

from __future__ import annotations

import torch

from sgl_ragged.attention.transfer import RowCopy
from sgl_ragged.features.history.segment_scores import SegmentScores


class ScoreTransfer:
    """Both ways between the scores of slots and those of rows, layer by layer and bit by bit.

    Args:
        scores: of what lies in the pool.
        pages: rows of the host.
        row_copy: as in `SlabTransfer`; the host's scores are pinned then.

    `rows` is float32 [pages, layers], on the host.
    """

    def __init__(self, scores: SegmentScores, pages: int, row_copy: RowCopy | None = None) -> None:
        self._slots = scores.values
        self._row_copy = row_copy
        layers = self._slots.shape[1]
        self.rows = torch.zeros((pages, layers), dtype=torch.float32, pin_memory=self._slots.is_cuda)

    def back_up(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Write the scores of slots to rows; slots and pages are integers [segments]."""
        self._copy(self._slots, self.rows, slots, pages)

    def restore(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Read them back."""
        self._copy(self.rows, self._slots, pages, slots)

    def page(self, number: int) -> torch.Tensor:
        """uint8 [score_bytes(layers)]: the scores of a row as they are stored; a view, to be read and written."""
        return self.rows[number].view(torch.uint8)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        if self._row_copy is not None:
            device, width = self._slots.device, score_bytes(source.shape[1])
            self._row_copy(source, target, source_rows.to(device), target_rows.to(device), (0, width), 0)
            return
        taken = source[source_rows.to(source.device)].to(target.device)
        target[target_rows.to(target.device)] = taken


def score_bytes(layers: int) -> int:
    """Bytes that the scores of one segment take."""
    return layers * torch.float32.itemsize
