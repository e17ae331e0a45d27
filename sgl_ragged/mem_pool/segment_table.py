"""SGLang's request table, read by segments: the only place where its entries become slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SegmentTable:
    """The table has, for every token of a request, slot * segment + place; nothing here waits for the device.

    req_to_token: int32 [rows, context]. segment: tokens of one.
    """

    req_to_token: torch.Tensor
    segment: int

    @property
    def num_rows(self) -> int:
        return self.req_to_token.shape[0]

    @property
    def most_segments(self) -> int:
        """Most segments of one request, the open one included."""
        return -(-self.req_to_token.shape[1] // self.segment)

    def first_slots(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the slots of the first `count` segments of rows, int32 [rows, at most count]; rows: int64 [rows]."""
        firsts = self.req_to_token[:, : count * self.segment : self.segment].index_select(0, rows)
        return firsts.div_(self.segment, rounding_mode="floor")

    def slots(self, rows: torch.Tensor | int, numbers: torch.Tensor) -> torch.Tensor:
        """Return slots, int32, for rows and segment numbers, integers that broadcast together."""
        firsts = self.req_to_token[rows, numbers.long() * self.segment]
        return firsts.div_(self.segment, rounding_mode="floor")

    def row_slots(self, row: int, count: int) -> torch.Tensor:
        """Return the slots of the first `count` segments of one row, int64 [count]."""
        return self.req_to_token[row, : count * self.segment : self.segment].long() // self.segment
