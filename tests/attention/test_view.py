"""Views of chunks and of decode steps, checked token by token against what they are for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.attention.view import DecodeView, decode_view, extend_view, filled
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.tails import Tails
from sgl_ragged.scorers import get_scorer
from tests.examples import examples

SEGMENT, BLOCK_M = 32, 16
CHUNKS = st.lists(st.tuples(st.integers(0, 3 * SEGMENT), st.integers(0, 3 * SEGMENT)), min_size=1, max_size=4)


@examples(200)
@given(chunks=CHUNKS, q_per_kv=st.integers(1, 16))
def test_every_row_is_in_one_tile_and_every_token_stored_where_it_belongs(chunks, q_per_kv):
    prefixes, lengths = [p for p, _ in chunks], [n for _, n in chunks]
    table = torch.arange(5 * 8 * SEGMENT, dtype=torch.int32).view(5, -1)
    tables = extend_view(table, torch.arange(1, len(chunks) + 1), prefixes, lengths, SEGMENT)
    tiles = tables.tiles(q_per_kv, BLOCK_M)

    rows_seen: list[tuple[int, int]] = []
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for request, first_token, tokens, first_row, sealed, open_length, listed in tiles.tolist():
        assert listed == request
        position = prefixes[request] + first_token - starts[request]
        assert position // SEGMENT == sealed == (position + tokens - 1) // SEGMENT
        # What is neither sealed nor in the tail must be in the chunk: the part starts where the tail ends.
        assert open_length == position % SEGMENT
        assert position == prefixes[request] if open_length else position >= prefixes[request]
        rows = range(first_row, min(first_row + BLOCK_M, tokens * q_per_kv))
        rows_seen += [(first_token + row // q_per_kv, row % q_per_kv) for row in rows]
    assert sorted(rows_seen) == [(token, q) for token in range(sum(lengths)) for q in range(q_per_kv)]
    assert tiles[:, 4].tolist() == sorted(tiles[:, 4].tolist(), reverse=True)

    token_at = {
        (request, prefixes[request] + i): starts[request] + i for request, n in enumerate(lengths) for i in range(n)
    }
    tail = {(r, p): "tail" for r, prefix in enumerate(prefixes) for p in range(prefix // SEGMENT * SEGMENT, prefix)}
    finished = {(r, s) for r, (p, n) in enumerate(chunks) for s in range(p // SEGMENT, (p + n) // SEGMENT)}

    # Open copies first: then the tail seals find whole segments in the tail.
    for token, request, place in tables.open_copies.tolist():
        position = prefixes[request] // SEGMENT * SEGMENT + place
        assert token_at[request, position] == token
        tail[request, position] = "tail"
    sealed = set()
    for request, segment in tables.tail_seals.tolist():
        assert all((request, segment * SEGMENT + i) in tail for i in range(SEGMENT))
        sealed.add((request, segment))
    for request, segment, first_token in tables.chunk_seals.tolist():
        tokens = [token_at[request, segment * SEGMENT + i] for i in range(SEGMENT)]
        assert tokens == list(range(first_token, first_token + SEGMENT))
        sealed.add((request, segment))
    assert sealed == finished
    assert len(finished) == len(tables.tail_seals) + len(tables.chunk_seals)

    # Afterwards each tail holds the open segment: what was there and was not sealed, and the rest copies.
    held = {(r, p) for r, p in tail if (r, p // SEGMENT) not in finished}
    for token, request, place in tables.rest_copies.tolist():
        position = (prefixes[request] + lengths[request]) // SEGMENT * SEGMENT + place
        assert token_at[request, position] == token
        held.add((request, position))
    ends = [p + n for p, n in chunks]
    assert held == {(r, p) for r, end in enumerate(ends) for p in range(end // SEGMENT * SEGMENT, end)}
    assert tables.pages.tolist() == [
        [(request + 1) * 8 + number for number in range(-(-max(ends) // SEGMENT))] for request in range(len(chunks))
    ]
    # Pages begin with their first token, whatever the chunk.
    for each in (1, 7, SEGMENT):
        begun = {(r, end // SEGMENT * SEGMENT + index * each) for (r, index) in tables.begun(each) for end in [ends[r]]}
        assert begun == {
            (r, at)
            for r, (p, n) in enumerate(chunks)
            for at in range(ends[r] // SEGMENT * SEGMENT, ends[r], each)
            if at >= p
        }


def made_tails(rows: int) -> Tails:
    """With 16 tokens a page; rows have extra pages and stages 100 * row + 1 and 2 now, 3 and 4 before."""
    layout = SlabLayout(np.full((1, 1), 16), 16, SEGMENT)
    tails = SlabStore(layout, get_scorer("keydiff"), 2, rows, torch.float32, "cpu").tails
    tails.table[:] = torch.tensor([[3, 4], [1, 2]], dtype=torch.int32) + 100 * torch.arange(rows)[:, None, None]
    return tails


@examples(100)
@given(lengths=st.lists(st.integers(0, 4 * SEGMENT), min_size=1, max_size=5))
def test_a_decode_step_sees_what_is_before_it(lengths):
    table = torch.arange(6 * 8 * SEGMENT, dtype=torch.int32).view(6, -1)
    rows, on_host = torch.arange(1, len(lengths) + 1), torch.tensor(lengths)
    tails = made_tails(6)
    view = decode_view(table, rows, on_host, tails, DecodeView.empty(5, 8, tails))
    for row, length, index in zip(rows.tolist(), lengths, range(len(lengths)), strict=True):
        position = max(length - 1, 0)
        assert int(view.req_pool_indices[index]) == row
        assert int(view.open_offsets[index]) == position % SEGMENT
        assert int(view.seen[index]) == position // SEGMENT
        assert int(view.open_lengths[index]) == min(length, position % SEGMENT + 1)
        seen = view.slots[index, : position // SEGMENT].tolist()
        assert seen == [row * 8 + number for number in range(position // SEGMENT)]
        assert view.pages[index].tolist() == [row * 8 + position // SEGMENT, 100 * row + 1]
    full = filled(table, rows, lengths, tails)
    wanted = [(row, n // SEGMENT - 1) for row, n in zip(rows.tolist(), lengths, strict=True) if n and n % SEGMENT == 0]
    found = []
    if full is not None:
        found = list(zip(full.req_pool_indices.tolist(), full.segment_indices.tolist(), strict=True))
        assert full.slots.tolist() == [row * 8 + number for row, number in wanted]
        assert full.pages.tolist() == [[100 * row + 2, 100 * row + 1] for row, _ in wanted]
    assert found == wanted
