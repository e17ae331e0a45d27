"""rho = 1 is SGLang with its token pool: same greedy tokens, same logprobs."""

from __future__ import annotations

import contextlib

import httpx
import numpy as np
import pytest
from transformers import AutoConfig

from tests.models import make_llama, make_qwen3
from tests.server.client import generate

pytestmark = pytest.mark.server

LENGTHS = (1, 2, 15, 16, 17, 63, 100, 127, 128, 129, 255, 256, 257, 383, 511, 512, 700, 1025, 1600)
NEW = 8
PAGE = 128


def conversations(server):
    """19 first turns of all lengths, and a second turn on a few of them, that extends the first answer."""
    rng = np.random.default_rng(1)
    first = [rng.integers(3, 512, length).tolist() for length in LENGTHS]
    follow = rng.integers(3, 512, 150).tolist()
    answers = []
    for number, prompt in enumerate(first):
        answer = generate(server, prompt, NEW, logprobs_from=0)
        answers.append(answer)
        if number % 4 == 0:
            prompt = prompt + answer.tokens + follow
            answers.append(generate(server, prompt, NEW))
            answers.append(generate(server, prompt, NEW, logprobs_from=0))
    # Decode across two segment boundaries.
    answers.append(generate(server, first[7], 140))
    return answers


def bytes_per_token(model) -> int:
    config = AutoConfig.from_pretrained(model)
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.parametrize("make", [make_llama, pytest.param(make_qwen3, marks=pytest.mark.thorough)])
def test_full_ratio_equals_token_pool(make, tmp_path, servers):
    model = make(tmp_path / "model")
    common = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "96MiB", "--max-running-requests", "4")
    ragged = ("--kv-pool", "ragged", "--ragged-ratio", "1", "--ragged-segment", str(PAGE))
    # The same page size: with another one the radix cache would cut the prompt elsewhere.
    starts = (
        servers.serve(model, *common, "--page-size", str(PAGE), log=tmp_path / "token.log"),
        servers.serve(model, *common, *ragged, log=tmp_path / "ragged.log"),
    )
    with contextlib.ExitStack() as stack:
        token_server, ragged_server = [stack.enter_context(start) for start in starts]
        expected = conversations(token_server)
        found = conversations(ragged_server)
        info = httpx.get(f"{token_server.url}/server_info", timeout=60).json()
        assert info["max_total_num_tokens"] == 96 * 2**20 // bytes_per_token(model) // PAGE * PAGE
        assert info["attention_backend"] == "torch_native"
        assert "ragged KV pool" not in token_server.log_text()
    assert any(answer.cached > 0 for answer in found)
    for want, have in zip(expected, found, strict=True):
        assert have.tokens == want.tokens
        # Whole pages there; here open segments are found, too.
        assert have.cached >= want.cached
        np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)
        np.testing.assert_allclose(have.input_logprobs, want.input_logprobs, atol=1e-4)
