"""What the attention backend asks of a set of operations: describe a batch, extend, decode, seal."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sgl_ragged.mem_pool.slab_store import SlabStore


class Operations(Protocol):
    """Attention over slabs and tails. Tensors are on the store's device; shapes as in `torch_ops`.

    `describe_extend` and `describe_decode` run once per forward pass, before its layers; what they return is handed to
    every layer and need not be looked into. In a decode step `rows` and `seq_lens` may be longer than the running
    batch: padding has row 0 and length 0 or 1.
    """

    store: SlabStore

    captures_graphs: bool
    """Whether decode may be captured in a CUDA graph: between `describe_decode` and the last layer it works on the
    device alone, in memory that stays where it is, on a grid that depends on the padded batch only."""

    def reserve(self, max_batch: int) -> None:
        """Make room for decode batches of this size, padding included."""

    def describe_extend(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, prefixes: list[int], lengths: list[int]
    ) -> Any:
        """A batch of chunks: int64 rows of the request table, tokens before each chunk and tokens in it."""

    def describe_decode(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> Any:
        """A batch with one new token per request; lengths count it."""

    def extend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Any,
        sides: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a chunk, seal the segments that it finishes, attend."""
        ...

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Any,
        sides: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append one token per request, attend."""
        ...

    def seal_pending(self) -> None:
        """Seal the segments that the last decode step filled."""
