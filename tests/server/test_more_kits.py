"""SGLang's own test kits, unchanged, that take minutes (`make kits`): a crowd on one radix tree, drafts by n-grams, a
real model with a calibrated profile, of which hits are compared with misses, and prefill and decode apart."""

from __future__ import annotations

import json
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang.test import kl_test_utils
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin
from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
from sglang.test.kits.spec_server_kits import SpecCorrectnessKit, SpecFeatureKit, SpecGrammarKit, SpecHiddenStatesKit
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang.test.server_fixtures import disaggregation_fixture
from transformers import AutoTokenizer

from benchmarks.harness.launch import Server, free_port
from benchmarks.real_model import ROOT, ensure
from tests.character_model import make_character_model
from tests.server.kit_server import pool_flags, use_server
from tests.server.test_sglang_kits import NGRAM, Drafted

pytestmark = [pytest.mark.server, pytest.mark.kit]

VOCABULARY = 32_000
"""`radix_cache_server` sends token ids up to 31,999."""

CLOSE = 1e-5
"""KL of a hit to a miss, in float32; the kits ask for 3e-3 in 16 bits."""

CALIBRATED = ROOT / "benchmarks/quality/smollm2-135m.safetensors"

PIECES, PIECE_TOKENS = 4, 700
"""Prompts in the place of LongBench's, which the kits would download."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_character_model(tmp_path_factory.mktemp("kits") / "model", vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def plain_server(request, servers, model) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-running-requests", "64", *pool_flags(request, "128MiB"))
    with servers.serve(model, *flags, log=model.parent / "plain.log") as server:
        yield server


@pytest.fixture(scope="module")
def drafting_server(request, servers, model) -> Iterator[Server]:
    more = ("--enable-return-hidden-states", "--constrained-json-disable-any-whitespace")
    flags = ("--dtype", "float32", "--max-running-requests", "64", *pool_flags(request, "128MiB"), *NGRAM, *more)
    with servers.serve(model, *flags, log=model.parent / "drafting.log") as server:
        yield server


@pytest.fixture(scope="class")
def drafting(request, drafting_server, model) -> None:
    use_server(request.cls, drafting_server, model)


def test_radix_cache_server(plain_server):
    run_radix_attention_test(plain_server.url)
    assert plain_server.process.is_running()


@pytest.mark.usefixtures("drafting")
class TestDraftedAnswers(SpecCorrectnessKit, Drafted):
    __test__ = True
    acc_length_thres = batch_accept_len_thres = 1.0


@pytest.mark.usefixtures("drafting")
class TestDraftedFeatures(SpecFeatureKit, Drafted):
    __test__ = True


@pytest.mark.usefixtures("drafting")
class TestDraftedGrammar(SpecGrammarKit, Drafted):
    __test__ = True
    grammar_json_schema = json.dumps(
        {
            "type": "object",
            "required": ["name", "population", "country", "capital"],
            "properties": {name: {"enum": ["x"]} for name in ("name", "population", "country", "capital")},
        }
    )


@pytest.mark.usefixtures("drafting")
class TestDraftedHiddenStates(SpecHiddenStatesKit, Drafted):
    __test__ = True


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return ensure(ROOT / "models/smollm2-135m")


@pytest.fixture(scope="module")
def calibrated_server(request, servers, smollm2, tmp_path_factory) -> Iterator[Server]:
    """A server in float32; with our pool, budgets, scorer, formats and fit are those of a calibrated profile."""
    pool = pool_flags(request, "768MiB")
    ours = ("--ragged-profile", str(CALIBRATED), "--ragged-slab-dtype", "auto") if "ragged" in pool else ()
    log = tmp_path_factory.mktemp("calibrated") / "log"
    with servers.serve(smollm2, "--dtype", "float32", *pool, *ours, log=log) as server:
        yield server


@pytest.fixture(scope="class")
def calibrated(request, calibrated_server, smollm2, tmp_path_factory) -> None:
    use_server(request.cls, calibrated_server, smollm2)
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    tokens = AutoTokenizer.from_pretrained(smollm2).encode(pages)
    request.cls.input_ids = [tokens[start : start + PIECE_TOKENS] for start in range(0, PIECES * 2000, 2000)]
    folder = tmp_path_factory.mktemp("longbench")
    name = str(smollm2).replace("/", "_")
    kind = f"{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
    (folder / f"input_ids_{name}_{kind}.json").write_text(json.dumps(request.cls.input_ids))
    kl_test_utils.CACHE_DIR = str(folder)


@pytest.mark.usefixtures("calibrated")
class TestHitsAgainstMisses(KLDivergenceMixin, unittest.TestCase):
    kl_div_thres = CLOSE
    kl_div_max_samples = PIECES
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 32


@pytest.mark.usefixtures("calibrated")
class TestTurnsAndBranches(UnifiedRadixTreeTestMixin, unittest.TestCase):
    kl_threshold = CLOSE
    max_new_tokens = 32
    num_groups = branches_per_group = 2
    test_gsm8k = None
    """A model of this size solves none."""


@pytest.fixture(scope="class")
def apart(request, model) -> None:
    """Flags, ports and environment of the three servers and the router that the kit starts."""
    pool = pool_flags(request, "32MiB")
    if "token" in pool and not torch.cuda.is_available():
        pytest.skip("SGLang registers its pool with nixl as GPU memory, so it starts on GPUs alone")
    ours = ("--ragged-profile", "uniform", "--ragged-slab-dtype", "wide") if "ragged" in pool else ()
    flags = ["--dtype", "float32", "--skip-server-warmup", *pool, *ours]
    kit = request.cls
    kit.model = str(model)
    kit.baseline_args = kit.extra_prefill_args = kit.extra_decode_args = flags
    with pytest.MonkeyPatch.context() as patch:
        # The kit starts `python3`.
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


@pytest.mark.usefixtures("apart")
class TestApart(PDLogprobParityMixin, disaggregation_fixture.PDDisaggregationServerBase):
    parity_prompts = [[5 + i % 90 for i in range(length)] for length in (40, 256, 700)]  # noqa: RUF012
    parity_cached_prefix_min_prompt_tokens = 300
    parity_logprob_delta = 1e-4
    decode_base_gpu_id = 0

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        disaggregation_fixture.configure_nixl_pd_backend(cls)
        names = ("lb", "prefill", "decode", "bootstrap", "prefill_nccl", "decode_nccl")
        for name in names:
            setattr(cls, f"{name}_port", str(free_port()))
        for name in names[:3]:
            setattr(cls, f"{name}_url", f"http://127.0.0.1:{getattr(cls, f'{name}_port')}")
        cls.base_url = cls.lb_url
