"""Scorers that need more than keys and values, on real servers: against the oracle, and hit against miss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.accuracy.conversations import ask
from benchmarks.harness.client import ServerClient
from benchmarks.recall import MODEL, task
from benchmarks.recall.questions import interviews
from sgl_ragged.profiles.profile import profile_kept
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.expected_attention import ExpectedAttention
from tests.models import make_profile
from tests.oracle import Oracle
from tests.server.client import flush, found_of, generate

pytestmark = pytest.mark.server

PROFILE = MODEL.parent / "keydiff-coverage.safetensors"
SEGMENT, RATIO = 128, 0.3
LAYERS, HEADS, PER_HEAD, DIM, HIDDEN = 4, 8, 2, 32, 128


def document(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), length, "chat").tolist()


def weights(scorer: str) -> dict[str, torch.Tensor]:
    """Random statistics or gates of the right shapes."""
    # With seed 0, gates bring two tokens so near to each other at a budget's edge that rounding in a batch of another
    # shape shows (1.8e-4): hidden states differ in their last bits.
    generator = torch.Generator().manual_seed(int(scorer == "gate"))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(LAYERS, HEADS, *shape, generator=generator)

    if scorer == "expected_attention":
        root = rand(PER_HEAD, DIM, DIM) / DIM**0.5
        frequencies = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        rope = (frequencies.expand(LAYERS, 1, -1), torch.arange(float(DIM)).expand(LAYERS, 1, -1))
        moments = (rand(PER_HEAD, DIM), root @ root.mT)
        return {n: t.contiguous() for n, t in zip(ExpectedAttention.statistics, (*moments, *rope), strict=True)}
    if scorer == "gate":
        shapes = dict(input_mean=(HIDDEN,), input_scale=(HIDDEN,), hidden=(6, HIDDEN), hidden_bias=(6,))
        own = dict(skip=(HIDDEN,), output=(6,))
        shared = {name: torch.randn(LAYERS, 1, *shape, generator=generator) for name, shape in shapes.items()}
        return shared | {name: rand(*shape) for name, shape in own.items()}
    if scorer == "fastkvzip":
        shapes = dict(q_proj=(PER_HEAD, 4, HIDDEN), q_bias=(PER_HEAD, 4), k_proj=(4, HIDDEN), sink_keys=(3, 4))
        shapes |= dict(bias=(PER_HEAD,), q_norm=(4,), k_norm=(4,))
        return {name: rand(*shape) for name, shape in shapes.items()}
    return {}


@pytest.mark.parametrize(
    "scorer",
    [
        # By default one of each kind: with queries beside the tail, with statistics, with hidden states.
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("snapkv", "tova", "fastkvzip")),
        *("h2o", "expected_attention", "gate"),
    ],
)
def test_hit_equals_miss_and_the_oracle_agrees(scorer, servers, tmp_path):
    profile = make_profile(MODEL, tmp_path / "profile.safetensors", scorer=scorer, segment=SEGMENT)
    tensors = weights(scorer)
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "96MiB", "--max-running-requests", "4"]
    flags += ["--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)]
    flags += ["--ragged-scorer", scorer, "--ragged-profile", str(tmp_path / "profile.safetensors")]
    flags += ["--chunked-prefill-size", "512"]
    if tensors:
        save_file(tensors, str(tmp_path / "weights.safetensors"))
        flags += ["--ragged-scorer-weights", str(tmp_path / "weights.safetensors")]
    with servers.serve(MODEL, *flags, log=tmp_path / "server.log") as server:
        prompt = document(20, 700)
        first = generate(server, prompt, 80, logprobs_from=0)
        # The second turn finds segments that prefill sealed and one that decode sealed.
        turn = prompt + first.tokens + document(21, 60)
        warm = generate(server, turn, 20)
        assert warm.cached == found_of(700 + 79, SEGMENT)
        flush(server)
        cold = generate(server, turn, 20)
        assert cold.cached == 0
        assert warm.tokens == cold.tokens
        np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    if get_scorer(scorer).reads_hidden_states:
        return  # the oracle does not see hidden states
    statistics = tuple(t.double().numpy() for t in tensors.values()) or None
    kept = profile_kept(profile, RATIO, SEGMENT)
    expected = Oracle(str(MODEL), kept, SEGMENT, scorer, statistics).logprobs(prompt + first.tokens)
    found = np.concatenate([first.input_logprobs, first.output_logprobs])
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_decode_equals_prefill_when_the_cache_is_coarser_than_the_model(servers, tmp_path):
    """A float32 model with a bfloat16 cache: prefill must score and attend what decode finds in the cache."""
    make_profile(MODEL, tmp_path / "profile.safetensors", scorer="snapkv", segment=SEGMENT)
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "96MiB", "--max-running-requests", "4"]
    flags += ["--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)]
    flags += ["--ragged-scorer", "snapkv", "--ragged-profile", str(tmp_path / "profile.safetensors")]
    flags += ["--kv-cache-dtype", "bfloat16"]
    with servers.serve(MODEL, *flags, log=tmp_path / "server.log") as server:
        prompt = document(23, 300)
        decoded = generate(server, prompt, 100)
        flush(server)
        prefilled = generate(server, prompt + decoded.tokens, 1, logprobs_from=len(prompt) - 1)
    np.testing.assert_allclose(prefilled.input_logprobs, decoded.output_logprobs, atol=1e-4)


def test_calibrated_budgets_keep_recall_where_uniform_ones_lose_it(servers, tmp_path):
    """The committed profile of the recall model at a ratio at which uniform budgets answer a fifth of the questions."""
    flags = ["--dtype", "float32", "--kv-bytes", "160MiB", "--max-running-requests", "10"]
    flags += ["--kv-pool", "ragged", "--ragged-ratio", "0.08", "--ragged-profile", str(PROFILE)]
    with servers.serve(MODEL, *flags, log=tmp_path / "server.log") as server:
        asked = ask(ServerClient(server.url), interviews(4, 10, seed=2**35), at_once=4)
    assert len(asked) == 40
    assert sum(one.right for one in asked) >= 38
    assert all(one.cached >= 2048 for one in asked)


@pytest.mark.thorough
def test_the_size_of_what_scorers_keep(servers, tmp_path):
    """Queries of every token of an open segment are paid for."""
    profile = make_profile(MODEL, tmp_path / "profile.safetensors", scorer="h2o", segment=SEGMENT)
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "96MiB", "--max-running-requests", "4"]
    flags += ["--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)]
    flags += ["--ragged-scorer", "h2o", "--ragged-profile", str(tmp_path / "profile.safetensors")]
    with servers.serve(MODEL, *flags, log=tmp_path / "server.log") as server:
        answer = generate(server, document(22, 500), 8)
        log = server.log_text()
    kept = profile_kept(profile, RATIO, SEGMENT)
    assert f"(mean share {kept.mean() / SEGMENT:.4f})" in log
    slab_bytes = int(kept.sum()) * 2 * DIM * 4
    token_bytes = LAYERS * HEADS * (2 * DIM + get_scorer("h2o").input_shape(SEGMENT, PER_HEAD, DIM)[1]) * 4
    assert f"open segments with {slab_bytes // token_bytes} tokens a page;" in log
    assert "4 requests at most" in log
    assert len(answer.tokens) == 8
