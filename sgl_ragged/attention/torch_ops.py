"""Attention over slabs and tails in plain torch: the oracle of the kernels, and what runs on CPUs.

A query sees its own segment uncompressed up to itself, and of earlier segments what its head kept. Loops run over
requests, segments and bands, never over tokens.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_ragged.attention.operations import Copies, ExtendBatch, Operations
from sgl_ragged.attention.torch_past import Past, WidePast, past_of
from sgl_ragged.attention.view import DecodeView, ExtendView, Piece, most_seen
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import Band
from sgl_ragged.mem_pool.segments import InChunk
from sgl_ragged.mem_pool.slab_store import SlabStore

CACHE_BYTES = 8 << 20
"""Bytes that decode gathers at once on a CPU: more would leave the processor's cache before they are used."""


@dataclass(frozen=True)
class DecodePart:
    """Requests of a decode batch that attend together. tokens_read: tokens of their longest tail, in whole pages.

    `real`: int64, which of them are no padding; None where all are. Padding writes nothing: what others read under a
    mask may lie in its page, and must be finite.
    """

    requests: slice
    view: DecodeView
    tokens_read: int
    real: torch.Tensor | None
    _masks: dict[int, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, kept: int) -> torch.Tensor | None:
        """bool [batch, 1, 1, most seen * kept]: rows of the history that a query does not see, made once per `kept`;
        None where all see as many segments."""
        if kept not in self._masks:
            seen, most = self.view.seen, self.view.slots.shape[1]
            rows = torch.arange(most * kept, device=seen.device) >= seen[:, None] * kept
            self._masks[kept] = (
                None if seen.device.type == "cpu" and bool((seen == most).all()) else rows[:, None, None]
            )
        return self._masks[kept]

    @functools.cached_property
    def open_mask(self) -> torch.Tensor:
        """Return the tokens of open segments that each query may see, bool [batch, 1, 1, tokens_read]."""
        tokens = torch.arange(self.tokens_read, device=self.view.slots.device)
        return (tokens <= self.view.open_offsets[:, None])[:, None, None]


class TorchOps(Operations):
    """Operations in torch."""

    captures_graphs = False

    def __init__(self, store: SlabStore, in_view: torch.Tensor | None = None) -> None:
        super().__init__(store, in_view)
        layout = store.layout
        widest = max(len(band.heads) * band.kept for bands in layout.bands for band in bands)
        # Codes are numbers of 32 bits once they are unpacked.
        itemsize = 4 if layout.form.quantised else store.slabs.element_size()
        self._segment_bytes = 2 * widest * layout.head_dim * itemsize

    def token_inputs(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.token_scores(layer, hidden_states)

    def to_cache(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.store.to_cache(layer, keys, values)

    def room_for_output(self, queries: torch.Tensor, view: ExtendView) -> torch.Tensor:
        return torch.zeros_like(queries, memory_format=torch.contiguous_format)

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
        self.append_with_inputs(layer, keys, values, scorer_inputs, copies, pages, rows)

    def reserve(self, max_batch: int) -> None:
        """Do nothing: batches are described in tensors of their own."""

    def room(self, batch: int, seq_lens_cpu: torch.Tensor) -> DecodeView:
        most = most_seen(seq_lens_cpu, self.store.layout.segment, self.in_view)
        return DecodeView.empty(batch, most, self.store.tails)

    def decode_batch(self, view: DecodeView) -> tuple[DecodePart, ...]:
        """Split a view for `decode` into parts whose history fits the processor's cache."""
        # Memory after the seen tokens may hold anything; masked values must be finite.
        unseen = torch.arange(view.slots.shape[1], device=view.slots.device) >= view.seen[:, None]
        view = replace(view, slots=view.slots.masked_fill(unseen, 0), open_offsets=view.open_offsets.long())
        tails, each = self.store.tails, self.store.tails.open_pages.tokens
        last = view.open_offsets[:, None] // each
        begun = (view.open_offsets % each == 0) & (view.req_pool_indices > 0)
        tails.clear(view.pages[begun].gather(1, last[begun]).flatten())
        # Of who has a longer tail in the batch more pages are read: in their place, one that was cleared.
        beyond = torch.arange(view.pages.shape[1], device=last.device) > last
        view = replace(view, pages=torch.where(beyond, view.pages[:, :1], view.pages))
        size, longest = len(view), view.slots.shape[1] * self._segment_bytes
        pieces = 1 if view.req_pool_indices.is_cuda else min(size, -(-size * longest // CACHE_BYTES))
        at_once = -(-size // max(1, pieces))
        parts = []
        for start in range(0, size, at_once):
            own = view[start : start + at_once]
            own = replace(own, slots=own.slots[:, : int(own.seen.max())].long())
            real = None if bool((own.req_pool_indices > 0).all()) else own.req_pool_indices.nonzero()[:, 0]
            most = int(own.open_offsets.max()) // each + 1
            own = replace(own, pages=own.pages[:, :most])
            parts.append(DecodePart(slice(start, start + at_once), own, most * each, real))
        return tuple(parts)

    def extend_batch(self, view: ExtendView) -> ExtendBatch:
        batch = self.chunk_batch(view)
        begun = view.begun(self.store.tails.open_pages.tokens)
        if begun:
            requests, indices = torch.tensor(begun, device=view.req_pool_indices.device).T
            self.store.tails.clear(batch.next_pages[requests, indices])
        return batch

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor, copies: Copies, pages: torch.Tensor) -> None:
        tokens = copies.tokens.long()
        self.store.append(layer, pages[copies.requests], copies.open_offsets, keys[tokens], values[tokens])

    def seal_chunks(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scorer_inputs: torch.Tensor | None,
        batch: ExtendBatch,
    ) -> None:
        # Run by run: a copy of all keys and values would cost as much as choosing from them.
        for run in batch.view.chunk_runs:
            firsts, slots, numbers = (column[run] for column in batch.chunk_seals)
            first = int(batch.view.chunk_seals[run.start, 2])
            self.store.seal(layer, InChunk(firsts, slots, numbers, keys, values, scorer_inputs, first))

    def attend_chunks(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendBatch,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        for _, pieces in itertools.groupby(batch.view.pieces, key=lambda piece: (piece.request, piece.listed)):
            _attend_pieces(self.store, layer, queries, keys, values, batch, list(pieces), output, lse)
        scale_values(output, self.store.value_scale(layer))

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: tuple[DecodePart, ...],
        scorer_inputs: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        store, output = self.store, torch.empty_like(queries)
        for part in batch:
            own = part.requests
            _append(store, layer, part, keys[own], values[own], None if scorer_inputs is None else scorer_inputs[own])
            output[own] = _attend_part_of_batch(store, layer, queries[own], part, None if lse is None else lse[own])
        scale_values(output, store.value_scale(layer))
        return output


def _append(
    store: SlabStore,
    layer: int,
    part: DecodePart,
    keys: torch.Tensor,
    values: torch.Tensor,
    scorer_inputs: torch.Tensor | None,
) -> None:
    """Write one token per request to the tails."""
    rows, pages, places = part.view.req_pool_indices, part.view.pages, part.view.open_offsets
    if part.real is not None:
        rows, pages, places, keys, values = (x[part.real] for x in (rows, pages, places, keys, values))
        scorer_inputs = None if scorer_inputs is None else scorer_inputs[part.real]
    store.append(layer, pages, places, keys, values)
    if scorer_inputs is not None:
        store.tails.append_inputs(layer, pages, rows, places, scorer_inputs)


def scale_values(output: torch.Tensor, scale: float | None) -> None:
    """Scale means of stored values to outputs, in place. Log-sum-exps do not depend on values."""
    if scale is not None:
        output.mul_(scale)


def _attend_pieces(
    store: SlabStore,
    layer: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ExtendBatch,
    pieces: list[Piece],
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Compute attention of pieces of one request that see equal slots; tensors as in `Operations.extend`."""
    view, pages = batch.view, batch.open_pages[pieces[0].request : pieces[0].request + 1]
    slots = view.lists[pieces[0].listed, : max(piece.seen for piece in pieces)].long()
    scale = store.logit_scale(layer)
    # Of pieces of one request, the first alone has tokens before it in its segment.
    offset = pieces[0].offset
    tail = store.tails.read(layer, pages, offset)[0] if offset else None
    first, last = pieces[0].first_token, pieces[-1].first_token + pieces[-1].tokens
    for index, band in enumerate(store.layout.bands[layer]):
        heads = store.band_heads(layer, index)
        if band.kept == 0:
            continue
        # [segments, heads, 2, kept, d] -> [2, heads, segments * kept, d]
        history = store.kept_rows(layer, band, slots, queries.dtype).permute(2, 1, 0, 3, 4).flatten(2, 3)
        own = [x[first:last].index_select(1, heads).transpose(0, 1) for x in (keys, values)]
        asking = queries[first:last].index_select(1, heads).permute(1, 2, 0, 3)
        for piece in pieces:
            tokens = slice(piece.first_token - first, piece.first_token - first + piece.tokens)
            seen = piece.seen * band.kept
            seen_keys, seen_values, mask = _entries(
                band, heads, history[:, :, :seen], own, tail if piece.offset else None, piece, tokens
            )
            chunk = slice(piece.first_token, piece.first_token + piece.tokens)
            if lse is not None:
                attended, logs = _attend_part(asking[:, :, tokens], seen_keys, seen_values, mask, scale)
                lse[chunk, heads] = logs.permute(2, 0, 1)
            else:
                assert not band.partial, "layers with partial heads need their log-sum-exps"
                attended = _attend(asking[:, :, tokens], seen_keys, seen_values, mask, scale)
            output[chunk, heads] = attended.permute(2, 0, 1, 3)


def _entries(
    band: Band,
    heads: torch.Tensor,
    history: torch.Tensor,
    own: list[torch.Tensor],
    tail: torch.Tensor | None,
    piece: Piece,
    tokens: slice,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values [heads, entries, d] that a piece's queries can see, and the mask [tokens, entries].

    Args:
        history: [2, heads, kept rows, d], what the band kept of the segments seen.
        own: keys and values [heads, chunk's tokens, d]; `tokens` are those of the piece.
        tail: [2 (K, V), all heads, piece.offset, d], tokens of the segment from before the chunk, if there are any.
    """
    entries = [[history[part]] for part in (0, 1)]
    if band.attends_open:
        for part in (0, 1):
            if tail is not None:
                entries[part].append(movable(tail[part]).index_select(0, heads).view(tail.dtype).to(own[part].dtype))
            entries[part].append(own[part][:, tokens])
    seen_keys, seen_values = (torch.cat(parts, dim=1) for parts in entries)
    mask = torch.ones((piece.tokens, seen_keys.shape[1]), dtype=torch.bool, device=history.device)
    return seen_keys, seen_values, mask.tril(diagonal=history.shape[2] + piece.offset)


def _attend_part_of_batch(
    store: SlabStore, layer: int, queries: torch.Tensor, part: DecodePart, lse: torch.Tensor | None
) -> torch.Tensor:
    """Compute decode attention over slabs and tails, new tokens included: [batch, heads, q_per_kv, head_dim]."""
    view = part.view
    assert lse is not None or not any(band.partial for band in store.layout.bands[layer]), (
        "layers with partial heads need their log-sum-exps"
    )
    tail = WidePast(*store.tails.pages_of(layer, view.pages.flatten()))
    asked = queries.float() * store.logit_scale(layer)
    tail_logits = _logits(asked, tail).masked_fill_(~part.open_mask, -torch.inf)
    tail_weights, output = torch.zeros_like(tail_logits), torch.zeros_like(asked)
    for index, band in enumerate(store.layout.bands[layer]):
        if band.kept == 0:
            continue
        heads = store.band_heads(layer, index)
        history = past_of(store.gather(layer, band, view.slots.flatten()))
        own = tail_logits.index_select(1, heads) if band.attends_open else None
        attended, weights, logs = _attend_band(
            asked.index_select(1, heads), history, own, part.mask(band.kept), lse is not None
        )
        output[:, heads] = attended
        if own is not None:
            tail_weights[:, heads] = weights
        if lse is not None:
            lse[:, heads] = logs
    return output.add_(_sums(tail_weights, tail)).to(queries.dtype)


def _attend_band(
    queries: torch.Tensor, history: Past, tail: torch.Tensor | None, mask: torch.Tensor | None, log_sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute decode attention of one band in float32: weights of all rows, and the output of its history.

    Args:
        queries: [batch, heads, q_per_kv, d], scaled.
        history: of [batch * segments, heads, kept] rows.
        tail: [batch, heads, q_per_kv, tokens], logits with open segments, masked; None where these are not seen.
        mask: bool [batch, 1, 1, segments * kept], which rows of the history are not there; None where all are.
        log_sums: whether log-sum-exps are wanted; queries may see nothing then.

    Returns:
        The history's part of outputs, like `queries`; the weights of the tail, like `tail`; and the log-sum-exps of the
        logits [batch, heads, q_per_kv], if they are wanted.
    """
    past = _logits(queries, history)
    seen = past.shape[-1]
    if mask is not None:
        past.masked_fill_(mask, -torch.inf)
    logits = past if tail is None else torch.cat([past, tail], dim=-1)
    lse = logits.logsumexp(dim=-1) if log_sums else None
    weights = logits.softmax(dim=-1) if lse is None else _softmax(logits, lse)
    if not seen:
        return torch.zeros_like(queries), weights, lse
    return _sums(weights[..., :seen], history), weights[..., seen:], lse


def _logits(queries: torch.Tensor, past: Past) -> torch.Tensor:
    """[batch, heads, q_per_kv, runs * kept] of queries [batch, heads, q_per_kv, d], each of which asks as many of the
    `runs` of rows of one past.

    Rows are used in the order in which they were gathered: only logits, head_dim times smaller, are brought into one
    row per query.
    """
    size, heads, per_head, dim = queries.shape
    runs = past.entries // size
    asking = past.asking(queries)[:, None].expand(size, runs, heads, per_head, dim).reshape(-1, per_head, dim)
    logits = past.logits(asking).view(size, runs, heads, per_head, past.kept)
    return logits.permute(0, 2, 3, 1, 4).reshape(size, heads, per_head, runs * past.kept)


def _sums(weights: torch.Tensor, past: Past) -> torch.Tensor:
    """Return values of the past times weights in the order of `_logits`, [batch, heads, q_per_kv, d]."""
    size, heads, per_head, _ = weights.shape
    runs = past.entries // size
    ordered = weights.unflatten(3, (runs, past.kept)).permute(0, 3, 1, 2, 4).reshape(-1, per_head, past.kept)
    sums = past.sums(ordered)
    return past.answer(sums.view(size, runs, heads, per_head, -1).sum(dim=1))


def _softmax(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(logits - lse), 0 for a row of -inf. May overwrite the logits."""
    return logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()


def _attend_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `_attend` in float32, 0 for a query that sees nothing; return log-sum-exps [heads, q_per_kv, tokens], too."""
    logits = queries.float() @ keys[:, None].float().transpose(2, 3) * scale
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(dim=-1)
    return (_softmax(logits, lse) @ values[:, None].float()).to(queries.dtype), lse


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend with queries [heads, q_per_kv, tokens, d] to keys [heads, entries, d] under a mask [tokens, entries]."""
    expanded = (*queries.shape[:2], *keys.shape[1:])
    return scaled_dot_product_attention(
        queries, keys[:, None].expand(expanded), values[:, None].expand(expanded), attn_mask=mask, scale=scale
    )
