"""Models with sliding windows: SGLang's pages for windowed layers, slabs for the others; prefixes share both."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from benchmarks.storm.features import RETRACTING, STRICT
from sgl_ragged.profiles.budgets import uniform_kept
from sgl_ragged.profiles.profile import profile_kept
from tests.architectures import WINDOW, WINDOWED
from tests.examples import fewer
from tests.models import make_profile
from tests.oracle import Oracle
from tests.server.client import flush, generate, generate_all

pytestmark = pytest.mark.server

SEGMENT, LAYERS, HEADS = 32, 2, 4
FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--kv-pool", "ragged", "--ragged-segment", str(SEGMENT)),
    *("--max-running-requests", "6", "--chunked-prefill-size", "256"),
)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, length).tolist()


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return WINDOWED["gemma3_text"].make(tmp_path_factory.mktemp("gemma3") / "model")


@pytest.fixture(scope="module")
def profile(gemma3):
    return make_profile(gemma3, gemma3.parent / "profile.safetensors", segment=SEGMENT)


@pytest.fixture(scope="module")
def server(gemma3, profile, servers):
    flags = (*FLAGS, "--ragged-ratio", "0.5", "--ragged-profile", str(gemma3.parent / "profile.safetensors"))
    with servers.serve(gemma3, *flags, "--kv-bytes", "32MiB", log=gemma3.parent / "log") as server:
        yield server


def test_server_agrees_with_the_oracle(server, gemma3, profile):
    kept = profile_kept(profile, 0.5, SEGMENT)
    assert kept.shape == (LAYERS, HEADS)
    start = prompt(0, 400)
    answer = generate(server, start, 80, logprobs_from=0)
    found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
    sequence = start + answer.tokens
    np.testing.assert_allclose(found, Oracle(str(gemma3), kept, SEGMENT, "keydiff").logprobs(sequence), atol=1e-3)
    full = Oracle(str(gemma3), np.full_like(kept, SEGMENT), SEGMENT, "keydiff").logprobs(sequence)
    assert np.abs(found - full).max() > 0.1


def test_warm_equals_cold_alone_and_in_a_batch(server):
    """A prefix is served where the window before its end is there; what follows it gets the same logits."""
    prompts = [prompt(seed, length) for seed, length in enumerate((1, SEGMENT, SEGMENT + 1, WINDOW, 130, 300))]
    cold = []
    for tokens in prompts:
        flush(server)
        cold.append(generate(server, tokens, 40))
        assert cold[-1].cached == 0
    flush(server)
    batch = generate_all(server, prompts, 40)
    warm = [generate(server, tokens, 40) for tokens in prompts]
    assert [answer.cached for answer in warm] == [(len(tokens) - 1) // SEGMENT * SEGMENT for tokens in prompts]
    # A second turn goes on from what decode filled.
    turns = [tokens + answer.tokens + prompt(9, 20) for tokens, answer in zip(prompts, cold, strict=True)]
    again = [generate(server, tokens, 8) for tokens in turns]
    assert [answer.cached for answer in again] == [(len(tokens) + 39) // SEGMENT * SEGMENT for tokens in prompts]
    flush(server)
    expected = cold + cold + [generate(server, tokens, 8) for tokens in turns]
    for have, want in zip(batch + warm + again, expected, strict=True):
        assert have.tokens == want.tokens
        np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("ratio", "dtype"), [pytest.param("1", "auto", marks=pytest.mark.thorough), ("0.5", "auto"), ("0.5", "fp8_e4m3")]
)
def test_sinks(ratio, dtype, tmp_path, servers):
    """gpt-oss has learned sinks in layers of both kinds; with an FP8 cache both pools are FP8."""
    model = WINDOWED["gpt_oss"].make(tmp_path / "model")
    start = prompt(1, 300)
    # On CPUs SGLang cannot run the kernels that it takes by itself for these experts.
    flags = (*FLAGS, "--ragged-ratio", ratio, "--kv-bytes", "32MiB", "--kv-cache-dtype", dtype)
    flags += ("--moe-runner-backend", "triton")
    with servers.serve(model, *flags, log=tmp_path / "log") as server:
        cold = generate(server, start, 60, logprobs_from=0)
        warm = generate(server, start, 60)
    assert warm.cached == 288
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    if dtype != "auto":
        return
    kept = uniform_kept(LAYERS, HEADS, float(ratio), SEGMENT)
    expected = Oracle(str(model), kept, SEGMENT, "keydiff").logprobs(start + cold.tokens)
    np.testing.assert_allclose(np.concatenate([cold.input_logprobs, cold.output_logprobs]), expected, atol=1e-3)


def test_two_ranks_with_heads_moved(gemma3, profile, server, servers, tmp_path):
    """Heads of the layers in slabs move between ranks, those of the others stay."""
    tokens = prompt(3, 300)
    flush(server)
    alone = generate(server, tokens, 40, logprobs_from=0)
    flags = (*FLAGS, "--ragged-ratio", "0.5", "--ragged-profile", str(gemma3.parent / "profile.safetensors"))
    more = ("--tp", "2", "--ragged-fairkv", "permute", "--kv-bytes", "16MiB")
    cores = sorted(os.sched_getaffinity(0))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    with servers.serve(gemma3, *flags, *more, log=tmp_path / "log", env=env) as other:
        both = [generate(other, tokens, 40, logprobs_from=start) for start in (0, None)]
        info = httpx.get(f"{other.url}/server_info", timeout=60).json()
    assert info["ragged"]["fairkv"] == "permute"
    assert both[1].cached == 288
    for found in both:
        assert found.tokens == alone.tokens
        np.testing.assert_allclose(found.output_logprobs, alone.output_logprobs, atol=1e-4)
    np.testing.assert_allclose(both[0].input_logprobs, alone.input_logprobs, atol=1e-4)


def test_many_requests_on_few_pages(gemma3, servers, tmp_path):
    """Mixed requests while windows are evicted and requests retracted: all end, each as on an empty server."""
    few = ("--swa-full-tokens-ratio", "0.1", "--kv-bytes", "3MiB", "--context-length", "700")
    flags = (*FLAGS, "--ragged-ratio", "0.5", *few, "--schedule-conservativeness", "0.05")
    flags += ("--chunked-prefill-size", "64")
    dice = random.Random(0)
    trunk = prompt(4, 500)
    asked = [
        (trunk[: dice.randint(0, 400)] + prompt(dice.randint(0, 40), dice.randint(1, 200)), dice.randint(1, 40))
        for _ in range(fewer(300))
    ]
    with servers.serve(gemma3, *flags, log=tmp_path / "log", env=STRICT | RETRACTING) as server:
        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(lambda request: generate(server, *request), asked))
        assert sum(answer.cached > 0 for answer in answers) > len(asked) / 6
        for request, answer in list(zip(asked, answers, strict=True))[::30]:
            flush(server)
            alone = generate(server, *request)
            assert alone.tokens == answer.tokens
            np.testing.assert_allclose(alone.output_logprobs, answer.output_logprobs, atol=1e-4)
        flush(server)
        log = server.log_text()
        assert "Testing retraction. #retracted_reqs: 1" in log
        for sign in ("leak", "scheduler hit an exception", "exception in asgi application"):
            assert sign not in log.lower()
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
