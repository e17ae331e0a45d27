"""The Triton operations in a real server, interpreted on the CPU: against the dense-mask oracle, hit against miss."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.warm_start import Nursery
from sgl_ragged.budgets import profile_kept
from tests.architectures import WINDOWED
from tests.models import make_llama, make_profile
from tests.oracle import Oracle
from tests.server.client import generate, generate_all, ragged_metrics

pytestmark = [pytest.mark.server, pytest.mark.thorough]

SEGMENT, RATIO, NEW = 32, 0.6, 4
LENGTHS = (1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 4 * SEGMENT + 7)


def make_two_layers(folder):
    return make_llama(folder, num_hidden_layers=2)


@pytest.mark.parametrize("make", [make_two_layers, pytest.param(WINDOWED["gpt_oss"].make, id="gpt_oss")])
def test_served_logprobs_are_those_of_the_oracle_cold_and_cached(tmp_path, make):
    """Of a model with sliding windows and sinks, too: its windowed layers are on SGLang's own Triton kernels."""
    model, scorer = make(tmp_path / "model"), "keydiff"
    profile = make_profile(model, tmp_path / "profile.safetensors", scorer=scorer, segment=SEGMENT)
    flags = [
        *("--dtype", "float32", "--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
        *("--kv-pool", "ragged", "--ragged-kernel", "triton", "--ragged-ratio", str(RATIO), "--kv-bytes", "32MiB"),
        *("--ragged-segment", str(SEGMENT), "--ragged-profile", str(tmp_path / "profile.safetensors")),
        *("--enable-metrics", "--max-running-requests", "6", "--chunked-prefill-size", str(3 * SEGMENT)),
        *("--moe-runner-backend", "triton"),
    ]
    kept = profile_kept(profile, RATIO, SEGMENT)
    assert kept.min() < SEGMENT, "nothing would be compressed"
    oracle = Oracle(str(model), kept, SEGMENT, scorer)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 500, length).tolist() for length in LENGTHS]
    # Triton decides when a kernel is decorated, that is in the import of SGLang.
    nursery = Nursery({"TRITON_INTERPRET": "1"})
    with nursery, nursery.serve(model, *flags, log=tmp_path / "server.log") as server:
        assert "ragged attention kernels: triton" in (tmp_path / "server.log").read_text()
        cold = generate_all(server, prompts, NEW)
        again = generate(server, prompts[-1], NEW)
        # The prompts' own segments and one that decode filled; not those by which the kernels were compiled.
        metrics = ragged_metrics(server)
        assert metrics["sealed_segments_total"] == sum(length // SEGMENT for length in LENGTHS) + 1
        assert metrics["seal_seconds_total"] > 0
    for prompt, answer in zip(prompts, cold, strict=True):
        want = oracle.logprobs([*prompt, *answer.tokens])[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.output_logprobs, want, atol=1e-4)
    assert again.cached == 4 * SEGMENT
    assert again.tokens == cold[-1].tokens
    np.testing.assert_allclose(again.output_logprobs, cold[-1].output_logprobs, atol=1e-4)
