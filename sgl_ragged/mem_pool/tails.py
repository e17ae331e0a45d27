"""Tails: storage of open segments' tokens, and of what scorers will need of them."""

from __future__ import annotations

import math

import torch

from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages

COPIED_BYTES = 64 << 20
"""Most pages that are copied at a time."""

BEFORE, NOW = 0, 1
"""Indices of a request's open segments in `Tails.table`."""


def token_bytes(layout: SlabLayout, itemsize: int, input_shape: tuple[int, int], input_itemsize: int) -> int:
    """Bytes of one token of an open segment: keys, values, and what the scorer needs of every token, if it does."""
    places, elements = input_shape
    beside = elements * input_itemsize if places == layout.segment else 0
    return layout.num_layers * layout.num_heads * (2 * layout.head_dim * itemsize + beside)


class Tails:
    """Tokens of open segments in pages of the pool, T of them a page (`OpenPages.tokens`), K pages a segment at most.

    `data` is [num_slots, layers, 2 (K, V), heads, T, head_dim], the pages as open segments have them: the same memory
    as the slabs. A page holds either. Whoever hands out pages writes to `table`, int32 [num_rows, 2, K], which pages
    open segments have beside their own: of table[row, which] the first K - 1 are extra pages, in order, and the last is
    the stage, where there is one. `which` is NOW for the segment that is open once the batch is done, and BEFORE for
    one that the batch finishes. Nothing here waits for the device.

    Scorer inputs of every token are stored in the pages, too. Inputs of a segment's last `places` tokens alone are in
    `inputs`, [num_rows, layers, heads, places + 1, elements]; the last place takes inputs that are not kept.

    Args:
        slabs: [num_slots, elements of a slab].
        dtype: of the cache.
        input_shape: places and elements, 0 where the scorer needs nothing more. input_dtype: of these.
    """

    def __init__(
        self,
        layout: SlabLayout,
        slabs: torch.Tensor,
        dtype: torch.dtype,
        num_rows: int,
        pages: OpenPages,
        input_shape: tuple[int, int],
        input_dtype: torch.dtype,
    ) -> None:
        self.open_pages, self.segment = pages, layout.segment
        self.places, elements = input_shape
        layers, heads, tokens, dim = layout.num_layers, layout.num_heads, pages.tokens, layout.head_dim
        self._slabs = slabs
        stored = slabs.view(dtype)
        shape = (layers, 2, heads, tokens, dim)
        self.data = stored.as_strided((len(slabs), *shape), (stored.shape[1], *_strides(shape)))
        self._scratch = torch.empty(0, dtype=dtype, device=slabs.device)
        self.table = torch.zeros((num_rows, 2, pages.most), dtype=torch.int32, device=slabs.device)
        self._in_pages = self.places == layout.segment
        if self._in_pages:
            start = 2 * layers * heads * tokens * dim * dtype.itemsize
            beside = slabs.view(torch.uint8)[:, start:].view(input_dtype) if start else slabs
            of_page = (layers, heads, tokens, elements)
            strides = (slabs.view(torch.uint8).shape[1] // input_dtype.itemsize, *_strides(of_page))
            self.inputs = beside.as_strided((len(slabs), *of_page), strides, beside.storage_offset())
        else:
            rows = (num_rows, layers, heads, self.places + 1, elements)
            self.inputs = torch.zeros(rows, dtype=input_dtype, device=slabs.device)

    @property
    def num_rows(self) -> int:
        return self.table.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the pages."""
        return self.table.nbytes + (0 if self._in_pages else self.inputs.nbytes)

    def pages(self, rows: torch.Tensor, slots: torch.Tensor, which: int | torch.Tensor) -> torch.Tensor:
        """int32 [n, K]: pages of open segments of some rows, int64 [n]; of these, their own are `slots`, integers [n].

        Behind those that a segment has there is something that is not to be read. which: for all, or int64 [n].
        """
        return torch.cat([slots[:, None].to(torch.int32), self.table[rows, which, :-1]], dim=1)

    def stages(self, rows: torch.Tensor, which: int) -> torch.Tensor:
        """int32 [n]: stages of segments that are about to be sealed."""
        return self.table[rows, which, -1]

    def stage(self, slots: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Copy segments' own pages to their stages: their pages are now [stage, extra pages], int32 [n, K].

        Args:
            slots: integers [n]. pages: int32 [n, K] with stages in the first place.
        """
        if len(slots):
            self.copy(slots, pages[:, 0])
        return pages

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, integers [n] each; none of them is both."""
        whole = movable(self._slabs)
        # Where a thousand requests end a segment at once, not all of their pages are held twice.
        at_once = max(1, COPIED_BYTES // whole[0].nbytes)
        for sources, targets in zip(source.split(at_once), target.split(at_once), strict=True):
            whole[targets.long()] = whole.index_select(0, sources)

    @property
    def reusable(self) -> int:
        """Tokens of an open segment whose pages hold all that is needed of them."""
        return self.segment if self._in_pages else self.segment - self.places

    def clear(self, pages: torch.Tensor) -> None:
        """Before an open segment has them: zeros, integers [n]. Attention in torch reads after the last token, under a
        mask, where a foreign NaN would still spread."""
        movable(self._slabs)[pages.long()] = 0

    def segments(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, heads, S, head_dim] of full open segments with these pages, [n, K]."""
        full = self.read(layer, pages, self.segment)
        return full[:, 0], full[:, 1]

    def segment_inputs_of_all_layers(self, pages: torch.Tensor) -> torch.Tensor:
        """Return `segment_inputs` of all layers, [n, layers * heads, S, elements], which are stored in pages."""
        found = self.inputs.index_select(0, pages.flatten()).unflatten(0, pages.shape)
        # [n, K, layers, heads, T, elements] -> [n, layers * heads, K * T, elements]
        return found.movedim(1, 3).flatten(3, 4).flatten(1, 2)[:, :, : self.segment]

    def segment_inputs(self, layer: int, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """[n, heads, places, elements] of full open segments; None where the scorer needs nothing more."""
        if not self.places:
            return None
        if not self._in_pages:
            return self.inputs[rows, layer, :, : self.places]
        found = self.inputs[:, layer].index_select(0, pages.flatten()).unflatten(0, pages.shape)
        return found.transpose(1, 2).flatten(2, 3)[:, :, : self.segment]

    def read(self, layer: int, pages: torch.Tensor, length: int) -> torch.Tensor:
        """[n, 2 (K, V), heads, length, head_dim]: a copy of the first tokens of open segments with pages [n, K]."""
        some = pages[:, : -(-length // self.open_pages.tokens)]
        found = movable(self.data[:, layer]).index_select(0, some.flatten()).unflatten(0, some.shape)
        if some.shape[1] == 1:
            return found[:, 0, :, :, :length].view(self.data.dtype)
        return found.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length].view(self.data.dtype)

    def pages_of(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole pages, integers [n]: [n, heads, T, head_dim] each, as the cache holds them.

        The results are scratch memory, valid until the next call, as those of `SlabStore.gather`.
        """
        shape = (2, len(pages), *self.data.shape[3:])
        needed = math.prod(shape)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self.data.dtype, device=self.data.device)
        keys, values = found = self._scratch[:needed].view(shape)
        for part in (0, 1):
            torch.index_select(movable(self.data[:, layer, part]), 0, pages, out=movable(found[part]))
        return keys, values

    def append(
        self, layer: int, pages: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write tokens, keys and values [tokens, heads, head_dim] as the cache holds them.

        Args:
            pages: integers [tokens, K], of each token's segment. places: integers [tokens], place in it.
        """
        page, place = self._at(pages, places)
        self.data[:, layer, 0].transpose(1, 2)[page, place] = keys
        self.data[:, layer, 1].transpose(1, 2)[page, place] = values

    def append_inputs(
        self, layer: int, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, inputs: torch.Tensor
    ) -> None:
        """Store what the scorer will need of appended tokens: [tokens, heads, elements]. rows: int64 [tokens]."""
        if self._in_pages:
            page, place = self._at(pages, places)
            self.inputs[:, layer].transpose(1, 2)[page, place] = inputs.to(self.inputs.dtype)
            return
        place = places - (self.segment - self.places)
        place = torch.where(place < 0, self.places, place)
        self.inputs[:, layer].transpose(1, 2)[rows, place] = inputs.to(self.inputs.dtype)

    def _at(self, pages: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [tokens] each: the page of each token, and its place there."""
        places = places.long()
        block = places // self.open_pages.tokens
        return pages.gather(1, block[:, None])[:, 0].long(), places - block * self.open_pages.tokens


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
