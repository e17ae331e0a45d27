"""Drafts on a real server: answers, what is cached and what is free are as without them. Its model answers at random:
drafts are wrong the first time, and right once the same has been answered before.

SGLang's own strict checks run after every batch: no page is lost, and none is in two places.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.storm.features import RETRACTING
from tests.models import make_profile
from tests.server.client import flush, found_of, ragged_metrics, server_settings
from tests.server.test_bounded_history import STRICT

pytestmark = pytest.mark.server

SEGMENT, NEW, WIDTH = 64, 140, 6
CHAINS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", str(WIDTH)),
)
FLAGS = (
    *("--dtype", "float32", "--max-running-requests", "8", "--chunked-prefill-size", "256"),
    *("--kv-pool", "ragged", "--ragged-ratio", "0.5", "--ragged-segment", str(SEGMENT)),
    *("--constrained-json-disable-any-whitespace",),
)
CLOSE = 1e-3
"""Two logits so close may change places."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 60, length).tolist()


PROMPTS = [prompt(seed, n) for seed, n in enumerate((1, 65, 2 * SEGMENT, 3 * SEGMENT - 1, 150, 301, 5 * SEGMENT - 3))]


@dataclass(frozen=True)
class Drafted:
    """gaps: between the best two logprobs of each token. per_step: tokens that a step has given."""

    tokens: list[int]
    logprobs: np.ndarray
    gaps: np.ndarray
    cached: int
    per_step: float


def ask(server: Any, tokens: list[int], new: int = NEW, **sampling: Any) -> Drafted:
    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    response = httpx.post(f"{server.url}/generate", json=body, timeout=300)
    response.raise_for_status()
    meta = response.json()["meta_info"]
    return Drafted(
        tokens=[entry[1] for entry in meta["output_token_logprobs"]],
        logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]]),
        gaps=np.array([first[0] - second[0] for first, second in meta["output_top_logprobs"]]),
        cached=meta["cached_tokens"],
        per_step=meta.get("spec_accept_length", 1.0),
    )


def ask_all(server: Any, prompts: list[list[int]], new: int = NEW) -> list[Drafted]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda one: ask(server, one, new), prompts))


def assert_same(found: Drafted, wanted: Drafted, atol: float = 1e-4) -> None:
    """Equal up to where the best two tokens are as good as equal."""
    differ = [i for i, (a, b) in enumerate(zip(found.tokens, wanted.tokens, strict=True)) if a != b]
    same = differ[0] if differ else len(wanted.tokens)
    assert not differ or wanted.gaps[same] < CLOSE
    np.testing.assert_allclose(found.logprobs[:same], wanted.logprobs[:same], atol=atol)


@pytest.fixture(scope="module")
def plain(character_model, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with servers.serve(character_model, *FLAGS, "--kv-bytes", "24MiB", log=log, env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(character_model, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("drafting") / "server.log"
    with servers.serve(character_model, *FLAGS, *CHAINS, "--kv-bytes", "24MiB", log=log, env=STRICT) as server:
        settings = server_settings(server)
        assert settings["draft_tokens"] == WIDTH
        assert "overlapped" not in settings["summary"]
        yield server


@pytest.fixture(scope="module")
def wanted(plain):
    return [ask(plain, one) for one in PROMPTS]


def test_answers_are_those_without_drafts(drafting, wanted):
    """Alone while drafts are wrong, alone while they are right, and all at once."""
    flush(drafting)
    wrong = [ask(drafting, one) for one in PROMPTS]
    right = [ask(drafting, one) for one in PROMPTS]
    for found in (wrong, right, ask_all(drafting, PROMPTS)):
        for have, want in zip(found, wanted, strict=True):
            assert_same(have, want)
    assert np.mean([one.per_step for one in wrong]) < 2
    assert np.mean([one.per_step for one in right]) > 3


@pytest.mark.thorough
def test_batches_need_not_overlap(character_model, servers, tmp_path, wanted):
    alone = (*CHAINS, "--disable-overlap-schedule", "--kv-bytes", "24MiB")
    with servers.serve(character_model, *FLAGS, *alone, log=tmp_path / "server.log", env=STRICT) as server:
        assert f"chains of {WIDTH} drafts, without overlapped batches" in server_settings(server)["summary"]
        for _ in range(2):
            for have, want in zip(ask_all(server, PROMPTS), wanted, strict=True):
                assert_same(have, want)
        flush(server)


def test_as_much_is_cached_and_a_hit_equals_a_miss(plain, drafting):
    """A turn that goes on behind an answer finds it to its last token, wherever chains ended."""
    for length in (SEGMENT - 5, 2 * SEGMENT + 17, 3 * SEGMENT - 1):
        first = prompt(length, length)
        flush(plain)
        flush(drafting)
        answer = ask(plain, first, 77)
        for _ in range(2):
            assert_same(ask(drafting, first, 77), answer)
        turn = first + answer.tokens + prompt(7, 20)
        want, hit = ask(plain, turn), ask(drafting, turn)
        assert hit.cached == want.cached == found_of(length + 76, SEGMENT)
        flush(drafting)
        miss = ask(drafting, turn)
        assert miss.cached == 0
        for found in (hit, miss):
            assert_same(found, want)


@pytest.mark.parametrize(
    "new", [1, 30, SEGMENT + 3, *(pytest.param(new, marks=pytest.mark.thorough) for new in (2, SEGMENT - 12))]
)
def test_answers_end_within_a_chain(plain, drafting, new):
    """At their length, or at a token: what was accepted behind it is not cached."""
    first = prompt(40, SEGMENT + 10)
    full = ask(plain, first, 100)
    ask(drafting, first, 100)
    for sampling in ({"new": new}, {"new": 100, "stop_token_ids": [full.tokens[new]], "ignore_eos": False}):
        answers = [ask(server, first, **sampling) for server in (plain, drafting)]
        assert len(answers[0].tokens) < 100
        assert_same(answers[1], answers[0])
        turn = first + answers[0].tokens + prompt(41, 30)
        assert_same(ask(drafting, turn), ask(plain, turn))


def test_streams_that_are_dropped_leave_nothing(drafting, wanted):
    body = {"input_ids": PROMPTS[4], "sampling_params": {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}}
    for chunks in (1, 3, 9):
        with httpx.stream("POST", f"{drafting.url}/generate", json=body | {"stream": True}, timeout=60) as stream:
            for _ in zip(range(chunks), stream.iter_lines(), strict=False):
                pass
    assert_same(ask(drafting, PROMPTS[4]), wanted[4])
    flush(drafting)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
    }
)


def test_grammars_are_followed(plain, drafting):
    body = {
        "input_ids": PROMPTS[1],
        "sampling_params": {"temperature": 0, "max_new_tokens": 120, "json_schema": SCHEMA},
    }
    texts = [httpx.post(f"{server.url}/generate", json=body, timeout=60).json() for server in (plain, *[drafting] * 3)]
    assert texts[-1]["meta_info"]["spec_accept_length"] > 2
    assert len({one["text"] for one in texts}) == 1
    assert isinstance(json.loads(texts[0]["text"])["on"], bool)


def test_what_is_sampled_from_one_token_is_greedy(drafting, wanted):
    """Of everything else `tests/features/test_chains.py` knows the distribution."""
    found = ask(drafting, PROMPTS[3], temperature=0.7, top_k=1)
    same = next((i for i, (a, b) in enumerate(zip(found.tokens, wanted[3].tokens, strict=True)) if a != b), NEW)
    assert same == NEW or wanted[3].gaps[same] < CLOSE
    assert len(ask(drafting, PROMPTS[3], temperature=1.0, top_p=0.8).tokens) == NEW


def test_who_is_retracted_answers_the_same(character_model, servers, tmp_path, wanted):
    """More requests than there is room for, twice: the first time drafts are wrong."""
    log = tmp_path / "server.log"
    small = ("--kv-bytes", "6MiB", "--schedule-conservativeness", "0.1")
    with servers.serve(character_model, *FLAGS, *CHAINS, *small, log=log, env=STRICT | RETRACTING) as server:
        for _ in range(2):
            for have, want in zip(ask_all(server, PROMPTS), wanted, strict=True):
                assert_same(have, want)
        flush(server)
        assert "Testing retraction" in server.log_text()


def test_on_two_ranks_with_heads_in_parts(character_model, servers, tmp_path):
    """Answers are those of one rank without drafts."""
    profile = tmp_path / "profile.safetensors"
    mu = np.array([[0.9, 0.7, 0.05, 0.1], [0.8, 0.3, 0.1, 0.05]])
    make_profile(character_model, profile, segment=SEGMENT, mu=mu)
    flags = (*FLAGS, "--ragged-profile", str(profile), "--kv-bytes", "24MiB")
    cores = sorted(os.sched_getaffinity(0))
    env = STRICT | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(2))}
    prompts = PROMPTS[1:4]
    with servers.serve(character_model, *flags, log=tmp_path / "one.log", env=STRICT) as server:
        want = [ask(server, one, 70) for one in prompts]
    split = ("--tp", "2", "--ragged-fairkv", "split", *CHAINS)
    with servers.serve(character_model, *flags, *split, log=tmp_path / "two.log", env=env) as server:
        rounds = [[ask(server, one, 70) for one in prompts] for _ in range(2)]
        assert "heads placed on 2 ranks (split)" in server.log_text()
    for found in rounds:
        for have, one in zip(found, want, strict=True):
            assert_same(have, one)
    assert np.mean([one.per_step for one in rounds[1]]) > 3


@pytest.mark.thorough
def test_what_comes_back_from_the_host_is_drafted_on(character_model, servers, tmp_path, plain):
    tier = (
        *("--enable-metrics", "--max-total-tokens", str(30 * SEGMENT), "--kv-bytes", "256MiB"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-write-policy", "write_through"),
    )
    first = prompt(60, 10 * SEGMENT - 15)
    flush(plain)
    answer = ask(plain, first, 100)
    turn = first + answer.tokens + prompt(61, 40)
    want = ask(plain, turn)
    with servers.serve(character_model, *FLAGS, *CHAINS, *tier, log=tmp_path / "log", env=STRICT) as server:
        for _ in range(2):
            assert_same(ask(server, first, 100), answer)
            for seed in range(70, 74):
                ask(server, prompt(seed, 15 * SEGMENT), 1)
            found = ask(server, turn)
            assert found.cached >= 11 * SEGMENT
            assert_same(found, want)
        assert found.per_step > 3
        assert ragged_metrics(server)["restored_segments_total/host"] > 11
        flush(server)
