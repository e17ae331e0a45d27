"""Scores of segments on the host, with the rows of their slabs, so that a restored segment keeps its score."""

from __future__ import annotations

import torch

from sgl_ragged.attention.transfer import RowCopy
from sgl_ragged.features.history.segment_scores import SegmentScores


class ScoreTransfer:
    """Copies of scores between slots and rows of the host tier, layer by layer.

    Args:
        scores: scores of segments in the pool.
        pages: number of rows on the host.
        row_copy: as in `SlabTransfer`; the host's scores must be pinned for it.

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
        """Read scores of rows back to slots."""
        self._copy(self.rows, self._slots, pages, slots)

    def page(self, number: int) -> torch.Tensor:
        """Return a view on the stored scores of a row, uint8 [score_bytes(layers)]."""
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
    """Return the bytes of the scores of one segment."""
    return layers * torch.float32.itemsize
