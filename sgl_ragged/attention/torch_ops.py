"""Attention over slabs and tails in plain torch: the oracle of the kernels, and what runs on CPUs.

Design section 3: a query sees its own segment uncompressed up to itself, and of earlier segments what its
head kept. Loops run over requests, segments and bands, never over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_ragged.attention.batch import DecodeBatch, ExtendBatch, ExtendRequest, decode_batch, extend_batch
from sgl_ragged.mem_pool.slab_store import SlabStore

CACHE_BYTES = 8 << 20
"""Of what decode gathers at once, on a CPU: more would have left the processor's cache before it is used."""


@dataclass(frozen=True)
class DecodePart:
    """Requests of a decode batch that attend together."""

    requests: slice
    batch: DecodeBatch


class TorchOps:
    """The operations of this module, as the backend asks for them (`operations.Operations`)."""

    captures_graphs = False

    def __init__(self, store: SlabStore) -> None:
        self.store = store
        layout = store.layout
        widest = max(len(band.heads) * band.kept for bands in layout.bands for band in bands)
        self._segment_bytes = 2 * widest * layout.head_dim * store.slabs.element_size()

    def reserve(self, max_batch: int) -> None:
        """Nothing to do: batches are described in tensors of their own."""

    def describe_extend(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, prefixes: list[int], lengths: list[int]
    ) -> ExtendBatch:
        return extend_batch(req_to_token, rows.tolist(), prefixes, lengths, self.store.layout.segment)

    def describe_decode(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> tuple[DecodePart, ...]:
        segment = self.store.layout.segment
        longest = int(seq_lens_cpu.max()) // segment * self._segment_bytes
        size = rows.shape[0]
        pieces = 1 if rows.is_cuda else min(size, -(-size * longest // CACHE_BYTES))
        at_once = -(-size // max(1, pieces))
        parts = []
        for start in range(0, size, at_once):
            own = slice(start, start + at_once)
            batch = decode_batch(req_to_token, rows[own], seq_lens[own], seq_lens_cpu[own], segment)
            parts.append(DecodePart(own, batch))
        return tuple(parts)

    def extend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendBatch,
        sides: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return extend(self.store, layer, queries, keys, values, batch, sides, lse)

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: tuple[DecodePart, ...],
        sides: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = torch.empty_like(queries)
        for part in batch:
            own = part.requests
            own_sides, own_lse = (None if tensor is None else tensor[own] for tensor in (sides, lse))
            output[own] = decode(
                self.store, layer, queries[own], keys[own], values[own], part.batch, own_sides, own_lse
            )
        return output

    def seal_pending(self) -> None:
        seal_pending(self.store)


def seal_pending(store: SlabStore) -> None:
    """Seal all pending segments of the store from their tails. Call before any later read or write."""
    pending = store.take_pending()
    if pending is None:
        return
    for layer in range(store.layout.num_layers):
        tails = store.tails[pending.rows, layer]
        sides = store.sides[pending.rows, layer, :, : store.side_places] if store.has_sides else None
        store.seal(layer, pending.slots, pending.numbers, tails[:, 0], tails[:, 1], sides)


def extend(
    store: SlabStore,
    layer: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ExtendBatch,
    sides: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store a chunk's keys and values (sealing segments that it finishes), then attend.

    Args:
        queries: [tokens, heads, q_per_kv, head_dim].
        keys, values: [tokens, heads, head_dim], keys after RoPE.
        sides: [tokens, heads, elements], what the store's scorer needs of each token, if anything.
        lse: float32 [tokens, heads, q_per_kv], all -inf, for layers with partial heads: theirs get the natural
            log-sum-exps of their logits. They remain -inf where a head attends to nothing here, and its output is 0.

    Returns:
        [tokens, heads, q_per_kv, head_dim]. Changes the slabs of finished segments and the requests' tails.
    """
    output = torch.zeros_like(queries)
    # What is scored and read must not depend on whether a token came through the cache, so it has the cache's dtype.
    keys, values = keys.to(store.slabs.dtype), values.to(store.slabs.dtype)
    for request in batch.requests:
        if request.length == 0:
            continue
        tokens = slice(request.batch_start, request.batch_start + request.length)
        own_sides = None if sides is None else sides[tokens].to(store.sides.dtype)
        own_keys, own_values = _store_chunk(store, layer, keys[tokens], values[tokens], own_sides, request)
        own_lse = None if lse is None else lse[tokens]
        output[tokens] = _attend_chunk(store, layer, queries[tokens], own_keys, own_values, request, own_lse)
    return output


def _store_chunk(
    store: SlabStore,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    sides: torch.Tensor | None,
    request: ExtendRequest,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seal what the chunk finishes, keep the rest as the tail.

    Returns the request's own keys and values from the start of the segment that was open, [heads, tokens, head_dim].
    """
    segment = store.layout.segment
    own_keys, own_values = keys.transpose(0, 1), values.transpose(0, 1)
    open_length = request.prefix % segment
    if open_length:
        tail = store.tails[request.row, layer, :, :, :open_length]
        own_keys, own_values = torch.cat([tail[0], own_keys], dim=1), torch.cat([tail[1], own_values], dim=1)
    own_sides = None if sides is None else _own_sides(store, layer, sides.transpose(0, 1), request.row, open_length)
    first = request.prefix // segment
    finished = request.slots.shape[0] - first
    if finished:
        sealed_sides = None
        if own_sides is not None:
            sealed_sides = own_sides[:, : finished * segment].unflatten(1, (finished, segment)).transpose(0, 1)
            sealed_sides = sealed_sides[:, :, segment - store.side_places :]
        shape = (own_keys.shape[0], finished, segment, own_keys.shape[2])
        numbers = torch.arange(first, first + finished, device=keys.device)
        store.seal(
            layer,
            request.slots[first:],
            numbers,
            own_keys[:, : finished * segment].reshape(shape).transpose(0, 1),
            own_values[:, : finished * segment].reshape(shape).transpose(0, 1),
            sealed_sides,
        )
    store.write_tail(layer, request.row, own_keys[:, finished * segment :], own_values[:, finished * segment :])
    if own_sides is not None:
        store.write_side(layer, request.row, own_sides[:, finished * segment :])
    return own_keys, own_values


def _own_sides(store: SlabStore, layer: int, sides: torch.Tensor, row: int, open_length: int) -> torch.Tensor:
    """Sides [heads, tokens, elements] from the start of the open segment; zeros where none were kept."""
    if open_length == 0:
        return sides
    skipped = store.layout.segment - store.side_places
    earlier = sides.new_zeros((sides.shape[0], open_length, sides.shape[2]))
    if open_length > skipped:
        earlier[:, skipped:] = store.sides[row, layer, :, : open_length - skipped]
    return torch.cat([earlier, sides], dim=1)


def _attend_chunk(
    store: SlabStore,
    layer: int,
    queries: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    request: ExtendRequest,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one request's chunk, segment by segment; shapes as in `extend` for this request's tokens."""
    segment = store.layout.segment
    first, open_length = request.prefix // segment, request.prefix % segment
    total = own_keys.shape[1]
    output = torch.empty_like(queries)
    own_keys, own_values = own_keys.to(queries.dtype), own_values.to(queries.dtype)
    for index, band in enumerate(store.layout.bands[layer]):
        heads = store.band_heads(layer, index)
        if band.kept == 0:
            output[:, heads] = 0
            continue
        history = store.band_view(layer, band)[request.slots].to(queries.dtype)
        # [segments, heads, 2, kept, d] -> [2, heads, segments * kept, d]
        history = history.permute(2, 1, 0, 3, 4).flatten(2, 3)
        band_queries = queries.index_select(1, heads).permute(1, 2, 0, 3)
        band_keys, band_values = own_keys.index_select(0, heads), own_values.index_select(0, heads)
        for start in range(0, total, segment):
            stop = min(start + segment, total)
            seen = (first + start // segment) * band.kept
            begin = max(start, open_length)
            chunk = slice(begin - open_length, stop - open_length)
            own = slice(start, stop if band.attends_open else start)
            mask = torch.ones((stop - start, seen + own.stop - start), dtype=torch.bool, device=queries.device)
            mask = mask.tril(diagonal=seen)[begin - start :]
            entries = (
                torch.cat([history[0, :, :seen], band_keys[:, own]], dim=1),
                torch.cat([history[1, :, :seen], band_values[:, own]], dim=1),
            )
            if band.partial:
                assert lse is not None, "layers with partial heads need their log-sum-exps"
                attended, logs = _attend_part(band_queries[:, :, chunk], *entries, mask, store.scales[layer])
                lse[chunk, heads] = logs.permute(2, 0, 1)
            else:
                attended = _attend(band_queries[:, :, chunk], *entries, mask, store.scales[layer])
            output[chunk, heads] = attended.permute(2, 0, 1, 3)
    return output


def decode(
    store: SlabStore,
    layer: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: DecodeBatch,
    sides: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append one token per request to the tails, then attend.

    Args:
        queries: [batch, heads, q_per_kv, head_dim].
        keys, values: [batch, heads, head_dim], keys after RoPE.
        sides: [batch, heads, elements], what the store's scorer needs of each token, if anything.
        lse: float32 [batch, heads, q_per_kv], as in `extend`.

    Returns:
        [batch, heads, q_per_kv, head_dim]. Changes the tails; slabs are only read.
    """
    store.append(layer, batch.rows, batch.places, keys, values)
    if sides is not None:
        store.append_side(layer, batch.rows, batch.places, sides)
    tails = store.tails[:, layer, :, :, : batch.longest_tail].index_select(0, batch.rows).float()
    output = torch.empty_like(queries)
    for index, band in enumerate(store.layout.bands[layer]):
        heads = store.band_heads(layer, index)
        if band.kept == 0:
            output[:, heads] = 0
            continue
        band_tails = tails.index_select(2, heads)
        history = store.gather(layer, band, batch.slots.flatten()).float()
        band_queries = queries.index_select(1, heads).float() * store.scales[layer]
        mask = batch.mask(band.kept)
        if not band.attends_open:
            band_tails, mask = band_tails[:, :, :, :0], mask[..., : batch.slots.shape[1] * band.kept]
        attended, logs = _attend_band(band_queries, history, band_tails, mask, band.partial)
        output[:, heads] = attended.to(output.dtype)
        if logs is not None:
            assert lse is not None, "layers with partial heads need their log-sum-exps"
            lse[:, heads] = logs
    return output


def _attend_band(
    queries: torch.Tensor, history: torch.Tensor, tails: torch.Tensor, mask: torch.Tensor, partial: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode attention of one band in float32.

    The history is used in the order in which it was gathered: only the logits, head_dim times smaller, are
    brought into one row per query.

    Args:
        queries: [batch, heads, q_per_kv, d], scaled.
        history: [batch * segments, heads, 2 (K, V), kept, d].
        tails: [batch, 2 (K, V), heads, tokens, d].
        mask: bool [batch, 1, 1, segments * kept + tokens].

        partial: whether queries may see nothing, and log-sum-exps are wanted.

    Returns:
        Like `queries`, and the log-sum-exps of the logits [batch, heads, q_per_kv], if they are wanted.
    """
    size, heads, per_head, dim = queries.shape
    kept, segments = history.shape[3], history.shape[0] // size
    seen = segments * kept
    keys, values = (history[:, :, part].flatten(0, 1) for part in (0, 1))
    repeated = queries[:, None].expand(size, segments, heads, per_head, dim).reshape(-1, per_head, dim)
    past = torch.bmm(repeated, keys.transpose(1, 2)).view(size, segments, heads, per_head, kept)
    past = past.permute(0, 2, 3, 1, 4).reshape(size, heads, per_head, seen)
    logits = torch.cat([past, queries @ tails[:, 0].transpose(2, 3)], dim=-1)
    logits.masked_fill_(~mask, -torch.inf)
    lse = logits.logsumexp(dim=-1) if partial else None
    weights = logits.softmax(dim=-1) if lse is None else _softmax(logits, lse)
    output = weights[..., seen:] @ tails[:, 1]
    if segments:
        past = weights[..., :seen].unflatten(3, (segments, kept)).permute(0, 3, 1, 2, 4).reshape(-1, per_head, kept)
        output += torch.bmm(past, values).view(size, segments, heads, per_head, dim).sum(dim=1)
    return output, lse


def _softmax(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(logits - lse), 0 where a row holds only -inf. May overwrite the logits."""
    return logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()


def _attend_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` in float32, 0 where a query sees nothing, and the log-sum-exps [heads, q_per_kv, tokens]."""
    logits = queries.float() @ keys[:, None].float().transpose(2, 3) * scale
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(dim=-1)
    return (_softmax(logits, lse) @ values[:, None].float()).to(queries.dtype), lse


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of [heads, q_per_kv, tokens, d] queries to [heads, entries, d] keys under a [tokens, entries] mask."""
    expanded = (*queries.shape[:2], *keys.shape[1:])
    return scaled_dot_product_attention(
        queries, keys[:, None].expand(expanded), values[:, None].expand(expanded), attn_mask=mask, scale=scale
    )
