"""Drafts by heads that read the served model's hidden states, EAGLE and EAGLE-3: answers, what is cached and what is
free are as without them, and as many drafts are right as a head in torch says.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.draft_head import make_head
from benchmarks.storm.features import RETRACTING
from tests.draft_heads import drafted_per_step, make_followed, make_follower, make_mtp
from tests.server.client import flush, found_of, server_settings
from tests.server.test_bounded_history import STRICT
from tests.server.test_draft_models import FLAGS, SEGMENT, prompt
from tests.server.test_drafts import ask, ask_all, assert_same

pytestmark = pytest.mark.server

NEW, WIDTH = 40, 5
KINDS = ("eagle", "eagle3")
TOKEN_BYTES = 4 * 1 * 4 * 64 * 2
"""Of a head in float32: 1 layer of 4 heads of dimension 64, keys and values."""

PROMPTS = [prompt(seed, n) for seed, n in enumerate((1, SEGMENT + 1, 3 * SEGMENT - 1, 301))]


def by_head(kind: str, folder: object) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", kind.upper(), "--speculative-draft-model-path", str(folder)),
        *("--speculative-eagle-topk", "1", "--speculative-num-steps", str(WIDTH - 1)),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_followed(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def plain(model, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with servers.serve(model, *FLAGS, "--kv-bytes", "24MiB", log=log, env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(plain):
    return [ask(plain, one, NEW) for one in PROMPTS]


@pytest.fixture(scope="module", params=[pytest.param("eagle", marks=pytest.mark.thorough), "eagle3"])
def head(request, model, tmp_path_factory):
    return request.param, make_follower(model, tmp_path_factory.mktemp("heads") / request.param, request.param)


@pytest.fixture(scope="module")
def drafting(head, model, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("drafting") / "server.log"
    with servers.serve(model, *FLAGS, *by_head(*head), "--kv-bytes", "32MiB", log=log, env=STRICT) as server:
        settings = server_settings(server)
        assert (settings["draft_tokens"], settings["draft_bytes_per_token"]) == (WIDTH, TOKEN_BYTES)
        yield server


def test_answers_are_those_without_drafts(drafting, wanted):
    """From nothing, from the cache, and all at once; drafts from the cache are as good."""
    flush(drafting)
    cold = [ask(drafting, one, NEW) for one in PROMPTS]
    again = [ask(drafting, one, NEW) for one in PROMPTS]
    for found in (cold, again, ask_all(drafting, PROMPTS, NEW)):
        for have, want in zip(found, wanted, strict=True):
            assert_same(have, want)
    assert [one.cached for one in cold] == [0] * len(PROMPTS)
    assert [one.cached for one in again] == [0, SEGMENT, 3 * SEGMENT - 2, 300]
    rates = [float(np.mean([one.per_step for one in found])) for found in (cold, again)]
    assert rates[0] > 1.3
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_as_much_is_cached_and_a_hit_equals_a_miss(plain, drafting):
    """A turn that goes on behind an answer finds it to its last token, in the tree, which is by single tokens, and in
    open segments; so does one that leaves another's tokens there."""
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
        left = first[:SEGMENT] + prompt(8, 30)
        assert_same(ask(drafting, left, 20), ask(plain, left, 20))
        flush(drafting)
        miss = ask(drafting, turn, 20)
        assert miss.cached == 0
        for found in (hit, miss):
            assert_same(found, want)


def test_copies_of_open_segments_have_what_the_head_knows(drafting):
    """Who goes on with a copy has as many drafts accepted as who has computed it, and so has who copies the copy."""
    for seed in range(3):
        first = prompt(seed, SEGMENT - 24)
        flush(drafting)
        cold, *hits = [ask(drafting, first, 20) for _ in range(3)]
        assert [one.cached for one in hits] == [len(first) - 1] * 2
        assert [one.per_step for one in hits] == [cold.per_step] * 2


def test_drafts_are_those_of_a_head_in_torch(model, head, drafting):
    """Within a segment, where nothing is compressed: as many are right, from the model's hidden states in torch."""
    flush(drafting)
    found = [ask(drafting, prompt(seed, 22), NEW) for seed in range(20, 24)]
    said = [
        drafted_per_step(model, head[1], head[0], prompt(seed, 22), one.tokens, WIDTH, SEGMENT)
        for seed, one in zip(range(20, 24), found, strict=True)
    ]
    assert min(said) > 1.2
    # SGLang counts the tokens behind the prompt's step, and those behind an answer's end.
    np.testing.assert_allclose([one.per_step for one in found], said, rtol=0.08)


@pytest.mark.thorough
def test_a_layer_of_the_checkpoint_drafts(servers, tmp_path):
    """MTP: no other folder is needed."""
    own = make_mtp(tmp_path / "own")
    drafts = ("--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1", "--speculative-num-steps", "4")
    with servers.serve(own, *FLAGS, "--kv-bytes", "24MiB", log=tmp_path / "plain.log", env=STRICT) as server:
        want = [ask(server, one, NEW) for one in PROMPTS]
    with servers.serve(own, *FLAGS, *drafts, "--kv-bytes", "32MiB", log=tmp_path / "log", env=STRICT) as server:
        assert server_settings(server)["draft_bytes_per_token"] == 4 * 1 * 4 * 32 * 2
        cold, hits = ([ask(server, one, NEW) for one in PROMPTS] for _ in range(2))
    for found in (cold, hits):
        for have, one in zip(found, want, strict=True):
            assert_same(have, one)
    assert [one.cached for one in hits] == [0, SEGMENT, 3 * SEGMENT - 2, 300]
    rates = [float(np.mean([one.per_step for one in found])) for found in (cold, hits)]
    assert rates[0] > 1.3
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("form", "kv_bytes", "atol"), [("wide", "6MiB", 1e-4), ("int8", "4MiB", 1e-3)])
def test_random_heads_where_room_is_scarce(model, servers, tmp_path, kind, form, kv_bytes, atol):
    """Drafts that are wrong, twice: retracted, or with slabs in codes; EAGLE-3 with a part of the vocabulary."""
    more = {"draft_vocab": 100} if kind == "eagle3" else {}
    make_head(model, tmp_path / "head", kind=kind, **more)
    flags, by = (*FLAGS, "--ragged-slab-dtype", form), by_head(kind, tmp_path / "head")
    small = ("--kv-bytes", kv_bytes, "--schedule-conservativeness", "0.1")
    prompts = [*PROMPTS, prompt(9, 65)]
    with servers.serve(model, *flags, "--kv-bytes", "24MiB", log=tmp_path / "plain.log", env=STRICT) as server:
        want = [ask(server, one, NEW) for one in prompts] * 2
    env = STRICT | RETRACTING if form == "wide" else STRICT
    with servers.serve(model, *flags, *by, *small, log=tmp_path / "log", env=env) as server:
        for _ in range(2):
            for have, one in zip(ask_all(server, prompts * 2, NEW), want, strict=True):
                assert_same(have, one, atol)
        flush(server)
        assert ("Testing retraction" in server.log_text()) == (form == "wide")
