"""Open segments: the only code that knows where they lie, and what scorers will need of their tokens."""

from __future__ import annotations

import torch

from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import SlabLayout


class Tails:
    """One tail per row of SGLang's request table; row 0 is its padding row.

    `data` is [num_rows, layers, 2 (K, V), heads, capacity, head_dim], of the cache's dtype; kernels are given it.
    `inputs` is [num_rows, layers, heads, places + 1, elements]: what a scorer needs of a segment's last `places` tokens
    beside keys and values. The last place takes what need not be kept.

    A tail beyond the open segment's length holds zeros or older tokens of the same request, never another request's:
    attention in torch reads padded tails under a mask, where a foreign NaN would still spread.

    Args:
        capacity: tokens that a tail has room for, at least a segment.
        input_shape: places and elements, 0 where the scorer needs nothing more. input_dtype: of these.
    """

    def __init__(
        self,
        layout: SlabLayout,
        num_rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
        capacity: int,
        input_shape: tuple[int, int],
        input_dtype: torch.dtype,
    ) -> None:
        self.segment = layout.segment
        self.places, elements = input_shape
        shape = (num_rows, layout.num_layers, 2, layout.num_heads, capacity, layout.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        input_rows = (num_rows, layout.num_layers, layout.num_heads, self.places + 1, elements)
        self.inputs = torch.zeros(input_rows, dtype=input_dtype, device=device)

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.inputs.nbytes

    def segments(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, heads, S, head_dim] of full tails, int64 [rows]."""
        full = self.data[rows, layer, :, :, : self.segment]
        return full[:, 0], full[:, 1]

    def segment_inputs(self, layer: int, rows: torch.Tensor) -> torch.Tensor | None:
        """[rows, heads, places, elements] of full tails; None where the scorer needs nothing more."""
        return self.inputs[rows, layer, :, : self.places] if self.places else None

    def read(self, layer: int, rows: torch.Tensor, length: int) -> torch.Tensor:
        """[rows, 2 (K, V), heads, length, head_dim]: a copy of the first tokens of some tails."""
        return movable(self.data[:, layer, :, :, :length]).index_select(0, rows).view(self.data.dtype)

    def part(self, layer: int, row: int, part: int, length: int) -> torch.Tensor:
        """Keys (part 0) or values (1) [heads, length, head_dim] of one tail's first tokens; a view."""
        return self.data[row, layer, part, :, :length]

    def append(
        self, layer: int, rows: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write tokens, keys and values [tokens, heads, head_dim] as the cache holds them.

        Args:
            rows, places: integers [tokens], tail and place in it of each token.
        """
        self.data[:, layer, 0].transpose(1, 2)[rows, places] = keys
        self.data[:, layer, 1].transpose(1, 2)[rows, places] = values

    def append_inputs(self, layer: int, rows: torch.Tensor, places: torch.Tensor, inputs: torch.Tensor) -> None:
        """Store what the scorer will need of appended tokens: [tokens, heads, elements]."""
        place = places - (self.segment - self.places)
        place = torch.where(place < 0, self.places, place)
        self.inputs[:, layer].transpose(1, 2)[rows, place] = inputs.to(self.inputs.dtype)

    def empty(self, layer: int, row: int, length: int) -> None:
        """Clear a tail behind its first `length` tokens, so that no older request's tokens are left there."""
        self.data[row, layer, :, :, length:] = 0
