"""Slabs and tails: the storage behind the pool, in torch and without SGLang."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_ragged.layout import Band, SlabLayout
from sgl_ragged.scorers import Scorer, keep_positions


@dataclass(frozen=True)
class PendingSeal:
    """A segment that decode has filled and that must be sealed before anything can read or overwrite it."""

    row: int
    slot: int
    segment_index: int


class SlabStore:
    """Sealed segments in slabs, open segments in tails.

    `slabs` is [num_slots, layout.slab_elems], one slab per SGLang page. `tails` is
    [num_rows, layers, 2 (K, V), heads, S, head_dim], one row per row of SGLang's request table; row 0 is its
    padding row. A slab is written once, by `seal`, and is immutable until SGLang reuses its page.

    A row's tail beyond the open segment's length holds zeros or older tokens of the same request, never
    another request's: attention reads padded tails under a mask, where a foreign NaN would still spread.
    """

    def __init__(
        self,
        layout: SlabLayout,
        scorer: Scorer,
        num_slots: int,
        num_rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        self.layout = layout
        self.scorer = scorer
        self.slabs = torch.zeros((num_slots, layout.slab_elems), dtype=dtype, device=device)
        self.tails = torch.zeros(
            (num_rows, layout.num_layers, 2, layout.num_heads, layout.segment, layout.head_dim),
            dtype=dtype,
            device=device,
        )
        self._heads = [
            [torch.tensor(band.heads, dtype=torch.int64, device=device) for band in bands] for bands in layout.bands
        ]
        self._pending: list[PendingSeal] = []
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.slabs.nbytes + self.tails.nbytes

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
        first_segment: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Score finished segments of one layer and write what each head keeps to their slabs.

        Args:
            slots: int64 [segments].
            first_segment: bool [segments], whether the segment starts its sequence.
            keys, values: [segments, heads, S, head_dim], keys after RoPE.
        """
        segment = self.layout.segment
        scores = None
        for index, band in enumerate(self.layout.bands[layer]):
            heads = self.band_heads(layer, index)
            view = self.band_view(layer, band)
            band_keys, band_values = keys.index_select(1, heads), values.index_select(1, heads)
            if band.kept < segment:
                if scores is None:
                    scores = self.scorer.score(keys, values)
                kept = keep_positions(scores.index_select(1, heads), band.kept, first_segment)
                rows = kept[..., None].expand(*kept.shape, self.layout.head_dim)
                band_keys, band_values = band_keys.gather(2, rows), band_values.gather(2, rows)
            view[slots] = torch.stack([band_keys, band_values], dim=2).to(view.dtype)

    def write_tail(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make `keys`, `values` ([heads, length, head_dim], length < S) the row's open segment; clears the rest."""
        tail, length = self.tails[row, layer], keys.shape[1]
        tail[0, :, :length] = keys
        tail[1, :, :length] = values
        tail[:, :, length:] = 0

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

    def defer_seal(self, pending: PendingSeal) -> None:
        """Note a segment that the current decode step completes; `flush_seals` seals it."""
        self._pending.append(pending)

    def flush_seals(self) -> int:
        """Seal all pending segments from their tails; returns how many. Call before any later read or write."""
        if not self._pending:
            return 0
        pending, self._pending = self._pending, []
        device = self.slabs.device
        rows = torch.tensor([p.row for p in pending], dtype=torch.int64, device=device)
        slots = torch.tensor([p.slot for p in pending], dtype=torch.int64, device=device)
        first = torch.tensor([p.segment_index == 0 for p in pending], dtype=torch.bool, device=device)
        for layer in range(self.layout.num_layers):
            tails = self.tails[rows, layer]
            self.seal(layer, slots, first, tails[:, 0], tails[:, 1])
        return len(pending)
