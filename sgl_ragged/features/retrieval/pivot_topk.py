"""Collect the tokens that pivots attend to. All ranks of a server get the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_ragged.features.retrieval.drift import attended, candidates, top_tokens
from sgl_ragged.features.retrieval.roles import ELSEWHERE, HeadRoles
from sgl_ragged.features.retrieval.settings import CANDIDATES
from sgl_ragged.mem_pool.slab_store import SlabStore

Share = Callable[[int, torch.Tensor], None]
"""Collective call with a pivot's number and integers, which are replaced by those of the rank that has the pivot."""


@dataclass(frozen=True)
class PivotTopK:
    """Tokens that a pivot names, best first: int64 [tokens] slots of their segments and offsets in these, on the host.

    base: int64 [k], the numbers of its top tokens. tops: int64 [queries, k], those of each query.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    base: torch.Tensor
    tops: torch.Tensor


class Pivots:
    """The pivots of a server on one rank.

    Args:
        store: store of the rank.
        roles: roles of the store's heads.
        overlay: most tokens in a satellite's overlay.
        share: sends the tokens that a pivot names to all ranks; None with one rank.
    """

    def __init__(self, store: SlabStore, roles: HeadRoles, overlay: int, share: Share | None) -> None:
        self.store, self.roles, self.overlay, self._share = store, roles, overlay, share

    def at(self, layer: int) -> list[int]:
        """Return the numbers of a layer's pivots on all ranks."""
        return [number for number, (at, _) in enumerate(self.roles.pivots) if at == layer]

    def own(self, layer: int) -> list[tuple[int, int]]:
        """Return number and head of a layer's pivots on this rank."""
        heads = [(number, self.roles.pivots[number][1]) for number in self.at(layer)]
        return [(number, head) for number, head in heads if head != ELSEWHERE]

    def name(
        self, number: int, queries: torch.Tensor, sums: torch.Tensor, slots: torch.Tensor, first: int
    ) -> PivotTopK:
        """Name a pivot's tokens in the first slots of a sequence. Does not wait for the device. All ranks must call.

        Args:
            queries: [n, q_per_kv, head_dim], from position `first` on. sums: float32 [n, q_per_kv]. Both of the pivot;
                on ranks that do not have it, of any head.
            slots: int64, at least one.
        """
        segment, steps = self.store.layout.segment, len(queries)
        length = len(slots) * segment
        sizes = [min(CANDIDATES * self.overlay, length), *[min(self.overlay, length)] * (1 + steps)]
        if self.roles.pivots[number][1] == ELSEWHERE:
            tokens = torch.empty(sum(sizes), dtype=torch.int64, device=slots.device)
        else:
            tokens = self._attended(number, queries, sums, slots, first)
        if self._share is not None:
            self._share(number, tokens)
        named, base, *tops = tokens.split(sizes)
        found = slots[named // segment], named % segment, base, torch.stack(tops)
        if not slots.is_cuda:
            return PivotTopK(*found)
        every = torch.cat([part.flatten() for part in found])
        host = torch.empty(every.shape, dtype=every.dtype, pin_memory=True)
        host.copy_(every, non_blocking=True)
        parts = zip(host.split([part.numel() for part in found]), found, strict=True)
        return PivotTopK(*(part.view(like.shape) for part, like in parts))

    def _attended(
        self, number: int, queries: torch.Tensor, sums: torch.Tensor, slots: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Return int64 tokens: candidates, top tokens of all queries together, and those of each query."""
        layer, head = self.roles.pivots[number]
        store = self.store
        band = next(band for band in store.layout.bands[layer] if head in band.heads)
        keys = store.band_view(layer, band)[slots, band.heads.index(head), 0].flatten(0, 1)
        weights = attended(queries, sums, keys, store.logit_scale(layer), first)
        together = weights.amax(dim=0)[None]
        return torch.cat(
            [
                candidates(weights, CANDIDATES * self.overlay),
                top_tokens(together, self.overlay)[0],
                top_tokens(weights, self.overlay).flatten(),
            ]
        )
