"""Slabs and tails: the storage behind the pool, in torch and without SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sgl_ragged.layout import Band, SlabLayout
from sgl_ragged.mem_pool.seal_meter import SealMeter
from sgl_ragged.scorers import Scorer, SegmentData, keep_positions, rank_positions


@dataclass(frozen=True)
class PendingSeals:
    """Segments that decode has filled and that must be sealed before anything can read or overwrite them.

    rows, slots: int64 [segments], the tails they lie in and the slabs they go to.
    numbers: int64 [segments], their numbers in their sequences, from 0.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    numbers: torch.Tensor


def _side_dtype(scorer: Scorer, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if scorer.reads_hidden_states else dtype


def side_bytes(scorer: Scorer, layout: SlabLayout, q_per_kv: int, dtype: torch.dtype) -> int:
    """Bytes per row of what the scorer keeps beside the tail."""
    places, elems = scorer.side_shape(layout.segment, q_per_kv, layout.head_dim)
    return layout.num_layers * layout.num_heads * (places + 1) * elems * _side_dtype(scorer, dtype).itemsize


class SlabStore:
    """Sealed segments in slabs, open segments in tails.

    `slabs` is [num_slots, layout.slab_elems], one slab per SGLang page. `tails` is
    [num_rows, layers, 2 (K, V), heads, S, head_dim], one row per row of SGLang's request table; row 0 is its
    padding row. A slab is written once, by `seal`, and is immutable until SGLang reuses its page.

    A row's tail beyond the open segment's length holds zeros or older tokens of the same request, never
    another request's: attention reads padded tails under a mask, where a foreign NaN would still spread.

    Scorers that look at more than keys and values have it kept beside the tails, `sides` [num_rows, layers, heads,
    places + 1, elements]: the queries of a segment's last places, or its token scores. The last place takes what
    need not be kept.

    Args:
        q_per_kv: query heads per head.
        statistics: per layer, the scorer's tensors [heads, ...].

    `scales` holds per layer what attention multiplies logits by, 1 / sqrt(head_dim) unless the owner of the model
    says otherwise before anything is stored. `seal_meter` counts what `seal` and kernels in its place have done.
    """

    def __init__(
        self,
        layout: SlabLayout,
        scorer: Scorer,
        num_slots: int,
        num_rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        q_per_kv: int = 1,
        statistics: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self.layout = layout
        self.scorer = scorer
        self.q_per_kv = q_per_kv
        self.statistics = statistics or [{}] * layout.num_layers
        self.scales = [layout.head_dim**-0.5] * layout.num_layers
        self.slabs = torch.zeros((num_slots, layout.slab_elems), dtype=dtype, device=device)
        self.tails = torch.zeros(
            (num_rows, layout.num_layers, 2, layout.num_heads, layout.segment, layout.head_dim),
            dtype=dtype,
            device=device,
        )
        self.side_places, elems = scorer.side_shape(layout.segment, q_per_kv, layout.head_dim)
        self.sides = torch.zeros(
            (num_rows, layout.num_layers, layout.num_heads, self.side_places + 1, elems),
            dtype=_side_dtype(scorer, dtype),
            device=device,
        )
        self._heads = [
            [torch.tensor(band.heads, dtype=torch.int64, device=device) for band in bands] for bands in layout.bands
        ]
        self.seal_meter = SealMeter(layout.num_layers)
        self._pending: list[PendingSeals] = []
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.slabs.nbytes + self.tails.nbytes + self.sides.nbytes

    @property
    def has_sides(self) -> bool:
        """Whether the scorer needs something of every token beside its key and value."""
        return self.side_places > 0

    def band_heads(self, layer: int, index: int) -> torch.Tensor:
        """int64 [heads of band]: head numbers of the layer's band `index`, on the device."""
        return self._heads[layer][index]

    def band_view(self, layer: int, band: Band) -> torch.Tensor:
        """View [num_slots, heads of band, 2 (K, V), kept, head_dim] of the band's storage."""
        start = int(self.layout.layer_start[layer]) + band.offset
        width = len(band.heads) * 2 * band.kept * self.layout.head_dim
        return self.slabs[:, start : start + width].unflatten(1, (len(band.heads), 2, band.kept, self.layout.head_dim))

    def gather(self, layer: int, band: Band, slots: torch.Tensor) -> torch.Tensor:
        """What a band kept in these slots: [slots, heads of band, 2 (K, V), kept, head_dim].

        The result is scratch memory, valid until the next call: on CPUs, fresh pages for every layer of every
        step cost more than the copy.
        """
        width = len(band.heads) * 2 * band.kept * self.layout.head_dim
        needed = slots.shape[0] * width
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self.slabs.dtype, device=self.slabs.device)
        start = int(self.layout.layer_start[layer]) + band.offset
        gathered = self._scratch[:needed].view(slots.shape[0], width)
        torch.index_select(self.slabs[:, start : start + width], 0, slots, out=gathered)
        return gathered.view(slots.shape[0], len(band.heads), 2, band.kept, self.layout.head_dim)

    def seal(
        self,
        layer: int,
        slots: torch.Tensor,
        numbers: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sides: torch.Tensor | None = None,
    ) -> None:
        """Score finished segments of one layer and write what each head keeps, or its share here, to their slabs.

        Args:
            slots: int64 [segments].
            numbers: int64 [segments], the segments' numbers in their sequences, from 0.
            keys, values: [segments, heads, S, head_dim], keys after RoPE.
            sides: [segments, heads, side places, elements], if the scorer needs them.
        """
        with self.seal_meter.sealing(len(slots)):
            self._seal(layer, slots, numbers, keys, values, sides)

    def _seal(
        self,
        layer: int,
        slots: torch.Tensor,
        numbers: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sides: torch.Tensor | None,
    ) -> None:
        segment = self.layout.segment
        order = None
        for index, band in enumerate(self.layout.bands[layer]):
            if band.kept == 0:
                continue
            heads = self.band_heads(layer, index)
            view = self.band_view(layer, band)
            band_keys, band_values = keys.index_select(1, heads), values.index_select(1, heads)
            stored = slice(band.first, band.first + band.kept)
            if band.total < segment:
                if order is None:
                    scores = self.scorer.score(self.segment_data(layer, numbers, keys, values, sides))
                    order = rank_positions(scores, numbers == 0)
                kept = keep_positions(order.index_select(1, heads), band.total)[..., stored]
                rows = kept[..., None].expand(*kept.shape, self.layout.head_dim)
                band_keys, band_values = band_keys.gather(2, rows), band_values.gather(2, rows)
            else:
                band_keys, band_values = band_keys[:, :, stored], band_values[:, :, stored]
            view[slots] = torch.stack([band_keys, band_values], dim=2).to(view.dtype)

    def segment_data(
        self,
        layer: int,
        numbers: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sides: torch.Tensor | None,
    ) -> SegmentData:
        """Finished segments as the scorer sees them; arguments as in `seal`."""
        queries = token_scores = None
        if sides is not None and self.scorer.reads_hidden_states:
            token_scores = sides[..., 0]
        elif sides is not None:
            queries = sides.unflatten(-1, (self.q_per_kv, self.layout.head_dim)).transpose(2, 3)
        return SegmentData(keys, values, queries, token_scores, self.scales[layer], self.statistics[layer], numbers)

    def write_tail(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make `keys`, `values` ([heads, length, head_dim], length < S) the row's open segment; clears the rest."""
        tail, length = self.tails[row, layer], keys.shape[1]
        tail[0, :, :length] = keys
        tail[1, :, :length] = values
        tail[:, :, length:] = 0

    def write_side(self, layer: int, row: int, sides: torch.Tensor) -> None:
        """Keep what the scorer will need of the row's open segment: [heads, length, elements], length < S."""
        skipped = self.layout.segment - self.side_places
        kept = sides[:, skipped:]
        self.sides[row, layer, :, : kept.shape[1]] = kept

    def append(
        self, layer: int, rows: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write one decoded token per row to its tail.

        Args:
            rows, places: int64 [batch], tail row and place (position mod S) of each token.
            keys, values: [batch, heads, head_dim].
        """
        self.tails[:, layer, 0].transpose(1, 2)[rows, places] = keys.to(self.tails.dtype)
        self.tails[:, layer, 1].transpose(1, 2)[rows, places] = values.to(self.tails.dtype)

    def append_side(self, layer: int, rows: torch.Tensor, places: torch.Tensor, sides: torch.Tensor) -> None:
        """Keep what the scorer will need of one decoded token per row: [batch, heads, elements]."""
        place = places - (self.layout.segment - self.side_places)
        place = torch.where(place < 0, self.side_places, place)
        self.sides[:, layer].transpose(1, 2)[rows, place] = sides.to(self.sides.dtype)

    def defer_seals(self, pending: PendingSeals) -> None:
        """Note segments that the current decode step completes."""
        self._pending.append(pending)

    def take_pending(self) -> PendingSeals | None:
        """The segments noted since the last call, which the caller must seal before any later read or write."""
        if not self._pending:
            return None
        pending, self._pending = self._pending, []
        parts = ([getattr(p, name) for p in pending] for name in ("rows", "slots", "numbers"))
        return PendingSeals(*(torch.cat(part) for part in parts))
