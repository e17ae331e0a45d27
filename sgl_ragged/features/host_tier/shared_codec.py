"""Slabs without the layers that are restored from another layer: Krul's layer sharing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.layer_pairs import Shareable, choose_pairs, distances, pair_candidates
from sgl_ragged.features.host_tier.slab_codec import SlabCodec
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore

if TYPE_CHECKING:
    from sgl_ragged.mem_pool.segments import Sealed


class KeptCounts:
    """Counts of the heads per layer that keep each token, recorded when segments are sealed.

    They take one byte per token and layer in addition to the KV budget. Like the slab, the counts of a segment depend
    only on the tokens up to its end. Counts of slots whose slabs were restored are not valid.

    `counts`: uint8 [num_slots, layers, S], one row for each slot.
    """

    def __init__(self, layout: SlabLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        shape = (num_slots, layout.num_layers, layout.segment)
        self.counts = torch.zeros(shape, dtype=torch.uint8, device=device)

    def note(self, store: SlabStore, sealed: Sealed) -> None:
        """Record the counts of sealed segments; registered with `SlabStore.add_seal_listener`."""
        slots = sealed.segments.slots.long()
        for layer in sealed.layers:
            self.counts[slots, layer] = sealed.kept(layer, self.layout.segment).sum(dim=1, dtype=torch.uint8)


ALIGNMENT = 16
"""Bytes that the header is rounded up to."""


class RowPart(NamedTuple):
    """Run of consecutive elements of one head.

    slab, row: index of the first element in the slab, and in the row after its header.
    elems: number of elements.
    stored: False if the elements are those of another layer's head.
    """

    slab: int
    row: int
    elems: int
    stored: bool


class SharedCodec(SlabCodec):
    """Codec that stores the first of each pair of layers that attend alike, and restores the second from it.

    Wen et al., "Krul: Efficient State Restoration for Multi-turn Conversations with Dynamic Cross-layer KV Sharing"
    (2025), Algorithm 1 (`layer_pairs.choose_pairs`). What differs here:

    - Pairs are chosen for each segment, not for each conversation: a row is a function of the tokens up to its end, so
      that conversations can share it, and later tokens are not known when it is backed up. A row begins with the layer
      that each layer is restored from, int16 [layers].
    - Attention to a token is estimated by the share of the layer's heads that keep it. Krul stores attention weights of
      all queries, which kernels do not return. The first and the last tenth are those of the segment.
    - Rows have one size, so the number of pairs is fixed, and candidates are the best by rank (`layer_pairs`).
    - A head of the second layer is stored if no head of the first layer keeps equally many tokens: with calibrated
      budgets these are most heads. Rows save what every choice of pairs can save (`layer_pairs.Shareable.promise`).
    - Keys and values are the first layer's, unchanged. Krul takes MiniCache's formula, which stores a direction for
      both layers and two lengths.

    Raises:
        RaggedConfigError: no two layers have heads that keep equally many tokens.
    """

    name, exact = "shared", False

    def __init__(self, layout: SlabLayout, dtype: torch.dtype) -> None:
        super().__init__(layout, dtype)
        self._shareable = Shareable(layout)
        self.pairs, least = self._shareable.promise
        if not self.pairs:
            raise RaggedConfigError(
                "--ragged-host-codec shared restores heads of one layer from heads of another that keep equally many "
                "tokens, and this model has none with these budgets; use fp8 or exact"
            )
        self._row_elems = layout.slab_elems - self.pairs * least
        self._header = -(-2 * layout.num_layers // ALIGNMENT) * ALIGNMENT
        self._seen: KeptCounts | None = None

    @property
    def row_bytes(self) -> int:
        return self._header + self._row_elems * self.dtype.itemsize

    def watch(self, store: SlabStore) -> None:
        self._seen = KeptCounts(self.layout, len(store.slabs), store.slabs.device)
        store.add_seal_listener(self._seen.note)

    def sources(self, counts: np.ndarray) -> list[int]:
        """Return the layer that each layer is restored from; a stored layer is its own source.

        Args:
            counts: integers [layers, S], as `KeptCounts` has them.
        """
        attention = counts / np.maximum(counts.sum(axis=1, keepdims=True, dtype=np.float64), 1)
        found = list(range(self.layout.num_layers))
        chosen, eligible = pair_candidates(attention), self._shareable.eligible
        for first, second in choose_pairs(distances(attention), chosen, eligible, self.pairs):
            found[second] = first
        return found

    def encode(self, slabs: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        assert self._seen is not None, "watch() must run before slabs are backed up"
        every = [self.sources(counts) for counts in self._seen.counts[list(slots)].cpu().numpy()]
        rows = torch.zeros((len(slabs), self.row_bytes), dtype=torch.uint8, device=slabs.device)
        header = torch.tensor(every, dtype=torch.int16).view(torch.uint8)
        rows[:, : header.shape[1]] = header.to(slabs.device)
        elements = rows[:, self._header :].view(self.dtype)
        for number, sources in enumerate(every):
            for piece in merged(piece for layer in self.pieces(sources) for piece in layer if piece.stored):
                stored = slabs[number, piece.slab : piece.slab + piece.elems]
                elements[number, piece.row : piece.row + piece.elems] = stored
        return rows

    def decode(self, rows: torch.Tensor, first: int, end: int, device: torch.device) -> torch.Tensor:
        start, stop = (int(self.layout.layer_start[layer]) for layer in (first, end))
        slabs = torch.empty((len(rows), stop - start), dtype=self.dtype, device=device)
        elements = rows[:, self._header :].view(self.dtype)
        headers = rows[:, : 2 * self.layout.num_layers].view(torch.int16)
        for number, sources in enumerate(headers.tolist()):
            for piece in merged(piece for layer in self.pieces(sources)[first:end] for piece in layer):
                here = slabs[number, piece.slab - start : piece.slab - start + piece.elems]
                here.copy_(elements[number, piece.row : piece.row + piece.elems], non_blocking=True)
        return slabs

    def pieces(self, sources: Sequence[int]) -> list[list[RowPart]]:
        """Return the positions of each layer's heads in the row, in the slab's order."""
        found: list[list[RowPart]] = []
        rows: dict[tuple[int, int], int] = {}
        end = 0
        for layer, source in enumerate(sources):
            restored = {} if source == layer else self._shareable.heads(source, layer)
            own: list[RowPart] = []
            for band in self.layout.bands[layer]:
                elems = 2 * band.kept * self.layout.head_dim
                for head in band.heads if elems else ():
                    slab = int(self.layout.key_offset[layer, head])
                    if head in restored:
                        own.append(RowPart(slab, rows[source, restored[head]], elems, stored=False))
                        continue
                    own.append(RowPart(slab, end, elems, stored=True))
                    rows[layer, head] = end
                    end += elems
            found.append(own)
        assert end <= self._row_elems, "every choice of pairs saves what is promised"
        return found


def merged(pieces: Iterable[RowPart]) -> list[RowPart]:
    """Join pieces that follow each other in the slab and in the row."""
    found: list[RowPart] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and (last.slab + last.elems, last.row + last.elems) == (piece.slab, piece.row):
            found[-1] = last._replace(elems=last.elems + piece.elems)
        else:
            found.append(piece)
    return found
