"""The Triton operations in a real server, interpreted on the CPU: against the dense-mask oracle, hit against miss."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.server_pool import ServerPool
from sgl_ragged.features.retrieval.roles import head_roles, with_pivots
from sgl_ragged.features.retrieval.settings import Retrieval
from sgl_ragged.profiles.profile import profile_kept
from tests.architectures import WINDOWED
from tests.models import make_llama, make_profile
from tests.oracle import Oracle
from tests.retrieval_oracle import RetrievalOracle
from tests.server.client import generate, generate_all, ragged_metrics

pytestmark = [pytest.mark.server, pytest.mark.thorough]

SEGMENT, RATIO, NEW = 32, 0.6, 4
LENGTHS = (1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 4 * SEGMENT + 7)


def make_two_layers(folder):
    return make_llama(folder, num_hidden_layers=2)


def flags_with(profile):
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
        *("--kv-pool", "ragged", "--ragged-kernel", "triton", "--ragged-ratio", str(RATIO), "--kv-bytes", "32MiB"),
        *("--ragged-segment", str(SEGMENT), "--ragged-profile", str(profile)),
        *("--enable-metrics", "--max-running-requests", "6", "--chunked-prefill-size", str(3 * SEGMENT)),
    ]


@pytest.mark.parametrize("make", [make_two_layers, pytest.param(WINDOWED["gpt_oss"].make, id="gpt_oss")])
def test_served_logprobs_are_those_of_the_oracle_cold_and_cached(tmp_path, make):
    """Of a model with sliding windows and sinks, too: its windowed layers are on SGLang's own Triton kernels."""
    model, scorer = make(tmp_path / "model"), "keydiff"
    profile = make_profile(model, tmp_path / "profile.safetensors", scorer=scorer, segment=SEGMENT)
    flags = [*flags_with(tmp_path / "profile.safetensors"), "--moe-runner-backend", "triton"]
    kept = profile_kept(profile, RATIO, SEGMENT)
    assert kept.min() < SEGMENT, "nothing would be compressed"
    oracle = Oracle(str(model), kept, SEGMENT, scorer)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 500, length).tolist() for length in LENGTHS]
    # Triton decides when a kernel is decorated, that is in the import of SGLang.
    servers = ServerPool({"TRITON_INTERPRET": "1"})
    with servers, servers.serve(model, *flags, log=tmp_path / "server.log") as server:
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


def test_what_was_fetched_is_seen_beside_slabs_and_tails(tmp_path):
    """At every position of a prompt and of what is decoded behind it, over the end of a segment."""
    model = make_two_layers(tmp_path / "model")
    settings = Retrieval(reservoir_bytes=16 << 20, overlay=6, pivots=2, interval=4, drift=0.9)
    profile = make_profile(model, tmp_path / "profile.safetensors", segment=SEGMENT, pivots=((0, 2), (1, 0)))
    roles = head_roles(profile, settings.pivots)
    ratio = 0.7
    kept = with_pivots(lambda share: profile_kept(profile, share, SEGMENT), roles, ratio, SEGMENT)
    assert (kept < SEGMENT).sum() >= 3
    given = dict(pivots=roles.pivots, watched_by=roles.watched_by, settings=settings)
    oracle = RetrievalOracle(str(model), kept, SEGMENT, "keydiff", **given)
    more = ["--ragged-reservoir", str(settings.reservoir_bytes), "--ragged-overlay", str(settings.overlay)]
    more += ["--ragged-watch-interval", str(settings.interval), "--ragged-drift", str(settings.drift)]
    prompt = np.random.default_rng(1).integers(10, 500, 4 * SEGMENT - 4).tolist()
    servers = ServerPool({"TRITON_INTERPRET": "1"})
    # In one chunk: tokens before a chunk that ends within the prompt's last ones see nothing.
    more += ["--ragged-ratio", str(ratio), "--chunked-prefill-size", str(8 * SEGMENT)]
    flags = [*flags_with(tmp_path / "profile.safetensors"), *more]
    with servers, servers.serve(model, *flags, log=tmp_path / "server.log") as server:
        assert "ragged attention kernels: triton" in server.log_text()
        answer = generate(server, prompt, 16, logprobs_from=0)
    found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
    np.testing.assert_allclose(found, oracle.logprobs_behind(prompt, answer.tokens), atol=1e-4)
    assert oracle.fetches
