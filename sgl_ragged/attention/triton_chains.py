"""Chains of drafts for the Triton operations, described in buffers that stay where they are: a CUDA graph that verified
other chains once can be replayed for these.

The device alone computes what `view.chain_view` describes, so all chains have equally many tiles, and as many tokens to
store. Of a chain that ends at a border, the tokens after it are stored in unused places; their results are wrong
and not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from sgl_ragged.attention.kernels import describe
from sgl_ragged.attention.operations import Copies
from sgl_ragged.attention.view import TILE_COLUMNS, DecodeView

if TYPE_CHECKING:
    from sgl_ragged.attention.triton_ops import LayerWork, TritonOps

_SEEN, _OPEN = TILE_COLUMNS.index("seen"), TILE_COLUMNS.index("open_length")


@dataclass(frozen=True)
class ChainBatch:
    """Chains of a batch, all of equal length.

    req_pool_indices: int64 [chains + 1 at least], rows of the request table; the last one is padding, as in `pages`.
    lists: int32 [chains, most], slots of the sealed segments that each sees.
    open_pages: int32 [chains + 1 at least, K], of their open segments.
    copies: tokens that go to these. tiles, work, scratch: as `TritonExtendBatch` has them.
    """

    req_pool_indices: torch.Tensor
    lists: torch.Tensor
    open_pages: torch.Tensor
    copies: Copies
    tiles: torch.Tensor
    work: tuple[LayerWork, ...]
    scratch: tuple[torch.Tensor, torch.Tensor] | None


class ChainRoom:
    """Buffers for batches of up to `most` chains of `width` tokens, of some operations."""

    def __init__(self, operations: TritonOps, most: int, width: int, max_segments: int) -> None:
        store = operations.store
        device, segment = store.slabs.device, store.layout.segment
        self.width, self._segment, self._table = width, segment, store.tails.table
        self._nobody = most
        empty = DecodeView.empty(most + 1, max_segments, store.tails)
        self._pages, self._rows = empty.pages, empty.req_pool_indices
        self._view = empty[:most]
        self._each = triton.cdiv(width * store.q_per_kv, operations.extend_tile.block_m)
        self._tiles = torch.zeros((most, self._each, len(TILE_COLUMNS)), dtype=torch.int32, device=device)
        chains, parts = (torch.arange(count, dtype=torch.int32, device=device) for count in (most, self._each))
        fixed = {
            "request": chains[:, None],
            "first_token": chains[:, None] * width,
            "tokens": torch.full_like(chains, width)[:, None],
            "first_row": parts * operations.extend_tile.block_m,
            "listed": chains[:, None],
        }
        for name, numbers in fixed.items():
            self._tiles[:, :, TILE_COLUMNS.index(name)] = numbers
        self._chains, self._along = chains, torch.arange(width, dtype=torch.int32, device=device)
        self._tokens = torch.arange(most * width, dtype=torch.int32, device=device)
        self._requests, self._offsets = torch.zeros_like(self._tokens), torch.zeros_like(self._tokens)
        divisions = [operations.division(count * self._each) for count in range(1, most + 1)]
        self._work = [work for work, _ in divisions]
        self._scratch_rows = [rows for _, rows in divisions]
        self._scratch = operations.scratch(max(self._scratch_rows))

    def describe(self, req_to_token: torch.Tensor, rows: torch.Tensor, prefixes: torch.Tensor) -> ChainBatch:
        """Describe chains after `prefixes` tokens of requests, integers [chains], with these rows of the request table;
        both are on the device. Overwrites the batch before."""
        count, width = len(rows), self.width
        # A decode step's new token is the first of a chain.
        view = describe.describe(req_to_token, rows, prefixes + 1, self._table, self._segment, self._view)
        offsets = view.open_offsets
        tiles = self._tiles[:count]
        tiles[:, :, _SEEN] = view.seen[:, None]
        tiles[:, :, _OPEN] = offsets[:, None]
        places = offsets[:, None] + self._along
        beyond = places >= self._segment
        own = slice(0, count * width)
        self._offsets[own].view(count, width).copy_(places.masked_fill_(beyond, 0))
        requests = self._chains[:count, None].expand(count, width)
        self._requests[own].view(count, width).copy_(requests.masked_fill(beyond, self._nobody))
        scratch_rows = self._scratch_rows[count - 1]
        return ChainBatch(
            self._rows,
            view.slots,
            self._pages,
            Copies(self._tokens[own], self._requests[own], self._offsets[own]),
            tiles.flatten(0, 1),
            self._work[count - 1],
            self._scratch if scratch_rows else None,
        )
