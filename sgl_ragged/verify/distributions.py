"""Next-token distributions at positions of a text, as far as a server returns them, and distances between two.

A server returns the likeliest tokens only. Distances are taken over the tokens that both sides returned, with the rest
of each distribution as one more outcome. By the data-processing inequality this KL is never more than the full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged.profiles.reference import ReferenceText

SMALLEST = 1e-12
"""Least probability of an outcome, so that logarithms are finite."""


LEAST_SAME = 0.8
"""Least share of equal tokens in one text. SGLang names the last token of a vocabulary 0 in prompts."""


@dataclass(frozen=True)
class Distributions:
    """Predictions of a model for consecutive tokens of a text.

    first: position of the first predicted token. tokens: int64 [positions], the text's own tokens. logprobs: float64
    [positions], their log-probabilities. likeliest: for each position, log-probabilities of the likeliest tokens by
    token, likeliest first.
    """

    first: int
    tokens: np.ndarray
    logprobs: np.ndarray
    likeliest: tuple[dict[int, float], ...]

    @classmethod
    def from_meta(cls, first: int, own: Sequence[Sequence[Any]], top: Sequence[Any]) -> Distributions:
        """Read `input_token_logprobs` and `input_top_logprobs`, or those of the output, from an answer of SGLang."""
        likeliest = tuple({int(token): float(logprob) for logprob, token, *_ in entries} for entries in top)
        tokens = np.array([int(token) for _, token, *_ in own], dtype=np.int64)
        return cls(first, tokens, np.array([float(logprob) for logprob, *_ in own]), likeliest)

    @classmethod
    def from_reference(cls, text: ReferenceText) -> Distributions:
        """Read what calibration recorded for a text."""
        pairs = zip(text.likeliest.tolist(), text.likeliest_logprobs.tolist(), strict=True)
        likeliest = tuple(dict(zip(*entries, strict=True)) for entries in pairs)
        tokens = text.tokens[text.first :].astype(np.int64)
        return cls(text.first, tokens, text.logprobs.astype(np.float64), likeliest)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def top1(self) -> np.ndarray:
        """int64 [positions]: the likeliest token."""
        return np.array([next(iter(entries)) for entries in self.likeliest], dtype=np.int64)

    def since(self, position: int) -> Distributions:
        """Return those for tokens from a position of the text on."""
        cut = max(0, position - self.first)
        return Distributions(self.first + cut, self.tokens[cut:], self.logprobs[cut:], self.likeliest[cut:])


@dataclass(frozen=True)
class Distance:
    """How far distributions are from a reference, over all compared positions.

    kl: mean KL(reference || other), nats. nll: mean increase of the negative log-likelihood of the text's tokens, nats.
    same_top1: share of positions with the same likeliest token. positions: their number.
    """

    kl: float
    nll: float
    same_top1: float
    positions: int


def mean_distance(found: Sequence[Distance]) -> Distance:
    """Return the mean of several distances, each position counted once."""
    table = [(one.kl, one.nll, one.same_top1) for one in found]
    weights = [one.positions for one in found]
    kl, nll, same = np.average(table, axis=0, weights=weights).tolist()
    return Distance(kl, nll, same, sum(weights))


def distance(reference: Distributions, other: Distributions) -> Distance:
    """Compare the positions that both have. Raises ValueError if they are of different texts, or share none."""
    first = max(reference.first, other.first)
    reference, other = reference.since(first), other.since(first)
    count = min(len(reference), len(other))
    same = reference.tokens[:count] == other.tokens[:count]
    if count == 0 or same.mean() < LEAST_SAME:
        raise ValueError("the servers returned log-probabilities of different tokens")
    pairs = zip(*(_outcomes(one, count) for one in (reference, other)), strict=True)
    kls = [_kl(mine, theirs) for (mine, theirs), equal in zip(pairs, same, strict=True) if equal]
    return Distance(
        kl=float(np.mean(kls)),
        nll=float(np.mean((reference.logprobs[:count] - other.logprobs[:count])[same])),
        same_top1=float(np.mean((reference.top1[:count] == other.top1[:count])[same])),
        positions=int(same.sum()),
    )


def _outcomes(found: Distributions, count: int) -> list[dict[int, float]]:
    """Return known log-probabilities by token: of the likeliest tokens and of the text's own."""
    own = zip(found.tokens[:count].tolist(), found.logprobs[:count].tolist(), strict=True)
    return [entries | {token: logprob} for entries, (token, logprob) in zip(found.likeliest[:count], own, strict=True)]


def _kl(reference: dict[int, float], other: dict[int, float]) -> float:
    """Return the KL divergence over tokens that both know and one outcome for the rest."""
    both = [token for token in reference if token in other]
    known = np.exp([[side[token] for token in both] for side in (reference, other)])
    rest = np.maximum(1 - known.sum(axis=1, keepdims=True), SMALLEST)
    mine, theirs = np.maximum(np.concatenate([known, rest], axis=1), SMALLEST)
    return float((mine * np.log(mine / theirs)).sum())
