"""Open segments on a real server: what a finished request, or a prompt, leaves of them is found to its last token.

SGLang's own strict checks run after every batch: no page is lost, and none is in two places.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recall import MODEL, task
from sgl_ragged.mem_pool.open_cache import LEAST_TOKENS
from sgl_ragged.mem_pool.open_pages import OpenPages
from tests.models import make_profile
from tests.server.client import ask, flush, found_of, generate, generate_all, server_settings
from tests.server.test_bounded_history import STRICT

pytestmark = pytest.mark.server

SEGMENT, RATIO, NEW = 64, 0.3, 40


def document(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), max(length, 64), "chat").tolist()[:length]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open")
    make_profile(MODEL, folder / "profile.safetensors", segment=SEGMENT)
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8"),
        *("--chunked-prefill-size", "256"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors")),
    ]


@pytest.fixture(scope="module")
def server(flags, tmp_path_factory, servers):
    log = tmp_path_factory.mktemp("log") / "server.log"
    with servers.serve(MODEL, *flags, "--kv-bytes", "24MiB", log=log, env=STRICT) as server:
        assert server_settings(server)["open_page_tokens"] < SEGMENT / 3
        yield server


@pytest.mark.parametrize("salts", [("", ""), ("", None), (None, ""), ("a", "a")])
def test_an_empty_salt_is_none(server, salts):
    """Prompts are found to their last token where their salts are equal; an empty one is none, as in SGLang."""
    flush(server)
    first, second = ({} if salt is None else {"cache_salt": salt} for salt in salts)
    prompt = {"input_ids": document(9, 4 * SEGMENT + 40)}
    assert ask(server, prompt | first, 1).cached == 0
    assert ask(server, prompt | {"cache_salt": "other"}, 1).cached == 0
    assert ask(server, prompt | second, 1).cached == 4 * SEGMENT + 39


def test_hits_that_sglang_calls_off(flags, servers, tmp_path):
    """With SGLANG_RADIX_FORCE_MISS=1 equal prompts are computed each time, and no page is lost."""
    env, prompt = STRICT | {"SGLANG_RADIX_FORCE_MISS": "1"}, document(9, 4 * SEGMENT + 40)
    with servers.serve(MODEL, *flags, "--kv-bytes", "24MiB", log=tmp_path / "log", env=env) as server:
        first, *others = (generate(server, prompt, NEW) for _ in range(3))
        flush(server)
    for other in others:
        assert (other.cached, other.tokens) == (0, first.tokens)
        np.testing.assert_allclose(other.output_logprobs, first.output_logprobs, atol=1e-4)


def test_a_pool_holds_what_arithmetic_says(server):
    """Conversations of random lengths, until only what is reserved for one request is left: all are found again, to
    their last token, and what they hold is within 5 % of the ideal, kept bytes of sealed tokens and pages of open
    ones."""
    flush(server)
    said = server_settings(server)
    pages = OpenPages(SEGMENT, said["open_page_tokens"])
    room = said["slots"] - 1 - pages.transient - 2
    rng = np.random.default_rng(5)
    held: list[list[int]] = []
    while True:
        prompt = rng.integers(3, 300, int(rng.integers(2 * SEGMENT, 8 * SEGMENT))).tolist()
        if sum(pages.pages(len(one)) for one in [*held, prompt]) > room:
            break
        held.append(prompt)
    for prompt in held:
        assert generate(server, prompt, 1).cached == 0
    for prompt in held:
        assert generate(server, prompt, 1).cached == found_of(len(prompt) - 1, SEGMENT)
    open_bytes = pages.tokens * said["slab_bytes"] / said["kept_bytes_ratio"] / SEGMENT
    ideal = sum(
        len(one) // SEGMENT * said["slab_bytes"] + -(-(len(one) % SEGMENT) // pages.tokens) * open_bytes for one in held
    )
    used = sum(pages.pages(len(one)) for one in held)
    assert ideal > 0.95 * used * said["slab_bytes"]
    assert used > 0.9 * said["slots"]


def alone(server, prompt):
    flush(server)
    answer = generate(server, prompt, NEW)
    assert answer.cached == 0
    return answer


def assert_same(found, wanted):
    assert found.tokens == wanted.tokens
    np.testing.assert_allclose(found.output_logprobs, wanted.output_logprobs, atol=1e-4)


@pytest.mark.parametrize("length", [SEGMENT + LEAST_TOKENS + 1, 5 * SEGMENT - 1, 4 * SEGMENT + 30])
def test_a_turn_goes_on_behind_the_last_token(server, length):
    prompt = document(1, length)
    flush(server)
    first = generate(server, prompt, NEW)
    turn = prompt + first.tokens + document(2, 21)
    found = generate(server, turn, NEW)
    # The last answered token has no keys yet when the request ends.
    assert found.cached == found_of(length + NEW - 1, SEGMENT)
    assert_same(found, alone(server, turn))


def test_two_go_on_at_once_from_one_open_segment(server):
    prompt = document(3, 3 * SEGMENT + 40)
    turns = [prompt + document(seed, 25 + seed) for seed in (4, 5, 6)]
    wanted = [alone(server, turn) for turn in turns]
    flush(server)
    generate(server, prompt, 2)
    for found, want in zip(generate_all(server, turns, NEW), wanted, strict=True):
        assert found.cached == len(prompt)
        assert_same(found, want)


def test_a_shared_prompt_is_found_to_its_last_token(server):
    """Its answer has sealed the segment in which it ends."""
    system = document(7, 2 * SEGMENT + 35)
    others = [system + document(seed, 70) for seed in (8, 9)]
    wanted = [alone(server, other) for other in others]
    flush(server)
    generate(server, system, SEGMENT)
    for other, want in zip(others, wanted, strict=True):
        found = generate(server, other, NEW)
        assert found.cached == len(system)
        assert_same(found, want)


def test_what_two_prompts_share_within_a_segment(server):
    """Of an open segment any beginning is of use."""
    base = document(10, 2 * SEGMENT + 50)
    other = base[: 2 * SEGMENT + 33] + document(11, 90)
    want = alone(server, other)
    flush(server)
    generate(server, base, 2)
    found = generate(server, other, NEW)
    shared = next(i for i, (a, b) in enumerate(zip(base, other, strict=False)) if a != b)
    assert found.cached == shared >= 2 * SEGMENT + 33
    assert_same(found, want)


def test_open_segments_go_before_anything_of_the_tree(server):
    """A crowd that does not fit: everybody is answered as alone, and what is cached behind borders makes room."""
    prompts = [document(20 + seed, 300 + 13 * seed) for seed in range(12)]
    wanted = [alone(server, prompt) for prompt in prompts[:4]]
    flush(server)
    for _ in range(2):
        found = generate_all(server, prompts, NEW)
        for have, want in zip(found, wanted, strict=False):
            assert_same(have, want)
    assert max(answer.cached for answer in found) >= 256
