"""What two servers have beside slabs and heads with budgets: each against one process that does both."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.torch import save_file

from benchmarks.harness.unpinned_launch import UNPINNED_LAUNCH
from benchmarks.recall import MODEL
from tests.models import make_adapter, make_llama, make_profile
from tests.server.client import ask, flush, generate, ragged_metrics, server_settings
from tests.server.pair import serve_pair
from tests.server.test_bounded_history import STRICT
from tests.server.test_disaggregation import SEGMENT, document
from tests.server.test_scorers_served import weights

pytestmark = [pytest.mark.server, pytest.mark.thorough]

NEW = 80
PROMPTS = [document(seed, length) for seed, length in enumerate((40, 127, 128, 129, 500))]
FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4", "--enable-metrics"),
    *("--chunked-prefill-size", "256", "--kv-bytes", "24MiB"),
    *("--kv-pool", "ragged", "--ragged-ratio", "0.3", "--ragged-segment", str(SEGMENT)),
)


def compare(servers, folder, model, flags, *, prefill=(), env=STRICT) -> None:
    """One request after the other: of codes and FP8, batches of other shapes may round a key to its neighbour."""
    with servers.serve(model, *flags, log=folder / "together.log", env=env) as server:
        expected = []
        for prompt in PROMPTS:
            flush(server)
            expected.append(generate(server, prompt, NEW))
    with serve_pair(servers, model, *flags, folder=folder, prefill=prefill, env=env) as pair:
        for prompt, want in zip(PROMPTS, expected, strict=True):
            have = pair.generate(prompt, NEW)
            assert have.tokens == want.tokens
            np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)


def test_a_scorer_that_keeps_something_of_every_token(tmp_path, servers):
    """The decode server seals what the prefill server began by the scores that this has given it."""
    make_profile(MODEL, tmp_path / "profile.safetensors", scorer="gate", segment=SEGMENT)
    save_file(weights("gate"), str(tmp_path / "gates.safetensors"))
    flags = ["--ragged-scorer", "gate", "--ragged-profile", str(tmp_path / "profile.safetensors")]
    compare(servers, tmp_path, MODEL, (*FLAGS, *flags, "--ragged-scorer-weights", str(tmp_path / "gates.safetensors")))


@pytest.mark.parametrize("flags", [("--ragged-slab-dtype", "k8v4"), ("--kv-cache-dtype", "fp8_e4m3")], ids=str)
def test_codes_and_fp8(flags, tmp_path, servers):
    compare(servers, tmp_path, MODEL, (*FLAGS, *flags))


def test_two_ranks(tmp_path, servers):
    """Each sends the pages of its own heads to the rank of its number; those of the ranks differ in bytes."""
    model = make_llama(tmp_path / "model", initializer_range=0.1)
    mu = np.array([[0.9, 0.7, 0.05, 0.1], [0.8, 0.3, 0.1, 0.05], [0.1, 0.9, 0.6, 0.05]])
    make_profile(model, tmp_path / "profile.safetensors", segment=SEGMENT, mu=mu)
    cores = sorted(os.sched_getaffinity(0))
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(2))}
    flags = (*FLAGS, "--tp", "2", "--ragged-fairkv", "none", "--ragged-profile", str(tmp_path / "profile.safetensors"))
    compare(servers, tmp_path, model, flags, env=STRICT | bound)


def test_adapters(tmp_path, servers):
    """Both servers have them, and each request names its own; what one leaves in the cache is not found by another."""
    paths = [f"{name}={make_adapter(MODEL, tmp_path / name, seed)}" for seed, name in enumerate(("one", "two"))]
    flags = (
        *(*FLAGS, "--enable-lora", "--lora-paths", *paths, "--lora-backend", "torch_native", "--max-lora-rank", "4"),
        *("--lora-target-modules", "q_proj", "k_proj", "v_proj"),
    )
    requests = [(prompt, name) for prompt in PROMPTS[2:] for name in (None, "one", "two")]
    with servers.serve(MODEL, *flags, log=tmp_path / "together.log", launcher=UNPINNED_LAUNCH) as server:
        expected = []
        for prompt, name in requests:
            flush(server)
            expected.append(ask(server, {"input_ids": prompt, "lora_path": name}, NEW))
    assert not np.allclose(expected[1].output_logprobs, expected[2].output_logprobs, atol=0.01)
    with serve_pair(servers, MODEL, *flags, folder=tmp_path, env=STRICT, launcher=UNPINNED_LAUNCH) as pair:
        for _ in range(2):
            with ThreadPoolExecutor(len(requests)) as threads:
                found = list(threads.map(lambda one: pair.generate(one[0], NEW, lora_path=one[1]), requests))
            for have, want in zip(found, expected, strict=True):
                assert have.tokens == want.tokens
                np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)


def test_a_host_tier_below_the_prefill_server(tmp_path, servers):
    """What comes back from the host is sent as what was never away."""
    tier = ("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-write-policy", "write_through")
    others = [document(30 + seed, 700) for seed in range(12)]
    with servers.serve(MODEL, *FLAGS, log=tmp_path / "together.log") as server:
        expected = generate(server, others[0], NEW)
    flags, small = [*FLAGS], ("--ragged-restore", "load", "--kv-bytes", "4MiB")
    at = flags.index("--kv-bytes")
    decode, flags = flags[at : at + 2], flags[:at] + flags[at + 2 :]
    with serve_pair(
        servers, MODEL, *flags, folder=tmp_path, prefill=(*tier, *small), decode=decode, env=STRICT
    ) as pair:
        assert server_settings(pair.prefill)["tier"] is not None
        for prompt in others:
            pair.generate(prompt, 1)
        found = pair.generate(others[0], NEW)
        pair.generate(others[0], 1)
        assert found.cached >= 640
        assert ragged_metrics(pair.prefill)["restored_segments_total/host"] > 0
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.output_logprobs, expected.output_logprobs, atol=1e-4)
