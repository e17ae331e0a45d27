"""What each head attends to most in short windows of queries: recorded to see who foresees whom (`calib.roles`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ATTENDED_WINDOW = 8
"""Queries per window. Windows start at multiples of it, so they never cross the border of a segment."""

MOST_WINDOWS = 64
"""Windows recorded per sample, at most."""

TOP = 128
"""Tokens recorded per window and head."""

STARTS, ANSWERING, TOKENS, WEIGHTS = ATTENDED = (
    "attended.starts",
    "attended.answering",
    "attended.tokens",
    "attended.weights",
)
"""Names of the tensors in a recording.

int64 [windows]: position of the first query of each window. bool [windows]: whether one of its queries predicts a token
of an answer. int32 [layers, heads, windows, TOP]: positions of the
tokens with the largest attention, in falling order, -1 where there are fewer. float16, the same shape: that attention.
"""


def choose_windows(length: int, segment: int, answers: Sequence[tuple[int, int]] = ()) -> list[int]:
    """First queries of the windows to record in a sequence of `length` tokens, ascending.

    All complete windows behind the first segment if they are at most MOST_WINDOWS; otherwise pairs of neighbours,
    spread evenly. Half of them end where answers are generated, which may be a small part of the sequence.

    Args:
        answers: spans (start, stop) of the tokens of answers.
    """
    first, stop = segment // ATTENDED_WINDOW, length // ATTENDED_WINDOW
    if stop - first <= MOST_WINDOWS:
        return [ATTENDED_WINDOW * number for number in range(first, stop)]
    answering = [number for number in sorted(answering_windows(answers)) if first < number < stop]
    most = MOST_WINDOWS // 4
    if len(answering) > most:
        answering = [answering[int(place)] for place in np.linspace(0, len(answering) - 1, most)]
    spread = np.linspace(first, stop - 2, MOST_WINDOWS // 2 - len(answering)).astype(int)
    pairs = {number + place for number in spread.tolist() for place in (0, 1)}
    return [
        ATTENDED_WINDOW * number
        for number in sorted(pairs | {number - place for number in answering for place in (0, 1)})
    ]


def answering_windows(answers: Sequence[tuple[int, int]]) -> set[int]:
    """Numbers of the windows with a query that predicts a token of an answer, of spans (start, stop) of tokens."""
    return {query // ATTENDED_WINDOW for start, stop in answers for query in range(start - 1, stop - 1)}


def most_attended(weights: torch.Tensor, windows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that the queries of each window attend to most, and the largest attention that one of them pays.

    Args:
        weights: float [heads, queries, past], attention to the tokens before the queries' segment, the largest of the
            group's query heads.
        windows: places of the windows' first queries among the queries, one or more.

    Returns:
        int32 and float16 [heads, windows, TOP], in falling order of attention; -1 and 0 behind the last token.
    """
    largest = torch.stack([weights[:, start : start + ATTENDED_WINDOW].amax(dim=1) for start in windows], dim=1)
    found = largest.topk(min(TOP, largest.shape[-1]), dim=-1)
    missing = (0, TOP - found.values.shape[-1])
    return (
        torch.nn.functional.pad(found.indices.int(), missing, value=-1),
        torch.nn.functional.pad(found.values.half(), missing),
    )
