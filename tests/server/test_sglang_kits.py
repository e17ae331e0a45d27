"""SGLang's own test kits, unchanged, on tiny servers: cached tokens, log-probabilities with drafts, aborts, a pause,
and Anthropic's API. `make kits` runs these on SGLang's pool, too, and `test_more_kits.py`."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.spec_server_kits import SpecLogprobKit, SpecPenaltyKit, SpecSamplingMaskKit
from sglang.test.server_fixtures import spec_eagle_fixture

from benchmarks.harness.launch import Server
from tests.character_model import make_character_model
from tests.server.kit_server import conversations, pool_flags, use_server

pytestmark = pytest.mark.server

VOCABULARY = 2048
"""The kits send token ids up to 1,999."""

NGRAM = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", "8"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_character_model(tmp_path_factory.mktemp("kits") / "model", vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def plain_server(request, servers, model) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-running-requests", "16", *pool_flags(request, "32MiB"))
    with servers.serve(model, *flags, log=model.parent / "plain.log") as server:
        yield server


@pytest.fixture(scope="module")
def drafting_server(request, servers, model) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-running-requests", "16", *pool_flags(request, "32MiB"), *NGRAM)
    with servers.serve(model, *flags, log=model.parent / "drafting.log") as server:
        yield server


@pytest.fixture(scope="class")
def plain(request, plain_server, model) -> None:
    use_server(request.cls, plain_server, model)


@pytest.fixture(scope="class")
def drafting(request, drafting_server, model) -> None:
    use_server(request.cls, drafting_server, model)


def test_cache_hit(plain_server, model):
    """Every client finds all tokens of its earlier turns but the last, rounded down to whole pages."""
    turns = dict(num_clients=4, num_rounds=3, request_length=200, output_length=16)
    found = run_multiturn_cache_hit_test(
        plain_server.url, str(model), dataset_path=str(conversations(model.parent)), **turns
    )
    assert found["overall"]["total_cached_tokens"] > 0


@pytest.mark.usefixtures("plain")
class TestAbortAll(AbortAllMixin, unittest.TestCase):
    abort_all_num_requests = 16
    abort_all_max_new_tokens = 6000
    abort_all_sleep = 1


@pytest.mark.usefixtures("plain")
class TestPause(PauseResumeInPlaceMixin, unittest.TestCase):
    pause_num_requests = 8
    pause_max_new_tokens = 1000
    pause_duration = 2
    pause_ignore_eos = True


@pytest.mark.usefixtures("plain")
class TestAnthropicMessages(AnthropicMessagesMixin, unittest.TestCase):
    pass


@pytest.mark.usefixtures("plain")
class TestSamplingMask(SpecSamplingMaskKit, unittest.TestCase):
    """SGLang has masks without drafts and with DFLASH, not with n-grams."""


class Drafted(spec_eagle_fixture.SpecEagleServerBase):
    """The fixture's requests, without its server."""

    __test__ = False

    @classmethod
    def setUpClass(cls) -> None:
        pass

    @classmethod
    def tearDownClass(cls) -> None:
        pass


@pytest.mark.usefixtures("drafting")
class TestLogprobs(SpecLogprobKit, Drafted):
    __test__ = True
    logprob_match_delta = 1e-3


@pytest.mark.usefixtures("drafting")
class TestPenalties(SpecPenaltyKit, Drafted):
    __test__ = True
