"""Retrieval while requests run (HeteroCache, Algorithm 1): pivots watch, and rows that satellites dropped are fetched.

In prefill the attention of the last ASKING_TOKENS tokens of a prompt chooses the overlay that the same tokens see,
layer by layer. In decode pivots' queries are recorded; every `interval` tokens their attention is compared with the
last fetch, and where it has moved, a new overlay is used from DELAY steps later on. So overlays depend only on the
request's own tokens, not on timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_ragged.features.retrieval.drift import median_overlap
from sgl_ragged.features.retrieval.overlay import Overlays, add_overlay, attend_overlay
from sgl_ragged.features.retrieval.pivot_topk import Pivots, PivotTopK, Share
from sgl_ragged.features.retrieval.reservoir import NOWHERE, Reservoir
from sgl_ragged.features.retrieval.roles import HeadRoles
from sgl_ragged.features.retrieval.settings import ASKING_TOKENS, DELAY, Retrieval
from sgl_ragged.mem_pool.segments import SegmentTable
from sgl_ragged.mem_pool.slab_store import SlabStore


@dataclass(frozen=True)
class _Window:
    """Last tokens of a prompt in a batch.

    row: row of the request.
    tokens: positions of the tokens in the batch.
    start: position of the first of them in the sequence.
    slots: int64 [segments], slots of the segments before the tokens.
    slots_after: int64 [segments], slots of all full segments of the prompt, for tokens that are decoded after it.
    named, named_after: tokens that each pivot names in `slots` and in `slots_after`, added after the pivot's layer.
    """

    row: int
    tokens: slice
    start: int
    slots: torch.Tensor
    slots_after: torch.Tensor
    named: dict[int, PivotTopK]
    named_after: dict[int, PivotTopK]


@dataclass(frozen=True)
class _Asked:
    """Tokens that pivots named at a position; `arrived`: event of their copy to the host, or None on CPUs."""

    position: int
    named: tuple[PivotTopK, ...]
    arrived: torch.cuda.Event | None


@dataclass
class RetrievalCounts:
    """Counts since the start.

    asked: comparisons of a pivot's attention in decode.
    fetched: comparisons after which rows were fetched.
    rows: rows that were copied to the device.
    """

    asked: int = 0
    fetched: int = 0
    rows: int = 0


class Retriever:
    """Overlays of running requests, and the pivots that request them.

    Args:
        roles: roles of the store's heads.
        entries: number of entries of the reservoir.
        req_to_token: int32 [rows, context], SGLang's request table.
        share: sends the tokens that a pivot names to all ranks; None with one rank.

    `running`: rows of the requests of the running batch, in its order; empty while SGLang runs dummy requests to tune
    kernels or to capture graphs.
    """

    def __init__(
        self,
        store: SlabStore,
        settings: Retrieval,
        roles: HeadRoles,
        entries: int,
        req_to_token: torch.Tensor,
        share: Share | None = None,
    ) -> None:
        layout, device = store.layout, store.slabs.device
        self.store, self.settings, self._table = store, settings, SegmentTable(req_to_token, layout.segment)
        self.pivots = Pivots(store, roles, settings.overlay, share)
        satellites = roles.satellites
        self.reservoir = Reservoir(store, satellites, entries)
        self._first = self.reservoir.first
        num_rows = self._table.num_rows
        self.overlays = Overlays(
            num_rows, self._first[-1], settings.overlay, layout.head_dim, store.slabs.dtype, device
        )
        self._heads = [torch.tensor(own, dtype=torch.int64, device=device) for own in satellites]
        pivot_of = [int(roles.watched_by[layer, head]) for layer, own in enumerate(satellites) for head in own]
        self._pivot_of = torch.tensor(pivot_of, dtype=torch.int64)
        shape = (num_rows, settings.pivots, settings.interval, store.q_per_kv)
        self._queries = torch.zeros((*shape, layout.head_dim), dtype=store.query_dtype, device=device)
        self._sums = torch.zeros(shape, dtype=torch.float32, device=device)
        self.running: tuple[int, ...] = ()
        self._prompts: dict[int, int] = {}
        self._bases: dict[int, dict[int, torch.Tensor]] = {}
        self._asked: dict[int, _Asked] = {}
        self._seen_from: dict[int, int] = {}
        self._windows: list[_Window] = []
        self.counts = RetrievalCounts()

    gauges: ClassVar = {
        "reservoir_bytes_in_use": "Host bytes on this rank of rows that heads dropped of cached or running segments."
    }
    counters: ClassVar = {
        "pivot_questions": "Comparisons in decode of a pivot's attention with the last fetch.",
        "pivot_answers": "Comparisons after which rows were fetched, because the attention had moved.",
        "retrieved_rows": "Keys and values that were fetched from the reservoir, in prefill and in decode.",
    }
    label: ClassVar = ""

    def readings(self) -> Mapping[tuple[str, str], float]:
        """Return metric values by name and label."""
        counts = self.counts
        of_counters = dict(zip(self.counters, (counts.asked, counts.fetched, counts.rows), strict=True))
        return {(name, ""): value for name, value in of_counters.items()} | {
            ("reservoir_bytes_in_use", ""): self.reservoir.bytes_in_use
        }

    @property
    def device_bytes(self) -> int:
        return self.overlays.nbytes + self._queries.nbytes + self._sums.nbytes

    def involves(self, layer: int) -> bool:
        """Return True if a layer has pivots or satellites."""
        return bool(self.pivots.at(layer)) or len(self._heads[layer]) > 0

    def begin(self, row: int, length: int) -> None:
        """Note that a request of `length` tokens is about to be prefilled in a row, or continues."""
        self.forget(row)
        self._prompts[row] = length

    def forget(self, row: int) -> None:
        """Forget a row's request, which has ended or was retracted."""
        self._prompts.pop(row, None)
        self._bases.pop(row, None)
        self._asked.pop(row, None)
        if self._seen_from.pop(row, None) is not None:
            self.overlays.clear(row)

    def overlaid_from(self, row: int) -> int | None:
        """Return the first position of a row's request that may have seen an overlay, or None; equal on all ranks.

        Tokens from this position on must not be shared: their keys and values depend on the request's overlays.
        """
        return self._seen_from.get(row)

    def describe_extend(self, req_pool_indices: Sequence[int], prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Find the tokens of a batch of chunks that end their prompts, before its layers run."""
        self._windows, at = [], 0
        segment = self.store.layout.segment
        for row, prefix, length in zip(req_pool_indices, prefixes, lengths, strict=True):
            end = prefix + length
            start = max(end - ASKING_TOKENS, prefix)
            at += length
            if end == self._prompts.get(row) and start >= segment:
                tokens = slice(at - (end - start), at)
                before, after = (self._table.row_slots(row, position // segment) for position in (start, end))
                self._seen_from.setdefault(row, start)
                self._windows.append(_Window(row, tokens, start, before, after, {}, {}))

    def after_extend(self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Let pivots watch and satellites see their overlays, after a layer's attention. In place.

        Args:
            queries, output: [tokens, heads, q_per_kv, head_dim]. lse: float32 [tokens, heads, q_per_kv].
        """
        for window in self._windows:
            own = dict(self.pivots.own(layer))
            for number in self.pivots.at(layer):
                head = own.get(number, 0)
                asking = queries[window.tokens, head], lse[window.tokens, head]
                window.named[number] = named = self.pivots.name(number, *asking, window.slots, window.start)
                if len(window.slots_after) > len(window.slots):
                    named = self.pivots.name(number, *asking, window.slots_after, window.start)
                window.named_after[number] = named
                self._bases.setdefault(window.row, {})[number] = named.base
            if queries.is_cuda and self.pivots.at(layer):
                # The host waits, because the layer's satellites need the named tokens at once.
                torch.cuda.current_stream().synchronize()
            if window.named and len(self._heads[layer]):
                self._see_window(layer, window, queries, output, lse)
                if len(window.slots_after) > len(window.slots):
                    satellites = slice(self._first[layer], self._first[layer + 1])
                    self._fetch(window.row, satellites, window.named_after, layer)

    def _see_window(
        self, layer: int, window: _Window, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> None:
        satellites = slice(self._first[layer], self._first[layer + 1])
        if not self._fetch(window.row, satellites, window.named, layer):
            return
        heads, own = self._heads[layer], queries[window.tokens]
        asking = own[:, heads].permute(1, 0, 2, 3).flatten(1, 2)[None]
        kv_rows, counts = (part[window.row, satellites][None] for part in (self.overlays.kv_rows, self.overlays.counts))
        attended_to, sums = attend_overlay(asking, kv_rows, counts, self.store.logit_scale(layer))
        shape = (len(heads), own.shape[0], own.shape[2])
        attended_to = attended_to[0].unflatten(1, shape[1:]).transpose(0, 1)
        sums = sums[0].unflatten(1, shape[1:]).transpose(0, 1)
        # Slices are views, so the addition changes the batch's own output.
        seen = output[window.tokens], lse[window.tokens]
        add_overlay(*seen, heads, attended_to, sums, self.store.value_scale(layer))

    def describe_decode(self, req_pool_indices: Sequence[int], lengths: Sequence[int]) -> None:
        """Use overlays that have arrived and request new ones, before a decode step. Lengths count the new token."""
        for row, length in zip(req_pool_indices, lengths, strict=True):
            position, asked = length - 1, self._asked.get(row)
            if asked is not None and position >= asked.position + DELAY:
                self._apply_answers(row, self._asked.pop(row), position)
            due = position % self.settings.interval == 0
            if due and position - self.settings.interval >= self._prompts.get(row, position):
                self._request_overlay(row, position)

    def after_decode(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
        req_pool_indices: torch.Tensor, positions: torch.Tensor,
    ) -> None:  # fmt: skip
        """Keep pivots' queries and add overlays, after a layer's attention in a decode step. In place.

        Runs on the device alone, at fixed addresses. Arguments as in `after_extend`, with one token for each request.

        Args:
            req_pool_indices, positions: int64 [batch], rows of the requests and positions of the tokens; padding has 0.
        """
        offsets = positions % self.settings.interval
        for number, head in self.pivots.own(layer):
            self._queries[req_pool_indices, number, offsets] = queries[:, head].to(self._queries.dtype)
            self._sums[req_pool_indices, number, offsets] = lse[:, head]
        heads = self._heads[layer]
        if not len(heads):
            return
        satellites = slice(self._first[layer], self._first[layer + 1])
        fetched, counts = self.overlays.of(req_pool_indices, satellites)
        attended_to, sums = attend_overlay(queries[:, heads], fetched, counts, self.store.logit_scale(layer))
        add_overlay(output, lse, heads, attended_to, sums, self.store.value_scale(layer))

    def _request_overlay(self, row: int, position: int) -> None:
        """Name the tokens that all pivots attended to in the last `interval` steps. Does not wait for the device."""
        slots = self._table.row_slots(row, position // self.store.layout.segment)
        if not len(slots):
            return
        queries, sums = self._queries[row], self._sums[row]
        first = position - self.settings.interval
        named = [
            self.pivots.name(number, queries[number], sums[number], slots, first) for number in range(len(queries))
        ]
        arrived = None
        if slots.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._asked[row] = _Asked(position, tuple(named), arrived)

    def _apply_answers(self, row: int, asked: _Asked, position: int) -> None:
        """Fetch rows for the satellites of pivots whose attention has moved."""
        if asked.arrived is not None:
            asked.arrived.synchronize()
        bases = self._bases.setdefault(row, {})
        for number, named in enumerate(asked.named):
            self.counts.asked += 1
            base = bases.get(number)
            if base is not None and median_overlap(named.tops, base) >= self.settings.drift:
                continue
            bases[number] = named.base
            self.counts.fetched += 1
            watched = (self._pivot_of == number).nonzero()[:, 0]
            self._fetch_for(row, watched, {number: named}, None)
            # Set even if no row was fetched: other ranks may have fetched rows, and trees must be equal on all ranks.
            self._seen_from.setdefault(row, position)

    def _fetch(self, row: int, satellites: slice, named: dict[int, PivotTopK], layer: int | None) -> bool:
        """Fetch rows for a layer's satellites whose pivots have named tokens; return True if any were fetched."""
        own = torch.arange(satellites.start, satellites.stop)
        ready = torch.tensor([int(self._pivot_of[one]) in named for one in own.tolist()], dtype=torch.bool)
        return self._fetch_for(row, own[ready], named, layer)

    def _fetch_for(self, row: int, satellites: torch.Tensor, named: dict[int, PivotTopK], layer: int | None) -> bool:
        """Replace overlays of satellites with the tokens of their pivots; return True if any has rows."""
        if not len(satellites):
            return False
        entries = {
            number: torch.tensor(self.reservoir.entries(one.slots.tolist(), layer)) for number, one in named.items()
        }
        pivots = [int(self._pivot_of[one]) for one in satellites.tolist()]
        length = max(len(one) for one in entries.values())
        where = torch.full((len(pivots), length), NOWHERE, dtype=torch.int64)
        offsets = torch.zeros((len(pivots), length), dtype=torch.int64)
        for line, pivot in enumerate(pivots):
            where[line, : len(entries[pivot])] = entries[pivot]
            offsets[line, : len(entries[pivot])] = named[pivot].offsets
        kv_rows, counts = self.reservoir.gather(satellites, where, offsets, self.overlays.most)
        self.overlays.install(row, satellites, kv_rows, counts)
        self.counts.rows += int(counts.sum())
        return bool(counts.any())
