"""Interface of the attention operations, and code that all sets of operations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sgl_ragged.attention.view import DecodeView, ExtendView, Seen, chain_view, decode_view, extend_view, filled
from sgl_ragged.mem_pool.segments import InTails
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.tails import BEFORE, NOW
from sgl_ragged.mem_pool.transfer import to_device


@dataclass(frozen=True)
class Copies:
    """Tokens of chunks that go to tails: int32 [copies] each, as in `ExtendView.open_copies`."""

    tokens: torch.Tensor
    requests: torch.Tensor
    open_offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ExtendBatch:
    """A view of chunks, with its copies and seals as tensors on the device.

    open_pages, next_pages: int32 [requests, K], pages of the segments that are open before and after each chunk
        (`Tails.pages`). Of those that it finishes, the first is the stage, which has the tokens by now.
    chunk_seals: int32 [segments] each: first tokens, slots and numbers of segments inside their chunks.
    tiles: `ExtendView.tiles`, for operations that work by tiles.
    """

    view: ExtendView
    open_pages: torch.Tensor
    next_pages: torch.Tensor
    open_copies: Copies
    rest_copies: Copies
    tail_seals: InTails
    chunk_seals: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    tiles: torch.Tensor | None


class Operations(ABC):
    """Attention over slabs and tails. Tensors are on the store's device.

    `describe_extend` and `describe_decode` run once per forward pass, before its layers; what they return is handed to
    every layer and need not be looked into. In a decode step `rows` and `seq_lens` may be longer than the running
    batch: padding has row 0 and length 0 or 1.
    """

    captures_graphs: bool
    """True where decode may be captured in a CUDA graph: between `describe_decode` and the last layer it works on the
    device alone, in memory that stays where it is, on a grid that depends on the padded batch only."""

    adds_sinks: bool = False
    """True where `extend` and `decode` take `sinks`, the layer's learned sinks [heads * q_per_kv], and the output has
    them; `lse` has not."""

    block_m: int | None = None
    """Rows of a tile in prefill (`ExtendView.tiles`); None for operations without tiles."""

    def __init__(self, store: SlabStore, in_view: torch.Tensor | None = None) -> None:
        """
        Args:
            in_view: int32 [rows of the request table, limit], segments that requests see in decode
                (`Histories.table`); None where they see all of theirs.
        """
        self.store: Final = store
        self.in_view: Final = in_view

    def token_scores(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `Scorer.token_scores` of hidden states [tokens, hidden size], float32 [tokens, heads, 1]."""
        store = self.store
        return store.scorer.token_scores(hidden_states, store.statistics[layer])[:, :, None]

    @abstractmethod
    def token_inputs(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `scorer_inputs` for `extend` and `decode` in place of `token_scores`, [tokens, ...]."""

    def summary(self) -> list[str]:
        """Return lines for the start-up log."""
        return []

    def is_whole(self, layer: int) -> bool:
        """True where no head of a layer is partial."""
        return not any(band.partial for band in self.store.layout.bands[layer])

    def made_up_inputs(self, tokens: int, generator: torch.Generator | None = None) -> torch.Tensor | None:
        """Return random inputs as `extend` takes them, [tokens, ...]; None if the scorer needs none.

        Args:
            generator: on the CPU.
        """
        store = self.store
        if not store.has_scorer_inputs:
            return None
        shape = (tokens, store.layout.num_heads, store.tails.inputs.shape[-1])
        return torch.randn(shape, generator=generator).to(store.tails.inputs)

    def stored_inputs(self, layer: int, scorer_inputs: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads, elements], what tails store of inputs that `extend` takes."""
        return scorer_inputs

    def variants(self, batch: Any) -> dict[str, Any]:
        """Return other descriptions of a batch of `extend`, by ending of a name, that batches of other sizes use."""
        return {}

    @abstractmethod
    def reserve(self, max_batch: int) -> None:
        """Make room for decode batches of `max_batch` requests, padding included."""

    def describe_decode(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> Any:
        """Describe a batch with one new token per request; lengths count it."""
        room = self.room(len(rows), seq_lens_cpu)
        view = decode_view(req_to_token, rows, seq_lens, self.store.tails, room, self.in_view)
        return self.decode_batch(view)

    @abstractmethod
    def room(self, batch: int, seq_lens_cpu: torch.Tensor) -> DecodeView:
        """Return the buffers to which the view of a decode batch is written."""

    @abstractmethod
    def decode_batch(self, view: DecodeView) -> Any:
        """Return the description of a view that `decode` takes."""

    def describe_extend(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        prefixes: list[int],
        lengths: list[int],
        seen: Seen | None = None,
    ) -> Any:
        """Describe a batch of chunks: int64 rows of the request table, tokens before each chunk and tokens in it.

        `seen`: what of their histories they see, if that is not all.
        """
        return self.extend_batch(extend_view(req_to_token, rows, prefixes, lengths, self.store.layout.segment, seen))

    def describe_chains(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        prefixes: torch.Tensor,
        prefixes_cpu: Sequence[int],
        width: int,
    ) -> Any:
        """A batch of chains of drafts, `width` tokens each, as `extend` takes it; arguments as in `chain_view`, and
        `prefixes` on the device, too, integers [chains].

        Their tokens go to the tails, where the next write to the same places replaces them; nothing is sealed before
        `commit`.
        """
        return self.extend_batch(chain_view(req_to_token, rows, prefixes_cpu, width, self.store.layout.segment))

    @abstractmethod
    def extend_batch(self, view: ExtendView) -> Any:
        """Return the description of a view that `extend` takes; copies segments to be sealed to their stages."""

    def chunk_batch(self, view: ExtendView) -> ExtendBatch:
        """Return the part of `extend_batch` that all operations share, in one transfer to the device."""
        host = [*view.open_copies.T, *view.rest_copies.T, *view.tail_seals.T, *view.chunk_seals.T]
        host += [*view.open_segments]
        if self.block_m is not None:
            host.append(view.tiles(self.store.q_per_kv, self.block_m))
        columns = to_device(host, view.req_pool_indices.device)
        tail_request, tail_number, chunk_request, chunk_number, first_token, before, behind = columns[6:13]
        open_pages, next_pages, tail_slots, chunk_slots = self.look_up(
            view, before, behind, (tail_request, tail_number), (chunk_request, chunk_number)
        )
        rows = view.req_pool_indices
        # Nothing is launched for batches that finish none.
        tail_rows, tail_pages = rows[:0], open_pages[:0]
        if len(tail_request):
            tail_rows, tail_slots = rows[tail_request], tail_slots.long()
            tail_pages = self.store.tails.stage(tail_slots, open_pages[tail_request])
        return ExtendBatch(
            view=view,
            open_pages=open_pages,
            next_pages=next_pages,
            open_copies=Copies(*columns[:3]),
            rest_copies=Copies(*columns[3:6]),
            tail_seals=InTails(tail_rows, tail_pages, tail_slots, tail_number),
            chunk_seals=(first_token, chunk_slots, chunk_number),
            tiles=columns[13] if self.block_m is not None else None,
        )

    def look_up(
        self,
        view: ExtendView,
        before: torch.Tensor,
        behind: torch.Tensor,
        in_tails: tuple[torch.Tensor, torch.Tensor],
        in_chunks: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up the slots and pages of a batch's segments.

        Args:
            before, behind: integers [requests], numbers of the segments that are open before and after each chunk.
            in_tails, in_chunks: requests and numbers of finished segments, integers [segments] each.

        Returns:
            `ExtendBatch.open_pages` and `next_pages`, and slots of finished segments, in tails and in chunks.
        """
        tails, rows, slots = self.store.tails, view.req_pool_indices, view.pages
        # Of a segment that is finished the tokens are read from its stage on: its own page is where its slab goes.
        finished = before < behind
        own = torch.where(finished, tails.stages(rows, BEFORE), _slots_of(slots, before))
        open_pages = tails.pages(rows, own, torch.where(finished, BEFORE, NOW))
        next_pages = tails.pages(rows, _slots_of(slots, behind), NOW)
        return open_pages, next_pages, slots[in_tails], slots[in_chunks]

    def extend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Any,
        scorer_inputs: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a chunk's keys and values, seal the segments that it finishes, and attend.

        Args:
            queries: [tokens, heads, q_per_kv, head_dim].
            keys, values: [tokens, heads, head_dim], keys after RoPE.
            scorer_inputs: [tokens, heads, elements], what the store's scorer needs of each token, if anything; or what
                `token_inputs` makes of it.
            lse: float32 [tokens, heads, q_per_kv], all -inf, to be filled with the natural log-sum-exps of the logits;
                layers with partial heads need it. They remain -inf where a head attends to nothing here, and its
                output is 0.
            sinks: taken if `adds_sinks`.

        Returns:
            [tokens, heads, q_per_kv, head_dim]; zeros for tokens of no chunk. Changes the slabs of finished segments
            and the requests' tails.
        """
        return self.extend_chunks(layer, queries, keys, values, batch, scorer_inputs, lse, sinks)

    def extend_chunks(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendBatch,
        scorer_inputs: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run `extend` for chunks, in the order of its steps."""
        store = self.store
        # What is scored and read must not depend on whether a token came through the cache: it is as there.
        keys, values = self.to_cache(layer, keys, values)
        output, rows = self.room_for_output(queries, batch.view), batch.view.req_pool_indices
        if not batch.view.pieces:
            return output
        self.store_tokens(layer, keys, values, scorer_inputs, batch.open_copies, batch.open_pages, rows)
        store.seal(layer, batch.tail_seals)
        self.seal_chunks(layer, keys, values, scorer_inputs, batch)
        self.attend_chunks(layer, queries, keys, values, batch, output, lse, *([] if sinks is None else [sinks]))
        self.store_tokens(layer, keys, values, scorer_inputs, batch.rest_copies, batch.next_pages, rows)
        return output

    @abstractmethod
    def room_for_output(self, queries: torch.Tensor, view: ExtendView) -> torch.Tensor:
        """Allocate the output of `attend_chunks` like queries [tokens, heads, q_per_kv, head_dim], zeros for tokens
        outside of chunks."""

    @abstractmethod
    def to_cache(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert a chunk's keys and values [tokens, heads, head_dim] as `SlabStore.to_cache` does."""

    @abstractmethod
    def seal_chunks(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scorer_inputs: torch.Tensor | None,
        batch: ExtendBatch,
    ) -> None:
        """Seal the segments inside chunks, all at once; tensors as in `extend`."""

    @abstractmethod
    def store_tokens(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scorer_inputs: torch.Tensor | None,
        copies: Copies,
        pages: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Write copies of a chunk's tokens, with their scorer inputs, to the tails of requests.

        Args:
            pages, rows: int32 [requests, K] and integers [requests], pages of the requests' open segments and their
                rows of the request table.
        """

    def append_with_inputs(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scorer_inputs: torch.Tensor | None,
        copies: Copies,
        pages: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Run `store_tokens` by `append` and, for scorer inputs, in torch."""
        if len(copies):
            self.append(layer, keys, values, copies, pages)
            if scorer_inputs is not None:
                own, whose = pages[copies.requests], rows[copies.requests]
                self.store.tails.append_inputs(layer, own, whose, copies.open_offsets, scorer_inputs[copies.tokens])

    @abstractmethod
    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, copies: Copies, pages: torch.Tensor) -> None:
        """Write copies of keys and values [tokens, heads, head_dim] to the tails of their requests, which have these
        pages, int32 [requests, K]."""

    @abstractmethod
    def attend_chunks(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> object:
        """The attention of `extend` alone, to keys and values as the cache holds them, into `output`, as
        `room_for_output` gives it, and `lse`. Takes `sinks` as well if `adds_sinks`."""

    @abstractmethod
    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Any,
        scorer_inputs: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append one token per request to the tails, then attend; arguments as in `extend`, a token per request."""


def commit(store: SlabStore, req_to_token: torch.Tensor, rows: torch.Tensor, lengths: Sequence[int]) -> None:
    """Commit tokens of requests: a segment whose tokens are all committed is sealed before the next batch.

    A step of decode commits one token as soon as it is described, a chain of drafts what was accepted of it. Does not
    wait for the device.

    Args:
        rows: integers [requests], on the device. lengths: tokens of each with the new ones, on the host.
    """
    full = filled(req_to_token, rows, lengths, store.tails)
    if full is not None:
        store.defer_seals(full)


def _slots_of(pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the slots of segments by number, int32 [requests]; any slot if a request has no such segment."""
    if pages.shape[1] == 0:
        return torch.zeros_like(numbers)
    return pages.gather(1, numbers.long().clamp_max_(pages.shape[1] - 1)[:, None])[:, 0]
