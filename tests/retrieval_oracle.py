"""What a model with retrieval computes, by dense masks: nothing of the server's bookkeeping is used."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_ragged.features.retrieval.settings import Retrieval
from tests.oracle import Oracle, Tokens, kept_tokens, softmax

ASKING_TOKENS, DELAY, CANDIDATES, SPREAD, DECAY = 32, 2, 4, 4, 0.5
Fetched = dict[tuple[int, int], list[int]]
"""Positions by layer and head."""


def spread(weights: np.ndarray) -> np.ndarray:
    found = weights.copy()
    for position in range(len(weights)):
        for distance in range(1, SPREAD + 1):
            if position >= distance:
                found[position] = max(found[position], weights[position - distance] * DECAY**distance)
    return found


def best(weights: np.ndarray, count: int) -> list[int]:
    return np.argsort(-weights, kind="stable")[:count].tolist()


class RetrievalOracle(Oracle):
    """An `Oracle` of one prompt and what was decoded behind it, in which satellites see what pivots attend to.

    What is seen in decode depends on what pivots attended to before. So it runs until nothing changes: each run is
    right for one interval more than the one before.
    """

    def __init__(
        self,
        *args: Any,
        pivots: tuple[tuple[int, int], ...],
        watched_by: np.ndarray,
        settings: Retrieval,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.pivots, self.watched_by, self.settings = pivots, watched_by, settings
        self.prompt = 0
        self.overlays: dict[int, Fetched] = {}
        """What satellites see beside the rest from each position on, until the next."""
        self._weights: dict[int, np.ndarray] = {}
        self._dropped: dict[tuple[int, int], set[int]] = {}
        self._window: Fetched = {}
        self.fetches = 0

    def logprobs_behind(self, prompt: list[int], answer: list[int]) -> np.ndarray:
        """As `logprobs`, of a prompt and what was decoded."""
        self.prompt, self.overlays = len(prompt), {}
        for _ in range(len(answer) + 2):
            self._weights, self._dropped, self._window = {}, {}, {}
            found = self.logprobs(prompt + answer)
            overlays = self._decide(len(prompt) + len(answer))
            if overlays == self.overlays:
                return found
            self.overlays = overlays
        raise AssertionError("what is seen does not settle")

    def _attention(self, module, query, key, value, *args, **more):
        number = self.layer_indices[module.layer_idx]
        per_head = query.shape[1] // key.shape[1]
        for pivot, (layer, head) in enumerate(self.pivots):
            if layer == number:
                q = query[0, head * per_head : (head + 1) * per_head].double().numpy()
                logits = q @ key[0, head].double().numpy().T * more["scaling"]
                logits = np.where(np.tri(logits.shape[1], dtype=bool), logits, -np.inf)
                self._weights[pivot] = softmax(logits).max(axis=0)
        return super()._attention(module, query, key, value, *args, **more)

    def _visible(self, tokens: Tokens, number: int, head: int) -> np.ndarray:
        mask = super()._visible(tokens, number, head)
        pivot = int(self.watched_by[number, head])
        if pivot < 0:
            return mask
        self._dropped[number, head] = self._drops(tokens, number, head)
        start, border = self._start(), self._start() // self.segment * self.segment
        if border and pivot in self._weights:
            asking = self._weights[pivot][start : self.prompt, :border].max(axis=0)
            fetched = self._fetch(asking, number, head, border)
            self._window[number, head] = fetched
            mask[start : self.prompt, fetched] = True
            # Segments may have ended within the last tokens: what is decoded sees the rest of them, too.
            after = self.prompt // self.segment * self.segment
            asking = self._weights[pivot][start : self.prompt, :after].max(axis=0)
            current = self._fetch(asking, number, head, after)
        else:
            current = []
        for position in range(self.prompt, len(tokens)):
            current = self.overlays.get(position, {}).get((number, head), current)
            mask[position, current] = True
        return mask

    def _start(self) -> int:
        """The first token that sees an overlay: a prompt's last ASKING_TOKENS tokens do."""
        return max(self.prompt - ASKING_TOKENS, 0)

    def _drops(self, tokens: Tokens, number: int, head: int) -> set[int]:
        found: set[int] = set()
        for start in range(0, len(tokens) - self.segment + 1, self.segment):
            part = tokens.part(start, start + self.segment)
            kept = kept_tokens(self.scorer, part, int(self.kept[number, head]), start == 0)
            found |= set(range(start, start + self.segment)) - {start + place for place in kept}
        return found

    def _fetch(self, asking: np.ndarray, number: int, head: int, border: int) -> list[int]:
        named = best(spread(asking[:border]), CANDIDATES * self.settings.overlay)
        return [one for one in named if one in self._dropped[number, head]][: self.settings.overlay]

    def _decide(self, length: int) -> dict[int, Fetched]:
        found: dict[int, Fetched] = {}
        interval, self.fetches = self.settings.interval, 0
        start, after = self._start(), self.prompt // self.segment * self.segment
        bases = {
            pivot: set(best(weights[start : self.prompt, :after].max(axis=0), self.settings.overlay))
            for pivot, weights in self._weights.items()
            if start >= self.segment
        }
        for position in range(self.prompt, length):
            if position % interval or position - interval < self.prompt:
                continue
            border = position // self.segment * self.segment
            for pivot, weights in self._weights.items():
                asking = weights[position - interval : position, :border]
                if not border:
                    continue
                tops = [set(best(row, self.settings.overlay)) for row in asking]
                overlaps = sorted(len(top & bases[pivot]) / len(top) for top in tops) if pivot in bases else [-1.0]
                # torch's median: of an even number, the lower one.
                if overlaps[(len(overlaps) - 1) // 2] >= self.settings.drift:
                    continue
                bases[pivot] = set(best(asking.max(axis=0), self.settings.overlay))
                self.fetches += 1
                for number, head in np.argwhere(self.watched_by == pivot).tolist():
                    fetched = self._fetch(asking.max(axis=0), number, head, border)
                    found.setdefault(position + DELAY, {})[number, head] = fetched
        return found
