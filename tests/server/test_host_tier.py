"""Slabs that were evicted come back from the host or from storage, and nobody can tell from the answers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.demo import MODEL
from benchmarks.recall import task
from tests.models import make_profile
from tests.server.client import Answer, flush, generate, ragged_metrics

pytestmark = pytest.mark.server

SEGMENT, RATIO = 64, 0.3
DEVICE_TOKENS = 40 * SEGMENT

FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4", "--enable-metrics"),
    *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
    *("--max-total-tokens", str(DEVICE_TOKENS), "--kv-bytes", "256MiB", "--chunked-prefill-size", "512"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "12"),
)


def conversation(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), max(length, 128), "chat")[0].tolist()[:length]


CONVERSATIONS = [
    conversation(seed, length)
    # With the answer, the last of them ends on a border: SGLang counts its page as full before it is sealed.
    for seed, length in enumerate((700, 1000, 1279, 20 * SEGMENT - 15))
]
NEW = 16


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("tier") / "profile.safetensors"
    make_profile(MODEL, path, segment=SEGMENT)
    return path


def fill_device(server) -> None:
    """Push everything else out of the device's pool: twice as many tokens as it has."""
    for seed in range(100, 104):
        generate(server, conversation(seed, DEVICE_TOKENS // 2), 1)


def restored(server, tier: str = "host") -> float:
    return ragged_metrics(server)[f"restored_segments_total/{tier}"]


def second_turn(first: Answer, prompt: list[int]) -> list[int]:
    return [*prompt, *first.tokens, *conversation(7, 90)]


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.output_logprobs, expected.output_logprobs, atol=1e-4)


def cold_turns(server) -> tuple[list[Answer], list[Answer]]:
    """First and second turns with an empty cache."""
    firsts, seconds = [], []
    for prompt in CONVERSATIONS:
        flush(server)
        firsts.append(generate(server, prompt, NEW))
        flush(server)
        seconds.append(generate(server, second_turn(firsts[-1], prompt), NEW))
        assert seconds[-1].cached == 0
    flush(server)
    return firsts, seconds


def whole_segments(first: Answer, prompt: list[int]) -> int:
    """Tokens of the first turn that a cache can hold: the last token that was generated has no keys yet."""
    return (len(prompt) + len(first.tokens) - 1) // SEGMENT * SEGMENT


def test_conversations_come_back_from_the_host(nursery, profile, tmp_path):
    with nursery.serve(MODEL, *FLAGS, "--ragged-profile", str(profile), log=tmp_path / "log") as server:
        firsts, seconds = cold_turns(server)
        for prompt, first in zip(CONVERSATIONS, firsts, strict=True):
            assert_same(generate(server, prompt, NEW), first)
        fill_device(server)
        before = restored(server)
        for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
            found = generate(server, second_turn(first, prompt), NEW)
            assert found.cached == whole_segments(first, prompt)
            assert_same(found, second)
        generate(server, conversation(50, 20), 1)
        assert restored(server) - before >= sum(map(len, CONVERSATIONS)) // SEGMENT * 0.9
        assert "ragged" in server.log_text() and not re.search("Traceback", server.log_text())
