"""The multi-turn benchmark without servers: figures, rejected points, the file of results, and shapes of traffic."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.harness.errors import ServerLost, SettingsError
from benchmarks.harness.pools import Pool, server_arguments
from benchmarks.harness.results import Results
from benchmarks.multi_turn import __main__ as door
from benchmarks.multi_turn import gauges
from benchmarks.multi_turn import many_clients as multi_turn
from benchmarks.multi_turn.client import Answer, gaps_ms
from benchmarks.multi_turn.driver import Run
from benchmarks.multi_turn.gauges import PoolSize, Sample, pool_size, read, resident_bytes
from benchmarks.multi_turn.measures import Spread, figures, in_flight, itl_by_part, peak_bytes, rounds
from benchmarks.multi_turn.point import Key, Point, points
from benchmarks.multi_turn.schedule import Schedule
from benchmarks.multi_turn.shapes import SHAPES, Load, Request, longest, working_set, workload
from benchmarks.multi_turn.summary import MedianRange, cells
from benchmarks.multi_turn.verdict import Targets, reason_to_reject
from benchmarks.multi_turn.writers import RecallWriter
from benchmarks.recall import task
from benchmarks.recall.tokenizer import build_tokenizer

WRITER = RecallWriter()

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


def test_requests_in_flight_leave_the_drain_out():
    first, second = answer(0, sent_s=0.0, latency_s=10.0), answer(1, sent_s=4.0, latency_s=1.0)
    assert in_flight([first, second]) == pytest.approx(1.0)
    assert in_flight([answer(0, sent_s=0.0, latency_s=2.0), second]) == pytest.approx(0.5)
    assert math.isnan(in_flight([first]))


def test_samples_count_from_the_last_before_to_the_first_after():
    samples = [Sample(0.0, 0, 0), Sample(1.0, 0, 5), Sample(2.0, 0, 6)]
    assert figures([answer(0, sent_s=1.2, latency_s=0.3)], samples).retractions == 1
    assert figures([answer(0, sent_s=0.2, latency_s=9.0)], samples).retractions == 6
    assert figures([answer(0)], []).retractions == 0


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


def test_gauges_are_read_and_a_counter_that_never_counted_is_nought():
    values = read(METRICS)
    assert pool_size(values) == PoolSize(1000, 2**29)
    assert resident_bytes(values) == 2**29 * 3 // 4
    assert values["sglang:num_retracted_requests_total"] == 0
    assert read(METRICS + RETRACTED)["sglang:num_retracted_requests_total"] == 7


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


def options(*arguments: str):
    return door.parser().parse_args(["--clients", "4", "--request-rate", "inf", *arguments])


def benchmark(tmp_path, *arguments: str) -> multi_turn.Benchmark:
    chosen = options("--request-length", "40", "--rounds", "2", *arguments)
    pools, _ = multi_turn.pools_of(chosen)
    results = Results.open(tmp_path / "new.json", "multi_turn", {})
    return multi_turn.Benchmark(chosen, Schedule.of(chosen, pools, WRITER), results)


def test_finished_points_are_kept_and_not_measured_again_and_pools_take_turns(tmp_path):
    arguments = ("--pools", "token,ragged@0.5", "--repeats", "2")
    found = benchmark(tmp_path, *arguments)
    assert [str(key) for _, key in found.remaining()] == [
        *("token, 4 clients, run 1", "ragged@0.5, 4 clients, run 1"),
        *("token, 4 clients, run 2", "ragged@0.5, 4 clients, run 2"),
    ]
    for one in (point("token"), point("ragged@0.5", rejected="too few")):
        found.results.add(str(one.key), one)
    again = benchmark(tmp_path, *arguments)
    assert points(again.results) == [point("token"), point("ragged@0.5", rejected="too few")]
    assert [(key.pool, key.repeat) for _, key in again.remaining()] == [("token", 1), ("ragged@0.5", 1)]


def test_pools_of_different_bytes_are_not_compared(tmp_path):
    found = benchmark(tmp_path, "--pools", "token,ragged@0.5")
    found.results.add("token", point("token"))
    # The ragged pool is a whole number of slabs, and a point that failed early never knew its bytes.
    for near in (int(24 * 2**20 * 0.95), 0):
        found.check_bytes(replace(point("ragged@0.5"), kv_bytes=near))
    with pytest.raises(SettingsError, match="same bytes"):
        found.check_bytes(replace(point("ragged@0.5"), kv_bytes=12 * 2**20))


def test_options_that_change_figures_change_the_settings_and_others_do_not():
    base = options()
    pools, _ = multi_turn.pools_of(base)
    settings = multi_turn.settings_of(base, pools)
    assert settings == multi_turn.settings_of(options("--json", "--output", "elsewhere"), pools)
    for changed in (["--seed", "2"], ["--kv-bytes", "1GiB"], ["--request-rate", "2"], ["--shape", "fork"]):
        assert settings != multi_turn.settings_of(options(*changed), pools)
    json.dumps(settings, allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--request-rate", "0"], "greater than 0"),
        (["--min-load", "1.5"], "shares from 0 to 1"),
        (["--pools", "token,half"], "is no pool"),
        (["--url", "token"], "POOL=http"),
        (["--kv-bytes", "lots"], "cannot read 'lots'"),
        (["--rounds", "60"], "the model's context is 8192"),
        (["--shape", "fork", "--rounds", "2"], "power of two"),
    ],
)
def test_bad_options_end_with_one_line_and_status_1(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(
        "sys.argv", ["multi_turn", "--clients", "4", *arguments, "--output", str(tmp_path / "new.json")]
    )
    with pytest.raises(SystemExit) as ended:
        door.main()
    said = ended.value.code
    assert said.startswith("multi_turn: ")
    assert message in said
    assert "\n" not in said
    assert not (tmp_path / "new.json").exists()


def test_names_of_pools_say_which_flags_servers_get():
    assert Pool.parse("token").name == "token"
    for name, slabs in (("ragged@0.3", "wide"), ("ragged@0.3+slab-dtype=k8v4", "k8v4")):
        flags = server_arguments(Pool.parse(name), 4, "8MiB", on_cpu=True)
        values = {flag: value for flag, value in pairwise(flags) if flag.startswith("--")}
        assert (values["--ragged-ratio"], values["--ragged-slab-dtype"]) == ("0.3", slabs)
    assert not [one for one in server_arguments(Pool(None), 4, "8MiB", on_cpu=True) if one.startswith("--ragged")]
    pool = Pool.parse("ragged@0.3+draft=4+scorer=h2o")
    assert pool.name == "ragged@0.3+draft=4+scorer=h2o"
    assert " ".join(pool.flags) == (
        "--ragged-scorer h2o --speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 "
        "--speculative-num-draft-tokens 4"
    )


def load(shape: str, **changes: int) -> Load:
    numbers = {"clients": 8, "rounds": 5, "request_length": 60, "output_length": 12, "shared_length": 300}
    return Load(shape, **(numbers | {"group": 4, "seed": 7} | changes))


def messages(request: Request, requests: tuple[Request, ...], answer: str) -> list[dict[str, str]]:
    """All messages of a prompt, every earlier answer being `answer`."""
    own = [{"role": role, "content": content} for role, content in request.messages]
    if request.context is None:
        return own
    return [*messages(requests[request.context], requests, answer), {"role": "assistant", "content": answer}, *own]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_workload_is_the_same_from_the_same_seed_only(shape):
    assert workload(load(shape), WRITER) == workload(load(shape), WRITER)
    assert workload(load(shape), WRITER) != workload(load(shape, seed=8), WRITER)


@pytest.mark.parametrize("shape", SHAPES)
def test_more_clients_leave_the_first_ones_as_they_are(shape):
    few, many = workload(load(shape, clients=4), WRITER), workload(load(shape, clients=8), WRITER)
    contents = {request.messages for request in many}
    assert all(request.messages in contents for request in few)


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_are_no_longer_than_the_estimate_and_nearly_as_long(shape):
    requests = workload(load(shape), WRITER)
    tokenizer = build_tokenizer(8192)
    answer = " ".join(["w1"] * 12)
    for request in requests:
        rendered = tokenizer.apply_chat_template(
            messages(request, requests, answer), tokenize=False, add_generation_prompt=True
        )
        length = len(tokenizer.encode(rendered))
        slack = 9 * 2 * (request.round + 2)
        assert request.length - slack <= length <= request.length
    assert longest(requests, 12) == max(request.length for request in requests) + 12


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_wait_for_earlier_ones_of_the_round_before(shape):
    for request in (requests := workload(load(shape), WRITER)):
        assert requests[request.number] is request
        if request.round == 0:
            assert request.after is None
            assert request.context is None
        else:
            assert requests[request.after].round == request.round - 1
            assert request.after < request.number
            assert request.context in (None, request.after)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_asked_for_was_stated_in_the_same_prompt_once(shape):
    requests = workload(load(shape), WRITER)
    for request in requests:
        assert request.answer is not None
        texts = [one["content"].split() for one in messages(request, requests, "w1")]
        key = texts[-1][-1]
        assert texts[-1][-2] == task.QUESTION
        pairs = [(a, b) for text in texts for a, b in pairwise(text)]
        assert [b for a, b in pairs if a == key and b in task.VALUES] == [request.answer]


def test_documents_are_shared_by_their_group_and_stand_first():
    requests = workload(load("documents"), WRITER)
    starts = defaultdict(set)
    for request in requests:
        starts[request.shared].add(tuple(request.messages[0][1].split()[: request.shared_tokens]))
        assert request.context is None
    assert sorted(starts) == ["document 0", "document 1"]
    assert all(len(texts) == 1 for texts in starts.values())
    assert starts["document 0"] != starts["document 1"]
    assert Counter(request.shared for request in requests) == {"document 0": 20, "document 1": 20}


def test_agents_share_the_system_prompt_and_nothing_else():
    requests = workload(load("agents"), WRITER)
    first = [request for request in requests if request.round == 0]
    assert len({request.messages[0] for request in first}) == 1
    assert first[0].messages[0][0] == "system"
    assert len({request.messages[1] for request in first}) == 8
    assert all(len(request.messages) == 1 for request in requests if request.round)


def test_a_forked_conversation_branches_in_two_until_each_client_has_its_own():
    requests = workload(load("fork", clients=8, rounds=6, group=4), WRITER)
    widths = Counter(request.round for request in requests)
    assert [widths[number] for number in range(6)] == [2, 2, 4, 4, 8, 8]
    children = Counter(request.context for request in requests if request.context is not None)
    assert Counter(children.values()) == {1: 2 + 4 + 8, 2: 2 + 4}
    assert len({request.messages for request in requests}) == len(requests)


def test_the_working_set_counts_what_is_shared_once():
    chat = workload(load("chat", clients=1, rounds=3), WRITER)
    assert working_set(chat, 12) == chat[-1].length + 12
    documents = workload(load("documents", clients=4, rounds=1), WRITER)
    assert working_set(documents, 12) == sum(r.length + 12 for r in documents) - 3 * 300


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 12, 40, 500])
@pytest.mark.parametrize("ask", [True, False])
def test_a_message_has_its_length_to_the_token(tokens, ask):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        text = WRITER.message(rng, WRITER.begin(rng), tokens, facts=4, ask=ask)
        words = text.content.split()
        assert len(words) == tokens
        assert set(words) <= set(task.VOCABULARY)
