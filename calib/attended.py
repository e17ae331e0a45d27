"""Tokens that each head attends to most in short windows of queries, recorded for roles of heads (`calib.roles`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ATTENDED_WINDOW = 8
"""Queries per window. Windows start at multiples of it, so they never cross the border of a segment."""

MAX_WINDOWS = 64
"""Maximum number of windows recorded per sample."""

TOP = 128
"""Tokens recorded per window and head."""

STARTS, ANSWERING, TOKENS, WEIGHTS = ATTENDED = (
    "attended.starts",
    "attended.answering",
    "attended.tokens",
    "attended.weights",
)
"""Names of the tensors in a recording.

STARTS: int64 [windows], position of the first query of each window.
ANSWERING: bool [windows], whether a query of the window predicts a token of an answer.
TOKENS: int32 [layers, heads, windows, TOP], positions of the tokens with the largest attention, in falling order; -1
    for unused entries.
WEIGHTS: float16 [layers, heads, windows, TOP], that attention.
"""


def choose_windows(length: int, segment: int, answers: Sequence[tuple[int, int]] = ()) -> list[int]:
    """Choose the windows to record in a sequence of `length` tokens.

    These are all complete windows after the first segment if they are at most MAX_WINDOWS, otherwise pairs of
    neighbours, spread evenly. Half of the pairs end where answers are generated, which may be a small part of the
    sequence.

    Args:
        answers: spans (start, stop) of the tokens of answers.

    Returns:
        Positions of the windows' first queries, ascending.
    """
    first, stop = segment // ATTENDED_WINDOW, length // ATTENDED_WINDOW
    if stop - first <= MAX_WINDOWS:
        return [ATTENDED_WINDOW * window for window in range(first, stop)]
    answering = [window for window in sorted(answering_windows(answers)) if first < window < stop]
    max_answering = MAX_WINDOWS // 4
    if len(answering) > max_answering:
        answering = [answering[int(index)] for index in np.linspace(0, len(answering) - 1, max_answering)]
    spread = np.linspace(first, stop - 2, MAX_WINDOWS // 2 - len(answering)).astype(int)
    pairs = {window + offset for window in spread.tolist() for offset in (0, 1)}
    pairs |= {window - offset for window in answering for offset in (0, 1)}
    return [ATTENDED_WINDOW * window for window in sorted(pairs)]


def answering_windows(answers: Sequence[tuple[int, int]]) -> set[int]:
    """Number the windows with a query that predicts a token of an answer.

    Args:
        answers: spans (start, stop) of tokens.
    """
    return {query // ATTENDED_WINDOW for start, stop in answers for query in range(start - 1, stop - 1)}


def most_attended(weights: torch.Tensor, windows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens that the queries of each window attend to most, by the largest attention of a single query.

    Args:
        weights: float [heads, queries, past], attention to the tokens before the queries' segment, the largest among
            the group's query heads.
        windows: index of each window's first query among the queries, at least one.

    Returns:
        Tokens int32 and their attention float16, both [heads, windows, TOP], in falling order of attention; unused
        entries are -1 and 0.
    """
    largest = torch.stack([weights[:, start : start + ATTENDED_WINDOW].amax(dim=1) for start in windows], dim=1)
    top = largest.topk(min(TOP, largest.shape[-1]), dim=-1)
    missing = (0, TOP - top.values.shape[-1])
    return (
        torch.nn.functional.pad(top.indices.int(), missing, value=-1),
        torch.nn.functional.pad(top.values.half(), missing),
    )
