"""Drafts by a model of its own on a real server: answers, what is cached and what is free are as without them.

The model drafts for itself: from a cache without compression, and without the prompt's first token, which SGLang leaves
out. Its attention says less than its embeddings do, so that most drafts are right, and all that it says shows in
logprobs.
"""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.models import make_llama
from tests.server.client import flush, found_of, server_settings
from tests.server.test_bounded_history import STRICT
from tests.server.test_drafts import CLOSE, Drafted, ask, ask_all, assert_same

pytestmark = pytest.mark.server

SEGMENT, NEW, WIDTH = 64, 70, 5
FLAGS = (
    *("--skip-tokenizer-init", "--ragged-kernel", "torch"),
    *("--dtype", "float32", "--max-running-requests", "8", "--chunked-prefill-size", "256"),
    *("--kv-pool", "ragged", "--ragged-ratio", "0.75", "--ragged-segment", str(SEGMENT)),
)
TOKEN_BYTES = 4 * 3 * 4 * 64 * 2
"""Of the model in float32: 3 layers of 4 heads of dimension 64, keys and values."""


def by_model(model: object) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model)),
        *("--speculative-eagle-topk", "1", "--speculative-num-steps", str(WIDTH - 1)),
        *("--speculative-num-draft-tokens", str(WIDTH)),
    )


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 500, length).tolist()


PROMPTS = [prompt(seed, n) for seed, n in enumerate((1, 65, 2 * SEGMENT, 3 * SEGMENT - 1, 301))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_llama(tmp_path_factory.mktemp("models") / "target")
    weights = load_file(folder / "model.safetensors")
    quiet = {name: weight * (0.05 if "o_proj" in name else 1) for name, weight in weights.items()}
    save_file(quiet, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain(model, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with servers.serve(model, *FLAGS, "--kv-bytes", "24MiB", log=log, env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(model, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("drafting") / "server.log"
    with servers.serve(model, *FLAGS, *by_model(model), "--kv-bytes", "48MiB", log=log, env=STRICT) as server:
        settings = server_settings(server)
        assert (settings["draft_tokens"], settings["draft_bytes_per_token"]) == (WIDTH, TOKEN_BYTES)
        yield server


@pytest.fixture(scope="module")
def wanted(plain):
    return [ask(plain, one, NEW) for one in PROMPTS]


def per_step(answers: list[Drafted]) -> float:
    return float(np.mean([one.per_step for one in answers]))


def test_answers_are_those_without_drafts(drafting, wanted):
    """From nothing, from the cache, and all at once; drafts from the cache are as good."""
    flush(drafting)
    cold = [ask(drafting, one, NEW) for one in PROMPTS]
    again = [ask(drafting, one, NEW) for one in PROMPTS]
    for found in (cold, again, ask_all(drafting, PROMPTS, NEW)):
        for have, want in zip(found, wanted, strict=True):
            assert_same(have, want)
    assert [one.cached for one in cold] == [0] * len(PROMPTS)
    assert [one.cached for one in again] == [0, SEGMENT, SEGMENT, 3 * SEGMENT - 2, 300]
    assert per_step(cold) > 1.4
    assert per_step(again) == pytest.approx(per_step(cold), rel=0.05)
    sampled = ask(drafting, PROMPTS[1], NEW, temperature=0.7, top_k=1)
    same = next((i for i, (a, b) in enumerate(zip(sampled.tokens, wanted[1].tokens, strict=True)) if a != b), NEW)
    assert same == NEW or wanted[1].gaps[same] < CLOSE


def test_as_much_is_cached_and_a_hit_equals_a_miss(plain, drafting):
    """A turn that goes on behind an answer finds it to its last token, wherever chains ended."""
    for length in (SEGMENT - 25, 2 * SEGMENT - 1):
        first = prompt(length, length)
        flush(plain)
        flush(drafting)
        answer = ask(plain, first, NEW)
        assert_same(ask(drafting, first, NEW), answer)
        turn = first + answer.tokens + prompt(7, 12)
        want, hit = ask(plain, turn, 20), ask(drafting, turn, 20)
        assert want.cached == found_of(length + NEW - 1, SEGMENT)
        # The last token's keys are there, too, where a chain went on behind it.
        assert hit.cached in (want.cached, found_of(length + NEW, SEGMENT))
        flush(drafting)
        miss = ask(drafting, turn, 20)
        assert miss.cached == 0
        for found in (hit, miss):
            assert_same(found, want)


def test_copies_of_open_segments_have_what_the_draft_model_knows(drafting):
    """Who goes on with a copy has as many drafts accepted as who has computed it, and so has who copies the copy."""
    for seed in range(3):
        first = prompt(seed, SEGMENT - 24)
        flush(drafting)
        cold, *hits = [ask(drafting, first, 20) for _ in range(3)]
        assert [one.cached for one in hits] == [len(first) - 1] * 2
        assert [one.per_step for one in hits] == [cold.per_step] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "kv_bytes", "atol"), [("wide", "9MiB", 1e-4), ("int8", "4MiB", 1e-3)])
def test_another_model_drafts(model, servers, tmp_path, form, kv_bytes, atol):
    """A draft model of other sizes, twice: retracted, or with slabs in codes.

    What is retracted is computed in other batches than before, and codes round what differs in the last bit.
    """
    other = make_llama(tmp_path / "other", num_hidden_layers=1, num_key_value_heads=2, num_attention_heads=4)
    flags = (*FLAGS, "--ragged-slab-dtype", form)
    small = ("--kv-bytes", kv_bytes, "--schedule-conservativeness", "0.1")
    with servers.serve(model, *flags, "--kv-bytes", "24MiB", log=tmp_path / "plain.log", env=STRICT) as server:
        want = [ask(server, one, NEW) for one in PROMPTS[:3]] * 3
    with servers.serve(model, *flags, *by_model(other), *small, log=tmp_path / "log", env=STRICT) as server:
        assert server_settings(server)["draft_bytes_per_token"] == 4 * 1 * 2 * 64 * 2
        for _ in range(2):
            for have, one in zip(ask_all(server, PROMPTS[:3] * 3, NEW), want, strict=True):
                assert_same(have, one, atol)
        flush(server)
        # Codes leave room for all of them.
        assert ("Retract requests" in server.log_text()) == (form == "wide")
