"""What a model with bounded histories computes, by dense masks: nothing of the server's bookkeeping is used."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle import Oracle, Tokens


def views(scores: np.ndarray, limit: int, latest: int) -> list[list[int]]:
    """Which sealed segments each segment's queries see, from the scores of all of them."""
    seen: list[list[int]] = [[]]
    for number in range(len(scores)):
        now = [*seen[-1], number]
        if len(now) > limit:
            candidates = now[1 : len(now) - latest]
            now.remove(candidates[int(np.argmin(scores[candidates]))])
        seen.append(now)
    return seen


def segment_scores(
    score: str, keys: np.ndarray, values: np.ndarray, segment: int, mean: np.ndarray | None = None
) -> np.ndarray:
    """The scores of one head's segments, from its keys and values [T, d]."""
    found = []
    for start in range(0, len(keys) - segment + 1, segment):
        k, v = keys[start : start + segment], values[start : start + segment]
        if score == "value_key_norm":
            found.append(np.mean(np.linalg.norm(v, axis=1) / np.linalg.norm(k, axis=1)))
        elif score == "value_novelty":
            windows = np.stack([(v[i : i + 8] - mean).mean(0) for i in range(segment - 7)])
            middle = (v - mean).mean(0)
            cosines = windows @ middle / np.linalg.norm(windows, axis=1) / np.linalg.norm(middle)
            found.append(np.max(1 - cosines))
        else:
            found.append(float(start))
    return np.array(found)


class BoundedOracle(Oracle):
    """An `Oracle` whose queries see `limit` sealed segments at most.

    A segment's score depends on what its tokens see, and what later tokens see on the scores. So it runs until nothing
    changes: each run is right for `latest` segments more than the one before.
    """

    def __init__(
        self, *args: Any, limit: int, latest: int, score: str, means: np.ndarray | None = None, **more: Any
    ) -> None:
        """means: [layers, heads, head_dim], mean values, for `value_novelty`."""
        super().__init__(*args, **more)
        self.means = means
        self.limit, self.latest, self.score = limit, latest, score
        self.seen: list[list[int]] = []
        self._parts: list[np.ndarray] = []

    def _visible(self, tokens: Tokens, number: int, head: int) -> np.ndarray:
        means = None if self.means is None else self.means[number, head]
        self._parts.append(segment_scores(self.score, tokens.keys, tokens.values, self.segment, means))
        mask = super()._visible(tokens, number, head)
        of = np.arange(len(tokens)) // self.segment
        for segment, seen in enumerate(self.seen):
            hidden = ~np.isin(of, [*seen, segment])
            mask[np.ix_(of == segment, hidden)] = False
        return mask

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        whole = len(tokens) // self.segment
        self.seen = [list(range(number)) for number in range(whole + 1)]
        while True:
            self._parts = []
            found = super().logprobs(tokens)
            seen = views(np.mean(self._parts, axis=0), self.limit, self.latest)
            if seen == self.seen:
                return found
            self.seen = seen
