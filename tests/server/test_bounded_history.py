"""--ragged-history on a real server: against the oracle, hit against miss, after retraction, and what memory does."""

from __future__ import annotations

import re

import httpx
import numpy as np
import pytest

from benchmarks.recall import MODEL, task
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.profiles.profile import VALUE_MEAN, load_profile, profile_kept
from tests.bounded_oracle import BoundedOracle
from tests.models import make_profile
from tests.server import test_tensor_parallel as two_ranks
from tests.server.client import flush, generate, generate_all, ragged_metrics, server_settings
from tests.server.test_host_tier import pages, wait_until
from tests.server.test_tensor_parallel import models as models

pytestmark = [
    pytest.mark.server,
]

SEGMENT, LIMIT, RATIO = 64, 5, 0.4
HISTORY = SEGMENT * LIMIT
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def document(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), max(length, 64), "chat").tolist()[:length]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("history")


@pytest.fixture(scope="module")
def profile(folder):
    return make_profile(MODEL, folder / "profile.safetensors", segment=SEGMENT)


@pytest.fixture(scope="module")
def flags(folder, profile):
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "6", "--enable-metrics"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors"), "--ragged-history", str(HISTORY)),
    ]


@pytest.fixture(scope="module")
def server(folder, flags, profile, servers):
    with servers.serve(MODEL, *flags, "--kv-bytes", "64MiB", log=folder / "server.log", env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def whole_flags(flags):
    """Nothing is dropped within segments: long greedy answers repeat themselves, and among equal keys which one is
    kept is a matter of rounding. Among segments it is not."""
    return [*flags, "--ragged-ratio", "1"]


@pytest.fixture(scope="module")
def whole(folder, whole_flags, servers):
    with servers.serve(MODEL, *whole_flags, "--kv-bytes", "64MiB", log=folder / "whole.log", env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(profile):
    kept = profile_kept(profile, RATIO, SEGMENT)
    bound = dict(limit=LIMIT, latest=LIMIT // 2, score="value_novelty", means=profile.statistics[VALUE_MEAN])
    return BoundedOracle(str(MODEL), kept, SEGMENT, "keydiff", **bound)


def test_server_agrees_with_the_oracle(server, oracle):
    """Log-probabilities at every position of a prompt twice as long as the bound, and of as many decoded tokens."""
    prompt = document(100, 2 * HISTORY + 10)
    answer = generate(server, prompt, HISTORY + 40, logprobs_from=0)
    found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
    expected = oracle.logprobs(prompt + answer.tokens)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    # What left was not just the oldest, and the bound matters.
    assert oracle.seen[-1] != [0, *range(len(oracle.seen) - LIMIT, len(oracle.seen) - 1)]
    oracle.limit = len(oracle.seen)
    assert np.abs(found - oracle.logprobs(prompt + answer.tokens)).max() > 0.1
    oracle.limit = LIMIT


def test_a_hit_equals_a_miss(server):
    flush(server)
    prompt = document(101, HISTORY + 3 * SEGMENT + 5)
    cold = generate(server, prompt, 150, logprobs_from=0)
    warm = generate(server, prompt, 150, logprobs_from=LIMIT * SEGMENT)
    # The tree takes no more of a sequence than can be in view.
    assert (cold.cached, warm.cached) == (0, HISTORY)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    longer = prompt + cold.tokens
    second = generate(server, longer, 30)
    flush(server)
    np.testing.assert_allclose(second.output_logprobs, generate(server, longer, 30).output_logprobs, atol=1e-4)


def test_memory_stays_as_it_is_from_the_bound_on(server):
    """Tokens in use, by the server's own log, while one request generates twice its bound."""
    flush(server)
    before = len(server.log_text())
    generate(server, document(102, 40), 2 * HISTORY)
    used = [int(n) for n in re.findall(r"Decode batch.*#token: (\d+)", server.log_text()[before:])]
    assert len(used) > 12
    # A page for each segment that is seen and the open one, and what that one has beside its own.
    pages = OpenPages(SEGMENT, server_settings(server)["open_page_tokens"])
    assert HISTORY + SEGMENT <= max(used) <= HISTORY + SEGMENT * (1 + pages.most)
    flush(server)
    assert generate(server, document(102, 10), 1).cached == 0


@pytest.mark.thorough
def test_many_at_once_are_never_retracted(folder, whole_flags, servers, whole):
    """Four long requests in a pool that does not hold them uncut: none is retracted, all answer as when alone."""
    prompts = [document(200 + number, 30 + 25 * number) for number in range(4)]
    flush(whole)
    alone = [generate(whole, prompt, 2 * HISTORY) for prompt in prompts[3:]]
    shared = sum(len(prompt) // SEGMENT * SEGMENT for prompt in prompts)
    tokens = str(4 * (HISTORY + 3 * SEGMENT) + shared)
    small = [*whole_flags, "--kv-bytes", "64MiB", "--max-total-tokens", tokens]
    with servers.serve(MODEL, *small, log=folder / "small.log", env=STRICT) as pressed:
        together = generate_all(pressed, prompts, 2 * HISTORY)
        log = pressed.log_text()
    assert "Retract" not in log
    running = [int(n) for n in re.findall(r"#running-req: (\d+)", log)]
    assert max(running) == 4
    # Uncut, they would not fit beside each other.
    assert sum(len(prompt) + 2 * HISTORY for prompt in prompts) > 1.2 * int(tokens)
    for one, other in zip(together[3:], alone, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-4)


def test_retraction_changes_nothing(folder, whole_flags, servers, whole):
    """SGLang retracts a request every few steps; prefilled again, it sees what it saw."""
    prompts = [document(300 + number, HISTORY - 20 + 60 * number) for number in range(2)]
    alone = []
    for prompt in prompts:
        flush(whole)
        alone.append(generate(whole, prompt, 3 * SEGMENT))
    pressed = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "150", **STRICT}
    with servers.serve(MODEL, *whole_flags, "--kv-bytes", "64MiB", log=folder / "retract.log", env=pressed) as server:
        together = generate_all(server, prompts, 3 * SEGMENT)
        assert "Testing retraction" in server.log_text()
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-4)


def test_what_it_says(server):
    log = server.log_text()
    assert re.search(rf"requests see {HISTORY} tokens of their histories and hold at most", log)
    assert "segments leave by value_novelty" in log
    before = ragged_metrics(server).get("dropped_segments_total", 0)
    generate(server, document(500, HISTORY + 3 * SEGMENT + 1), 1)
    assert ragged_metrics(server)["dropped_segments_total"] == before + 3
    said = httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]
    assert (said["history"], said["history_score"]) == (HISTORY, "value_novelty")
    assert not said["open_segments_kept"]
    assert "open segments are not kept as cache (BoundedRadixCache): prefixes are found up to their last border" in log


@pytest.mark.parametrize("mode", ["permute", pytest.param("split", marks=pytest.mark.thorough)])
def test_ranks_drop_the_same(servers, models, tmp_path, mode):
    """Two ranks, each with half of the heads, agree on what leaves; from the cache and cold, and with the oracle."""
    model, limit = models["llama"], 6
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 512, 9 * two_ranks.SEGMENT - 10).tolist()
    flags = ["--ragged-history", str(limit * two_ranks.SEGMENT), "--ragged-fairkv", mode]
    with two_ranks.serve(servers, model, 2, two_ranks.RATIO, *flags, log=tmp_path / "server.log") as server:
        cold = generate(server, prompt, 40, logprobs_from=0)
        warm = generate(server, prompt, 40)
    assert (cold.cached, warm.cached) == (0, limit * two_ranks.SEGMENT)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    means = load_profile(model.profile).statistics[VALUE_MEAN]
    bound = dict(limit=limit, latest=limit // 2, score="value_novelty", means=means)
    oracle = BoundedOracle(str(model.path), model.kept, two_ranks.SEGMENT, "keydiff", **bound)
    found = np.concatenate([cold.input_logprobs, cold.output_logprobs])
    np.testing.assert_allclose(found, oracle.logprobs(prompt + cold.tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("score", "restore"),
    [
        ("auto", "load"),
        pytest.param("auto", "recompute", marks=pytest.mark.thorough),
        pytest.param("value_key_norm", "load", marks=pytest.mark.thorough),
        pytest.param("recency", "load", marks=pytest.mark.thorough),
    ],
)
def test_a_host_tier_holds_what_was_shared(folder, flags, servers, score, restore):
    """What comes back from the host is seen as if it had never left, and leaves views as if it had not."""
    tier = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-write-policy", "write_through"]
    device = ["--kv-bytes", "64MiB", "--max-total-tokens", str(4 * HISTORY), "--ragged-restore", restore]
    device += ["--ragged-history-score", score]
    prompt = document(400, 2 * HISTORY + 20)
    with servers.serve(MODEL, *flags, *tier, *device, log=folder / "tier.log", env=STRICT) as server:
        cold = generate(server, prompt, 2 * SEGMENT)
        for seed in range(401, 409):
            generate(server, document(seed, HISTORY + 2), 1)
        warm = generate(server, prompt, 2 * SEGMENT)
        generate(server, document(409, 20), 1)
        came_back = ragged_metrics(server)
        log = server.log_text()
    assert f"segments leave by {'value_novelty' if score == 'auto' else score}" in log
    assert (cold.cached, warm.cached) == (0, HISTORY)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    assert (came_back["restored_segments_total/recomputed"] > 0) == (restore == "recompute")
    assert sum(came_back[f"restored_segments_total/{way}"] for way in ("host", "recomputed")) == LIMIT


@pytest.mark.thorough
def test_storage_holds_scores(folder, flags, servers):
    """A server that starts anew finds segments on disk, and what it drops is what the first one dropped."""
    tier = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-write-policy", "write_through"]
    tier += ["--hicache-storage-backend", "file", "--file-storage-path", str(folder / "pages")]
    tier += ["--hicache-storage-prefetch-policy", "wait_complete", "--ragged-restore", "load"]
    prompt, answers = document(400, 2 * HISTORY + 20), []
    for turn in range(2):
        with servers.serve(MODEL, *flags, *tier, "--kv-bytes", "64MiB", log=folder / "disk.log", env=STRICT) as server:
            answers.append(generate(server, prompt, 2 * SEGMENT))
            if turn == 0:
                wait_until(lambda: len(pages(folder / "pages")) == LIMIT)
    cold, warm = answers
    assert (cold.cached, warm.cached) == (0, HISTORY)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
