"""--ragged-history on a model with sliding windows: its pages go back once these have left them, too."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.windows.sizes import window_pages
from sgl_ragged.profiles.profile import VALUE_MEAN, profile_kept
from tests.architectures import WINDOW, WINDOWED
from tests.bounded_oracle import BoundedOracle
from tests.models import make_profile
from tests.server.client import flush, generate, generate_all
from tests.server.test_bounded_history import STRICT
from tests.server.test_windows import prompt

pytestmark = [
    pytest.mark.server,
]

SEGMENT, LIMIT, RATIO, INTERVAL = 32, 5, 0.5, 64
HISTORY = SEGMENT * LIMIT
BOUND = HistoryBound(LIMIT, "value_novelty", window_pages(WINDOW, INTERVAL, SEGMENT) - 1)
ENV = STRICT | {"SGLANG_SWA_EVICTION_INTERVAL": str(INTERVAL)}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return WINDOWED["gemma3_text"].make(tmp_path_factory.mktemp("gemma3") / "model")


@pytest.fixture(scope="module")
def profile(gemma3):
    return make_profile(gemma3, gemma3.parent / "profile.safetensors", segment=SEGMENT)


@pytest.fixture(scope="module")
def flags(gemma3, profile):
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4", "--decode-log-interval", "8"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(gemma3.parent / "profile.safetensors"), "--ragged-history", str(HISTORY)),
    ]


@pytest.fixture(scope="module")
def server(gemma3, flags, servers):
    with servers.serve(gemma3, *flags, "--kv-bytes", "32MiB", log=gemma3.parent / "log", env=ENV) as server:
        yield server


def test_server_agrees_with_the_oracle(server, gemma3, profile):
    """In a prompt three times as long as the bound, and as many decoded tokens."""
    kept = profile_kept(profile, RATIO, SEGMENT)
    bound = dict(limit=LIMIT, latest=BOUND.latest, score=BOUND.score, means=profile.statistics[VALUE_MEAN])
    oracle = BoundedOracle(str(gemma3), kept, SEGMENT, "keydiff", **bound)
    start = prompt(0, 3 * HISTORY + 10)
    answer = generate(server, start, HISTORY + 40, logprobs_from=0)
    found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
    np.testing.assert_allclose(found, oracle.logprobs(start + answer.tokens), atol=1e-4)
    assert oracle.seen[-1] != [0, *range(len(oracle.seen) - LIMIT, len(oracle.seen) - 1)]
    oracle.limit = len(oracle.seen)
    assert np.abs(found - oracle.logprobs(start + answer.tokens)).max() > 0.1


def test_a_hit_equals_a_miss(server):
    flush(server)
    asked = prompt(1, HISTORY + 3 * SEGMENT + 5)
    cold = generate(server, asked, 150)
    warm = generate(server, asked, 150)
    assert (cold.cached, warm.cached) == (0, HISTORY)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    longer = asked + cold.tokens + prompt(2, 30)
    second = generate(server, longer, 30)
    assert second.cached == HISTORY
    flush(server)
    np.testing.assert_allclose(second.output_logprobs, generate(server, longer, 30).output_logprobs, atol=1e-4)


def test_memory_stays_as_it_is_from_the_bound_on(server):
    """Tokens of both pools, by the server's own log, while one request generates three times its bound."""
    flush(server)
    before = len(server.log_text())
    generate(server, prompt(3, 40), 3 * HISTORY)
    lines = re.findall(r"Decode batch.*#full token: (\d+).*#swa token: (\d+)", server.log_text()[before:])
    full, windows = ([int(line[which]) for line in lines] for which in (0, 1))
    assert len(lines) > 40
    assert HISTORY < max(full) <= BOUND.held * SEGMENT
    # What lies in the tree is there beside the request's own.
    assert max(windows) <= (BOUND.lag + 1 + 1) * SEGMENT
    later = full[len(full) // 2 :]
    assert max(later) == max(full[: len(full) // 2])
    flush(server)
    assert generate(server, prompt(3, 10), 1).cached == 0


@pytest.mark.thorough
def test_few_pages_and_retraction_change_nothing(gemma3, flags, servers, server):
    """Long prompts and answers in a pool that would not hold them uncut, retracted every few steps."""
    prompts = [prompt(10 + number, 30 + 330 * number) for number in range(3)]
    flush(server)
    alone = [generate(server, tokens, HISTORY + 20) for tokens in prompts]
    tokens = 3 * (BOUND.held + 2) * SEGMENT
    assert sum(len(tokens) + HISTORY + 20 for tokens in prompts) > 1.5 * tokens
    # As few pages for windows as a server starts with.
    few = ("--swa-full-tokens-ratio", "0.34")
    small = [*flags, "--kv-bytes", "32MiB", "--max-total-tokens", str(tokens), *few]
    env = ENV | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "100"}
    with servers.serve(gemma3, *small, log=gemma3.parent / "small.log", env=env) as pressed:
        together = generate_all(pressed, prompts, HISTORY + 20)
        log = pressed.log_text()
    assert " in 12 pages" in log
    assert "Testing retraction" in log
    assert "leak" not in log.lower()
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-4)
