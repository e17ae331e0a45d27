"""Figures of a point, from its answers and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.multi_turn.client import Answer
from benchmarks.multi_turn.gauges import Sample
from benchmarks.multi_turn.point import Point


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles; NaN where there are no values."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles interpolate linearly between the two nearest values."""
        if not values:
            return cls(*[float("nan")] * 4)
        return cls(float(np.mean(values)), *(float(p) for p in np.percentile(values, (50, 95, 99))))


@dataclass(frozen=True)
class Figures:
    """Figures of a round, or of a whole point.

    Attributes:
        ttft_ms, itl_ms, latency_ms: time to first token, between tokens, to the last token; milliseconds.
        requests_per_s, output_tokens_per_s, tokens_per_s: over the time from the first request sent to the last
            answer; `tokens_per_s` counts prompts, too.
        cached_share: cached / prompt tokens.
        hit_rate: cached / reusable tokens; NaN where nothing could be reused.
        retractions: requests that the server retracted between the first request sent and the last answer. Rounds
            overlap in time, so the rounds' numbers may add up to more than the point's.
        recall: share of right answers, NaN where no answer is known.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Spread
    itl_ms: Spread
    latency_ms: Spread
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    cached_share: float
    hit_rate: float
    retractions: int
    recall: float


def figures(answers: Sequence[Answer], samples: Sequence[Sample]) -> Figures:
    """Figures of these answers, at least one."""
    began_s = min(answer.sent_s for answer in answers)
    ended_s = max(answer.sent_s + answer.latency_s for answer in answers)
    duration_s = ended_s - began_s
    prompt, output = sum(a.prompt for a in answers), sum(a.output for a in answers)
    cached, reusable = sum(a.cached for a in answers), sum(a.reusable for a in answers)
    checked = [answer.right for answer in answers if answer.right is not None]
    return Figures(
        requests=len(answers),
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_ms=Spread.of([1000 * answer.ttft_s for answer in answers]),
        itl_ms=Spread.of([gap for answer in answers for gap in answer.itl_ms]),
        latency_ms=Spread.of([1000 * answer.latency_s for answer in answers]),
        duration_s=duration_s,
        requests_per_s=len(answers) / duration_s,
        output_tokens_per_s=output / duration_s,
        tokens_per_s=(prompt + output) / duration_s,
        cached_share=cached / prompt,
        hit_rate=cached / reusable if reusable else float("nan"),
        retractions=_retracted(samples, began_s, ended_s),
        recall=sum(checked) / len(checked) if checked else float("nan"),
    )


def rounds(point: Point) -> dict[int, Figures]:
    """Figures of each round that has answers."""
    by_round: dict[int, list[Answer]] = {}
    for answer in point.answers:
        by_round.setdefault(answer.round, []).append(answer)
    return {number: figures(by_round[number], point.samples) for number in sorted(by_round)}


PARTS = 8
"""Equal parts of an answer that have figures of their own (`itl_by_part`)."""


def itl_by_part(answers: Sequence[Answer]) -> list[float]:
    """Median milliseconds between tokens in each eighth of the answers, over all of them; NaN where there is none."""
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for answer in answers:
        for part, gaps in zip(parts, np.array_split(answer.itl_ms, PARTS), strict=True):
            part += gaps.tolist()
    return [float(np.median(part)) if part else float("nan") for part in parts]


def in_flight(answers: Sequence[Answer]) -> float:
    """Requests in flight, mean over the time from the first to the last request sent; NaN if that is no time.

    The time after the last one is left out: what is in flight then only drains.
    """
    began_s, last_s = min(answer.sent_s for answer in answers), max(answer.sent_s for answer in answers)
    if last_s <= began_s:
        return float("nan")
    busy_s = sum(min(answer.sent_s + answer.latency_s, last_s) - answer.sent_s for answer in answers)
    return busy_s / (last_s - began_s)


def peak_bytes(point: Point) -> int:
    """Most resident KV bytes of all samples."""
    return max((sample.kv_bytes for sample in point.samples), default=0)


def _retracted(samples: Sequence[Sample], began_s: float, ended_s: float) -> int:
    """Retractions between the last sample before the one time and the first after the other."""
    before = [sample.retracted for sample in samples if sample.at_s <= began_s]
    after = [sample.retracted for sample in samples if sample.at_s >= ended_s]
    start = before[-1] if before else 0
    return (after[0] if after else samples[-1].retracted if samples else start) - start
