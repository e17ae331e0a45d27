"""--ragged-reservoir on a real server: against the oracle, hit against miss, and what the tree takes."""

from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks.recall import MODEL, task
from benchmarks.recall.questions import interviews
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.features.retrieval.roles import head_roles, with_pivots
from sgl_ragged.features.retrieval.settings import ASKING_TOKENS, DELAY, Retrieval
from sgl_ragged.profiles.profile import profile_kept
from tests.models import make_profile
from tests.retrieval_oracle import RetrievalOracle
from tests.server.client import flush, generate, generate_all, ragged_metrics, server_settings, wait_until

pytestmark = [
    pytest.mark.server,
]

SEGMENT, RATIO = 64, 0.3
SETTINGS = Retrieval(reservoir_bytes=64 << 20, overlay=24, pivots=2, interval=8, drift=0.5)
PIVOTS = ((1, 3), (2, 6))
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


def document(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), max(length, 64), "chat").tolist()[:length]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("retrieval")


@pytest.fixture(scope="module")
def profile(folder):
    return make_profile(MODEL, folder / "profile.safetensors", segment=SEGMENT, pivots=PIVOTS)


@pytest.fixture(scope="module")
def flags(folder, profile):
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "6", "--enable-metrics"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors"), "--kv-bytes", "64MiB"),
        *("--ragged-reservoir", str(SETTINGS.reservoir_bytes), "--ragged-overlay", str(SETTINGS.overlay)),
    ]


@pytest.fixture(scope="module")
def server(folder, flags, servers):
    with servers.serve(MODEL, *flags, log=folder / "server.log", env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(profile):
    roles = head_roles(profile, SETTINGS.pivots)
    kept = with_pivots(lambda ratio: profile_kept(profile, ratio, SEGMENT), roles, RATIO, SEGMENT)
    given = dict(pivots=roles.pivots, watched_by=roles.watched_by, settings=SETTINGS)
    return RetrievalOracle(str(MODEL), kept, SEGMENT, "keydiff", **given)


@pytest.mark.parametrize("behind", [20, 0])
def test_server_agrees_with_the_oracle(server, oracle, behind):
    """Log-probabilities at every position of a prompt and of what is decoded behind it, also where both meet at the
    end of a segment."""
    prompt = document(100, 5 * SEGMENT + behind)
    answer = generate(server, prompt, 60, logprobs_from=0)
    found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
    expected = oracle.logprobs_behind(prompt, answer.tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert oracle.fetches
    # What was fetched matters, in the window and behind it.
    oracle.settings = Retrieval(**(vars(SETTINGS) | {"overlay": 1, "drift": 0.0}))
    other = np.abs(found - oracle.logprobs_behind(prompt, answer.tokens))
    oracle.settings = SETTINGS
    assert other[: len(prompt) - ASKING_TOKENS - 1].max() < 1e-4
    assert other[len(prompt) - ASKING_TOKENS : len(prompt) - 1].max() > 0.02
    assert other[len(prompt) + SETTINGS.interval + DELAY :].max() > 1e-3


@pytest.mark.parametrize("mode", ["permute", pytest.param("none", marks=pytest.mark.thorough)])
def test_two_ranks_agree_with_the_oracle(folder, flags, servers, oracle, mode):
    """Each has one of the pivots, and satellites of both. A second turn comes from the cache and is computed anew."""
    heads = plan_placement(oracle.kept, 2, mode).heads
    assert {int(np.argwhere(heads[layer] == head)[0, 0]) for layer, head in PIVOTS} == {0, 1}
    cores = sorted(os.sched_getaffinity(0))
    env = STRICT | {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    more = ["--tp", "2", "--ragged-fairkv", mode]
    with servers.serve(MODEL, *flags, *more, log=folder / f"{mode}.log", env=env) as server:
        prompt = document(100, 5 * SEGMENT + 20)
        answer = generate(server, prompt, 60, logprobs_from=0)
        found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
        np.testing.assert_allclose(found, oracle.logprobs_behind(prompt, answer.tokens), atol=1e-4)
        assert oracle.fetches
        turn = prompt + answer.tokens + document(101, 40)
        warm = generate(server, turn, 20)
        flush(server)
        cold = generate(server, turn, 20)
        assert (warm.cached, cold.cached) == ((len(prompt) - ASKING_TOKENS) // SEGMENT * SEGMENT, 0)
        np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)


def test_a_hit_equals_a_miss(server):
    """What was decoded under an overlay is not shared; what was prefilled before it is."""
    flush(server)
    prompt = document(101, 4 * SEGMENT + 10)
    cold = generate(server, prompt, 80)
    warm = generate(server, prompt, 80)
    assert (cold.cached, warm.cached) == (0, (len(prompt) - ASKING_TOKENS) // SEGMENT * SEGMENT)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    longer = prompt + cold.tokens
    second = generate(server, longer, 30)
    assert second.cached == (len(prompt) - ASKING_TOKENS) // SEGMENT * SEGMENT
    flush(server)
    np.testing.assert_allclose(second.output_logprobs, generate(server, longer, 30).output_logprobs, atol=1e-4)


def entries_and_pages(server) -> tuple[float, float]:
    """Segments in the reservoir, and pages that are in the tree or in use."""
    said, found = server_settings(server), ragged_metrics(server)
    entry_bytes = said["retrieval"]["reservoir_bytes"] // said["retrieval"]["segments"]
    return found["reservoir_bytes_in_use"] // entry_bytes, found["slab_bytes_in_use"] / said["slab_bytes"]


@pytest.mark.thorough
@pytest.mark.parametrize("reservoir", ["1MiB", "16MiB"])
def test_few_pages_and_a_small_reservoir(folder, flags, servers, reservoir):
    """Random requests that share prefixes push pages out of the tree and entries out of the reservoir."""
    rng = np.random.default_rng(4)
    # SGLang writes gauges once more when requests have ended, if a decode step before was written.
    small = [
        *flags,
        "--decode-log-interval",
        "4",
        "--ragged-reservoir",
        reservoir,
        "--max-total-tokens",
        str(20 * SEGMENT),
    ]
    with servers.serve(MODEL, *small, log=folder / "few.log", env=STRICT) as server:
        for _ in range(6):
            lengths = rng.integers(10, 6 * SEGMENT, 4)
            prompts = [document(int(rng.integers(3)), int(length)) for length in lengths]
            answers = generate_all(server, prompts, int(rng.integers(1, 2 * SEGMENT)))
            assert all(answer.tokens for answer in answers)
        generate(server, document(9, SEGMENT), 8)
        most = server_settings(server)["retrieval"]["segments"]
        if reservoir == "1MiB":
            assert most == 3
            wait_until(lambda: 1 <= entries_and_pages(server)[0] <= most)
        else:
            # An entry for each page in the tree, and none for pages that were freed.
            wait_until(lambda: 1 < entries_and_pages(server)[0] == entries_and_pages(server)[1])
        flush(server)
        generate(server, document(9, 10), 8)
        wait_until(lambda: entries_and_pages(server) == (0, 0))


def test_what_it_says(server):
    assert "2 pivots watch for" in server.log_text()
    said = server_settings(server)["retrieval"]
    assert (said["overlay"], said["pivots"]) == (SETTINGS.overlay, [list(pivot) for pivot in PIVOTS])
    before = ragged_metrics(server)
    generate(server, document(300, 3 * SEGMENT), 30)
    for name in ("pivot_questions_total", "retrieved_rows_total"):
        wait_until(lambda name=name: ragged_metrics(server)[name] > before[name])


@pytest.mark.thorough
def test_a_batch_changes_nothing(server):
    prompts = [document(200 + number, 3 * SEGMENT + 40 * number) for number in range(4)]
    alone = []
    for prompt in prompts:
        flush(server)
        alone.append(generate(server, prompt, 60))
    flush(server)
    for one, other in zip(generate_all(server, prompts, 60), alone, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "right"),
    [(["--ragged-reservoir", "64MiB"], (15, 16)), pytest.param([], (0, 8), marks=pytest.mark.thorough)],
)
def test_facts_that_heads_dropped_are_found_again(folder, servers, more, right):
    """Of 16, with budgets and pivots by calibration, at a ratio at which the scorer loses most without retrieval."""
    talks = interviews(2, 8, seed=5)
    flags = [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "6", "--kv-pool", "ragged"),
        *("--ragged-ratio", "0.15", "--ragged-scorer", "snapkv", "--kv-bytes", "64MiB"),
        *("--ragged-profile", str(MODEL.parent / "snapkv-coverage.safetensors")),
    ]
    found = 0
    with servers.serve(MODEL, *flags, *more, log=folder / "recall.log") as server:
        for talk in talks:
            answers = generate_all(server, [talk.prompt(fact) for fact in talk.facts], 1)
            wanted = [[task.TOKEN_ID[fact.value]] for fact in talk.facts]
            found += sum(answer.tokens == want for answer, want in zip(answers, wanted, strict=True))
    assert right[0] <= found <= right[1]
