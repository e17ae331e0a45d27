"""The reservoir: rows that satellite heads dropped of sealed segments, uncompressed, in host memory. Without SGLang."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from sgl_ragged.attention.transfer import RowCopy
from sgl_ragged.features.retrieval.settings import entry_rows
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.segments import Sealed
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.transfer import sent

NOWHERE = -1
"""Row index of a token that the head kept, and entry of a slot without one."""


class Reservoir:
    """Store of the rows that satellite heads dropped, with one entry for each sealed segment.

    Entries are keyed by slot, so all requests that share a page share its entry. A full reservoir evicts the least
    recently used entry, whose rows cannot be retrieved any more.

    Args:
        store: store of the segments; the reservoir listens to its seals.
        satellites: satellite heads by layer.
        capacity: number of entries.

    Satellites are numbered through the layers; `first[layer]` is the first of a layer. `bytes_written` counts bytes
    that were copied to the host.
    """

    def __init__(self, store: SlabStore, satellites: Sequence[Sequence[int]], capacity: int) -> None:
        layout = store.layout
        self.layout, self.satellites, self.capacity = layout, [list(own) for own in satellites], capacity
        counts = [
            layout.segment - int(layout.totals[layer][head]) for layer, own in enumerate(satellites) for head in own
        ]
        self._rows = entry_rows(layout, satellites)
        self._first_row = torch.tensor([0, *np.cumsum(counts)[:-1]], dtype=torch.int64)
        self.first = [0, *np.cumsum([len(own) for own in satellites]).tolist()]
        pinned = store.slabs.is_cuda
        shape = (self.capacity, self._rows, 2 * layout.head_dim)
        self._data = torch.empty(shape, dtype=store.slabs.dtype, pin_memory=pinned)
        shape = (self.capacity, len(counts), layout.segment)
        self._row_indices = torch.empty(shape, dtype=torch.int16, pin_memory=pinned)
        self._entries: OrderedDict[int, int] = OrderedDict()
        """Entries by slot, the least recently used first."""
        self._free = list(range(self.capacity))[::-1]
        self._layers = np.zeros(self.capacity, dtype=np.int64)
        self._copied: torch.cuda.Event | None = None
        self._freed: list[torch.Tensor] = []
        self.bytes_written = 0
        self._known: OrderedDict[int, tuple[torch.Tensor, list[int]]] = OrderedDict()
        self._row_copy: RowCopy | None = None
        if store.slabs.is_cuda:
            from sgl_ragged.attention.kernels.row_copy import copy_rows, warm_up

            warm_up(store.slabs.device)
            self._row_copy = copy_rows
        store.add_seal_listener(self._sealed)

    def __len__(self) -> int:
        self._drop_freed()
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._row_indices.nbytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes of entries, including entries of pages that were freed since the last seal."""
        return len(self._entries) * (self.nbytes // self.capacity)

    def forget(self, pages: torch.Tensor) -> None:
        """Free the entries of freed pages, integers, for new segments. Does not wait."""
        self._freed.append(pages)

    def clear(self) -> None:
        """Free all entries."""
        self._freed = []
        self._drop(list(self._entries))

    def _drop(self, slots: Iterable[int]) -> None:
        for slot in slots:
            entry = self._entries.pop(slot, None)
            if entry is not None:
                self._free.append(entry)

    def entries(self, slots: Sequence[int], layer: int | None = None) -> list[int]:
        """Return the entries of slots, NOWHERE for slots without one, and mark them as used.

        layer: layer up to which rows must have been written, in prefill; None for all layers.
        """
        self._drop_freed()
        wanted = self.layout.num_layers if layer is None else layer + 1
        found = []
        for slot in slots:
            entry = self._entries.get(slot, NOWHERE)
            if entry != NOWHERE:
                self._entries.move_to_end(slot)
            found.append(entry if entry != NOWHERE and self._layers[entry] >= wanted else NOWHERE)
        return found

    def gather(
        self, satellites: torch.Tensor, entries: torch.Tensor, offsets: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `most` of each satellite's candidates that it dropped. Waits for copies to the host.

        Args:
            satellites: int64, their numbers.
            entries, offsets: int64 [satellites, candidates], entry and offset in its segment of each; entry NOWHERE for
                candidates without an entry.

        Returns:
            Rows [satellites, most, 2 * head_dim], keys then values, and int32 [satellites], number of valid rows.
        """
        if self._rows == 0:
            # Satellites keep every token at ratio 1, and on ranks where each has a budget of a full segment.
            shape = (len(satellites), most, 2 * self.layout.head_dim)
            return torch.zeros(shape, dtype=self._data.dtype), torch.zeros(len(satellites), dtype=torch.int32)
        if self._copied is not None:
            self._copied.synchronize()
        own = satellites[:, None]
        row_indices = self._row_indices[entries.clamp_min(0), own, offsets].long()
        dropped = (row_indices != NOWHERE) & (entries != NOWHERE)
        # Dropped tokens come first, in the order of the candidates.
        order = (~dropped).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        counts = dropped.sum(dim=1).clamp_max(most)
        rows = (entries * self._rows + self._first_row[own] + row_indices).gather(1, order)
        rows = rows.masked_fill(torch.arange(order.shape[1]) >= counts[:, None], 0)
        found = movable(self._data).view(-1, 2 * self.layout.head_dim)[rows.flatten()].view(*rows.shape, -1)
        if rows.shape[1] < most:
            found = torch.nn.functional.pad(found, (0, 0, 0, most - rows.shape[1]))
        return found.view(self._data.dtype), counts.int()

    def _sealed(self, store: SlabStore, sealed: Sealed) -> None:
        slots = self._slots_of(sealed.segments.slots)
        if sealed.layers[0] == 0:
            self._drop_freed()
            for slot in slots:
                self._admit(slot)
        # In a very long chunk the entries of the first segments may have been evicted for the last.
        present = [number for number, slot in enumerate(slots) if slot in self._entries]
        entries = [self._entries[slots[number]] for number in present]
        if not present:
            return
        where = sent(torch.tensor([present, entries]), store.slabs.device)
        for one in sealed.layers:
            self._write(store, one, sealed, where)
            self._layers[entries] = one + 1
        if store.slabs.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _slots_of(self, slots: torch.Tensor) -> list[int]:
        """Return slots on the host. All layers of a batch seal the same segments, so only the first one waits."""
        known = self._known.get(id(slots))
        if known is None or known[0] is not slots:
            known = self._known[id(slots)] = slots, slots.tolist()
            # A batch seals two sets of segments: open segments that became full, and segments inside of its chunks.
            while len(self._known) > 2:
                self._known.popitem(last=False)
        return known[1]

    def _drop_freed(self) -> None:
        freed, self._freed = self._freed, []
        for pages in freed:
            self._drop(pages.tolist())

    def _admit(self, slot: int) -> None:
        self._drop([slot])
        if not self._free:
            self._drop([next(iter(self._entries))])
        entry = self._free.pop()
        self._layers[entry] = 0
        self._entries[slot] = entry

    def _write(self, store: SlabStore, layer: int, sealed: Sealed, where: torch.Tensor) -> None:
        """Copy rows that the satellites of a layer dropped of finished segments to their entries.

        Args:
            where: int64 [2, segments], which of the segments, and their entries.
        """
        heads = self.satellites[layer]
        if not heads:
            return
        layout, (present, entries) = self.layout, where
        keys, values = (movable(part) for part in store.segment_rows(layer, sealed.segments))
        kept = sealed.kept(layer, layout.segment)
        if len(present) < len(kept):
            keys, values, kept = (part.index_select(0, present) for part in (keys, values, kept))
        # Dropped tokens come first, ascending.
        order = kept.to(torch.uint8).argsort(dim=-1, stable=True)
        shape = (len(present), len(heads), layout.segment)
        row_indices = torch.full(shape, NOWHERE, dtype=torch.int16, device=order.device)
        numbers = torch.arange(layout.segment, dtype=torch.int16, device=order.device)
        rows = []
        for index, head in enumerate(heads):
            count = layout.segment - int(layout.totals[layer][head])
            dropped = order[:, head, :count]
            row_indices[:, index].scatter_(1, dropped, numbers[:count].expand_as(dropped))
            picked = dropped[..., None].expand(-1, -1, layout.head_dim)
            rows.append(torch.cat([part[:, head].gather(1, picked) for part in (keys, values)], dim=-1))
        first = self.first[layer]
        self._to_host(movable(self._data), int(self._first_row[first]), entries, torch.cat(rows, dim=1))
        self._to_host(self._row_indices, first, entries, row_indices)

    def _to_host(self, target: torch.Tensor, first: int, entries: torch.Tensor, source: torch.Tensor) -> None:
        """Write source [segments, rows, elements] to `target` [entries, rows, elements] from row `first` on."""
        self.bytes_written += source.nbytes
        if self._row_copy is None:
            target[entries, first : first + source.shape[1]] = source
            return
        own = torch.arange(len(source), device=source.device)
        row_bytes = source[0, 0].nbytes if source.shape[1] else 0
        self._row_copy(source, target, own, entries, (0, source.shape[1] * row_bytes), first * row_bytes)
