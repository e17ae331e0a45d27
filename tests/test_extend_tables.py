"""The tables of an extend batch, checked token by token against what they are for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.attention.extend_tables import extend_tables
from tests.examples import examples

SEGMENT, BLOCK_M = 32, 16
CHUNKS = st.lists(st.tuples(st.integers(0, 3 * SEGMENT), st.integers(0, 3 * SEGMENT)), min_size=1, max_size=4)


@examples(200)
@given(chunks=CHUNKS, q_per_kv=st.integers(1, 16))
def test_every_row_is_in_one_tile_and_every_token_stored_where_it_belongs(chunks, q_per_kv):
    prefixes, lengths = [p for p, _ in chunks], [n for _, n in chunks]
    tables = extend_tables(prefixes, lengths, SEGMENT, q_per_kv, BLOCK_M)

    rows_seen: list[tuple[int, int]] = []
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for request, first_token, tokens, first_row, sealed, open_length in tables.tiles.tolist():
        position = prefixes[request] + first_token - starts[request]
        assert position // SEGMENT == sealed == (position + tokens - 1) // SEGMENT
        # What is neither sealed nor in the tail must be in the chunk: the part starts where the tail ends.
        assert open_length == position % SEGMENT
        assert position == prefixes[request] if open_length else position >= prefixes[request]
        rows = range(first_row, min(first_row + BLOCK_M, tokens * q_per_kv))
        rows_seen += [(first_token + row // q_per_kv, row % q_per_kv) for row in rows]
    assert sorted(rows_seen) == [(token, q) for token in range(sum(lengths)) for q in range(q_per_kv)]
    assert tables.tiles[:, 4].tolist() == sorted(tables.tiles[:, 4].tolist(), reverse=True)

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
    assert tables.most_sealed == max(end // SEGMENT for end in ends)
