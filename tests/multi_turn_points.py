"""Made-up points of the multi-turn benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.multi_turn.client import Answer
from benchmarks.multi_turn.gauges import Sample
from benchmarks.multi_turn.point import Key, Point


def answer(number: int, **changes: Any) -> Answer:
    """Client `number` % 4 in round `number` // 4, sent at one second a round."""
    plain = Answer(
        number=number,
        client=number % 4,
        round=number // 4,
        sent_s=float(number // 4),
        ttft_s=0.1 * (1 + number % 4),
        latency_s=0.9,
        itl_ms=(10.0, 20.0),
        prompt=100 * (1 + number // 4),
        cached=90 * (number // 4),
        output=3,
        reusable=100 * (number // 4),
        right=number % 4 != 3,
    )
    return replace(plain, **changes)


def point(pool: str, repeat: int = 0, *, clients: int = 4, rejected: str | None = None, rounds: int = 3) -> Point:
    """A point with four requests a round; a rejected one has none."""
    answers = () if rejected else tuple(answer(number) for number in range(4 * rounds))
    samples = () if rejected else tuple(Sample(0.5 * i, i * 2**20, i // 3) for i in range(2 * rounds + 1))
    return Point(
        key=Key(pool, clients, repeat),
        rejected=rejected,
        date="2026-01-02T03:04:05+00:00",
        virtual_tokens=3072,
        kv_bytes=24 * 2**20,
        start_up="" if pool == "token" else "ragged KV pool (ratio 0.5): <made up> & short",
        rate_share=1.0,
        duration_s=float(rounds),
        answers=answers,
        samples=samples,
    )
