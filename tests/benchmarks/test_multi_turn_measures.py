"""Figures of the multi-turn benchmark, and which points it rejects."""

from __future__ import annotations

import asyncio
import math

import httpx
import pytest

from benchmarks.harness.errors import ServerLost, SettingsError
from benchmarks.harness.pools import Pool
from benchmarks.multi_turn import gauges
from benchmarks.multi_turn.client import gaps_ms
from benchmarks.multi_turn.driver import Run
from benchmarks.multi_turn.gauges import PoolSize, Sample, pool_size, read, resident_bytes
from benchmarks.multi_turn.measures import Spread, figures, flat, in_flight, itl_by_part, peak_bytes, rounds
from benchmarks.multi_turn.summary import MedianRange, cells
from benchmarks.multi_turn.verdict import Targets, reason_to_reject
from tests.multi_turn_points import answer, point

METRICS = """
# HELP sglang:max_total_num_tokens Maximum total number of tokens in the KV cache pool.
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 1000.0
# TYPE sglang:kv_cache_memory_usage_gb gauge
sglang:kv_cache_memory_usage_gb{model_name="m"} 0.5
# TYPE sglang:kv_available_tokens gauge
sglang:kv_available_tokens{model_name="m"} 250.0
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_bucket{le="0.1"} 4.0
"""
RETRACTED = '# TYPE sglang:num_retracted_requests counter\nsglang:num_retracted_requests_total{tp_rank="0"} 7.0\n'


def test_percentiles_interpolate():
    spread = Spread.of([float(value) for value in range(101)])
    assert (spread.mean, spread.p50, spread.p95, spread.p99) == (50, 50, 95, 99)
    assert Spread.of([1.0, 2.0]).p95 == pytest.approx(1.95)
    assert math.isnan(Spread.of([]).p50)


def test_tokens_of_one_chunk_share_its_gap():
    assert gaps_ms([(1.0, 1), (1.03, 2), (1.09, 5)]) == (30.0, 20.0, 20.0, 20.0)
    assert gaps_ms([(1.0, 3)]) == ()


def test_times_along_an_answer():
    """Eight gaps are a part each; fewer leave parts without a figure."""
    answers = [answer(0, itl_ms=tuple(range(8))), answer(1, itl_ms=tuple(range(2, 10)))]
    assert itl_by_part(answers) == [1.0 + part for part in range(8)]
    assert math.isnan(itl_by_part([answer(0, itl_ms=(3.0,))])[-1])


def test_figures_of_a_point():
    one = point("token")
    total = figures(one.answers, one.samples)
    assert total.requests == 12
    assert total.duration_s == pytest.approx(2.9)
    assert total.output_tokens_per_s == pytest.approx(36 / 2.9)
    assert total.tokens_per_s == pytest.approx((36 + 4 * 600) / 2.9)
    assert total.ttft_ms.mean == pytest.approx(250)
    assert total.itl_ms.p50 == pytest.approx(15)
    assert total.cached_share == pytest.approx(4 * 270 / (4 * 600))
    assert total.hit_rate == pytest.approx(0.9)
    assert total.recall == pytest.approx(0.75)
    assert total.retractions == 2
    assert peak_bytes(one) == 6 * 2**20


def test_figures_of_rounds():
    by_round = rounds(point("token"))
    assert list(by_round) == [0, 1, 2]
    assert math.isnan(by_round[0].hit_rate)
    assert by_round[2].cached_share == pytest.approx(0.6)
    # Samples say 0 until 1 s, 1 from 1.5 s and 2 from 3 s.
    assert [of_round.retractions for of_round in by_round.values()] == [0, 1, 1]


def test_recall_is_absent_where_no_answer_is_known():
    assert math.isnan(figures([answer(0, right=None)], []).recall)


def test_flat_names_are_those_of_the_csv():
    values = flat(figures(point("token").answers, ()))
    assert values["ttft_p50_ms"] == pytest.approx(250)
    assert {"itl_p99_ms", "latency_mean_ms", "cached_share", "retractions"} <= set(values)


def test_requests_in_flight_leave_the_drain_out():
    first, second = answer(0, sent_s=0.0, latency_s=10.0), answer(1, sent_s=4.0, latency_s=1.0)
    assert in_flight([first, second]) == pytest.approx(1.0)
    assert in_flight([answer(0, sent_s=0.0, latency_s=2.0), second]) == pytest.approx(0.5)
    assert math.isnan(in_flight([first]))


def run(**changes) -> Run:
    answers = tuple(answer(number) for number in range(12))
    plain = {"answers": answers, "samples": (), "pool": PoolSize(1, 1), "rate_share": 1.0, "duration_s": 3.0}
    return Run(**(plain | changes))


def targets(**changes) -> Targets:
    plain = {"requests": 12, "parallel": 4.0, "request_rate": math.inf, "min_load": 0.8, "min_hit_rate": 0.0}
    return Targets(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"requests": 13}, "12 answers instead of 13"),
        ({"parallel": 4.4}, None),
        ({"parallel": 8.0}, "3.6 requests in flight on average instead of 8.0"),
        ({"parallel": 8.0, "min_load": 0.0}, None),
        # All are sent at once: what is in flight only drains.
        ({"parallel": 12.0}, None),
        ({"min_hit_rate": 0.85}, None),
        ({"min_hit_rate": 0.95}, "hit rate 0.90"),
        # At a rate, requests in flight are what they are.
        ({"parallel": 8.0, "request_rate": 2.0}, None),
    ],
)
def test_traffic_that_misses_its_target_is_rejected(changes, reason):
    found = reason_to_reject(run(), targets(**changes))
    assert found is None if reason is None else found.startswith(reason)


def test_a_request_rate_that_was_not_reached_is_rejected():
    assert reason_to_reject(run(rate_share=0.79), targets(request_rate=2.0)).startswith("request rate 1.58 per second")
    assert reason_to_reject(run(rate_share=0.81), targets(request_rate=2.0)) is None


def test_a_hit_rate_is_asked_of_traffic_that_can_have_one():
    answers = tuple(answer(number) for number in range(4))
    assert reason_to_reject(run(answers=answers), targets(requests=4, min_hit_rate=0.5, min_load=0)) is not None


def test_gauges_are_read_and_a_counter_that_never_counted_is_nought():
    values = read(METRICS)
    assert pool_size(values) == PoolSize(1000, 2**29)
    assert resident_bytes(values) == 2**29 * 3 // 4
    assert values["sglang:num_retracted_requests_total"] == 0
    assert read(METRICS + RETRACTED)["sglang:num_retracted_requests_total"] == 7


def test_a_server_without_the_gauges_is_refused():
    with pytest.raises(SettingsError, match="--enable-metrics"):
        read("")


def test_runs_are_put_together_by_their_median_and_rejected_ones_left_out():
    points = [point("token", 0), point("ragged@0.5", 0), point("token", 1, rejected="no"), point("token", 0, clients=2)]
    made = cells(points)
    assert [(cell.clients, cell.pool, len(cell.points)) for cell in made] == [
        (2, "token", 1),
        (4, "token", 1),
        (4, "ragged@0.5", 1),
    ]
    assert made[1].rejected == ("run 2: no",)
    assert made[1].total(lambda f: f.requests) == MedianRange(12, 12, 12)
    assert MedianRange.of([3.0, float("nan"), 1.0]) == MedianRange(2, 1, 3)


@pytest.mark.parametrize("text", ["", "tokens", "ragged", "ragged@", "ragged@0", "ragged@1.5", "ragged@x", "token@0.5"])
def test_what_is_no_pool_is_refused(text):
    assert Pool.parse("ragged@0.3+scorer=gate+profile=a/b.safetensors").flags == [
        *("--ragged-scorer", "gate", "--ragged-profile", "a/b.safetensors")
    ]
    assert Pool.parse("ragged@0.5+profile=a/b.safetensors+history=1024").name == "ragged@0.5+profile=b+history=1024"
    with pytest.raises(SettingsError, match="is no pool"):
        Pool.parse("ragged@0.5+history")
    with pytest.raises(SettingsError, match="is no pool"):
        Pool.parse(text)


def test_pools_are_named_as_they_are_written():
    assert [Pool.parse(name).name for name in ("token", "ragged@0.3", "ragged@1")] == [
        "token",
        "ragged@0.3",
        "ragged@1",
    ]


def test_samples_count_from_the_last_before_to_the_first_after():
    samples = [Sample(0.0, 0, 0), Sample(1.0, 0, 5), Sample(2.0, 0, 6)]
    assert figures([answer(0, sent_s=1.2, latency_s=0.3)], samples).retractions == 1
    assert figures([answer(0, sent_s=0.2, latency_s=9.0)], samples).retractions == 6
    assert figures([answer(0)], []).retractions == 0


@pytest.mark.parametrize(
    ("statuses", "error"), [([500, 200], None), ([404], SettingsError), ([500] * 10, ServerLost)], ids=str
)
def test_a_server_that_fails_to_collect_once_is_asked_again(statuses, error, monkeypatch):
    monkeypatch.setattr(gauges, "_RETRY_S", 0)
    left = list(statuses)
    poller = gauges.Poller(["http://server"], 0.0, 1.0)
    transport = httpx.MockTransport(lambda _: httpx.Response(left.pop(0), text=METRICS + RETRACTED))
    poller._clients = [httpx.AsyncClient(transport=transport, base_url="http://server")]
    if error:
        with pytest.raises(error):
            asyncio.run(poller.start())
    else:
        assert asyncio.run(poller.start()).tokens == 1000
    assert not left


def test_servers_behind_a_router_are_added_up():
    poller = gauges.Poller(["http://one", "http://two"], 0.0, 1.0)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=METRICS + RETRACTED))
    poller._clients = [httpx.AsyncClient(transport=transport, base_url=f"http://{name}") for name in ("one", "two")]
    one, both = gauges.pool_size(gauges.read(METRICS + RETRACTED)), asyncio.run(poller.start())
    assert (both.tokens, both.kv_bytes) == (2 * one.tokens, 2 * one.kv_bytes)
