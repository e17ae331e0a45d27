"""What the extend kernels need to know of a batch of chunks, worked out on the host from its lengths. Plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExtendTables:
    """Tables of one extend batch, all int32. Tokens are numbered through the batch, requests in batch order.

    tiles: [tiles, 6], `kernels.extend.TILE_COLUMNS`; tiles with the longest history first.
    open_copies, rest_copies: [copies, 3] of (token, request, place in its tail). Open copies go to a segment that the
        tail holds already, before anything is sealed; rest copies go to the segment that is open afterwards, once
        attention has read the tails.
    tail_seals: [segments, 2] of (request, segment), finished segments that started in the tail.
    chunk_seals: [segments, 3] of (request, segment, first token), finished segments that lie in the chunk.
    most_sealed: most finished segments of any request once the chunk is in.
    """

    tiles: np.ndarray
    open_copies: np.ndarray
    rest_copies: np.ndarray
    tail_seals: np.ndarray
    chunk_seals: np.ndarray
    most_sealed: int


def extend_tables(prefixes: list[int], lengths: list[int], segment: int, q_per_kv: int, block_m: int) -> ExtendTables:
    """Describe chunks of `lengths` tokens that follow `prefixes` tokens of their sequences.

    Args:
        segment: tokens per segment.
        block_m: rows, pairs of token and query head, per tile.
    """
    tiles: list[tuple[int, ...]] = []
    open_copies, rest_copies = [np.empty((0, 3), np.int32)], [np.empty((0, 3), np.int32)]
    tail_seals: list[tuple[int, int]] = []
    chunk_seals: list[tuple[int, int, int]] = []
    start = 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        stop, own = prefix + length, start - prefix
        first, open_length, finished = prefix // segment, prefix % segment, (prefix + length) // segment
        for number in range(first, -(-stop // segment)):
            begin, end = max(number * segment, prefix), min((number + 1) * segment, stop)
            in_tail = open_length if number == first else 0
            if begin == end:
                continue
            for row in range(0, (end - begin) * q_per_kv, block_m):
                tiles.append((request, own + begin, end - begin, row, number, in_tail))
            if number < finished:
                if in_tail:
                    tail_seals.append((request, number))
                else:
                    chunk_seals.append((request, number, own + begin))
            if in_tail:
                open_copies.append(_copies(request, own, begin, end, segment))
            elif number >= finished:
                rest_copies.append(_copies(request, own, begin, end, segment))
        start += length
    tiles.sort(key=lambda tile: -tile[4])
    return ExtendTables(
        tiles=np.array(tiles, np.int32).reshape(-1, 6),
        open_copies=np.concatenate(open_copies),
        rest_copies=np.concatenate(rest_copies),
        tail_seals=np.array(tail_seals, np.int32).reshape(-1, 2),
        chunk_seals=np.array(chunk_seals, np.int32).reshape(-1, 3),
        most_sealed=max(((p + n) // segment for p, n in zip(prefixes, lengths, strict=True)), default=0),
    )


def _copies(request: int, own: int, begin: int, end: int, segment: int) -> np.ndarray:
    """int32 [end - begin, 3]: where the tokens at these positions go, all in one segment."""
    positions = np.arange(begin, end, dtype=np.int32)
    return np.stack([positions + own, np.full_like(positions, request), positions % segment], axis=1)
