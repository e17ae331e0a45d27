"""The table of what does not go together: each line refuses, and the docs have all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_ragged import cli
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.launch import ADAPTERS, BY_MODEL, RANKS
from sgl_ragged.features.history.launch import HistoryFlags
from sgl_ragged.features.host_tier.launch import CODEC, TierFlags
from sgl_ragged.features.retrieval.launch import RetrievalFlags
from sgl_ragged.features.windows.launch import ONE_POOL
from sgl_ragged.launch import start as start_module
from sgl_ragged.launch.conflicts import (
    CHECKED,
    CODES,
    FITTED,
    FLASHINFER,
    FP8,
    M_ROPE,
    MANY_RANKS,
    MIXED,
    NODES,
    QUALITY,
    SINKS,
    SPLIT,
    STAGES,
    against,
    cases,
    conflicts,
    refuse_conflicts,
)
from sgl_ragged.launch.feature import REFUSED, launch_features
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.start import ModelStart, Start

RETRIEVAL, HISTORY, WINDOWS, DRAFTS, DISAGGREGATION, HOST_TIER = launch_features()

ASKED = {SPLIT: {"fairkv": "split"}, FLASHINFER: {"kernel": "flashinfer"}, QUALITY: {"quality": 0.01}}
OF_FEATURES = {
    HISTORY.case: HistoryFlags(history=1024),
    RETRIEVAL.case: RetrievalFlags(reservoir=1 << 30),
    CODEC: TierFlags(host_codec="shared"),
}
FLAGS = {
    ADAPTERS: {"enable_lora": True},
    DISAGGREGATION.case: {"disaggregation_mode": "prefill"},
    DRAFTS.case: {"speculative_algorithm": "NGRAM"},
    BY_MODEL: {"speculative_algorithm": "STANDALONE"},
    RANKS: {"tp_size": 2},
    HOST_TIER.case: {"enable_hierarchical_cache": True},
    MIXED: {"enable_mixed_chunk": True},
    ONE_POOL: {"disable_hybrid_swa_memory": True},
    MANY_RANKS: {"tp_size": 16},
    NODES: {"nnodes": 2},
    STAGES: {"pp_size": 2},
}
ALSO = {BY_MODEL: {DRAFTS.case}, MANY_RANKS: {RANKS}}
"""What a start that has a case has besides."""


@pytest.fixture(autouse=True)
def _geometry_of_the_model(monkeypatch):
    monkeypatch.setattr(start_module, "model_geometry", lambda model: model.geometry)


def launch(*has: str) -> ModelStart:
    """A start that has these cases and no others."""
    given = {key: value for case in has for key, value in ASKED.get(case, {}).items()}
    flags = {key: value for case in has for key, value in FLAGS.get(case, {}).items()}
    plain = dict(
        speculative_algorithm=None,
        enable_lora=None,
        lora_paths=None,
        enable_hierarchical_cache=False,
        enable_mixed_chunk=False,
        disable_hybrid_swa_memory=False,
        disaggregation_mode="null",
        tp_size=1,
        pp_size=1,
        nnodes=1,
    )
    model = SimpleNamespace(
        geometry=SimpleNamespace(num_heads=8, windowed=WINDOWS.case in has or None),
        has_attention_sinks=SINKS in has,
        hf_text_config=SimpleNamespace(rope_parameters={"mrope_section": [2, 3, 3]} if M_ROPE in has else {}),
    )
    dtype = torch.float8_e4m3fn if FP8 in has else torch.bfloat16
    of_features = tuple(OF_FEATURES[case] for case in has if case in OF_FEATURES)
    options = RaggedOptions(kv_pool="ragged", of_features=of_features, **given)
    server_args = SimpleNamespace(**plain | flags)
    return ModelStart(options, server_args, server_args, model, dtype)


def seen(start: ModelStart) -> set[str]:
    of_flags, of_model = cases()
    return {name for name, applies in (of_flags | of_model).items() if applies(start)}


@pytest.mark.parametrize("case", cases()[0] | cases()[1])
def test_cases_are_seen_and_alone_they_are_served(case):
    assert seen(launch(case)) == {case} | ALSO.get(case, set())
    refuse_conflicts(launch(case))


@pytest.mark.parametrize(
    "found", [one for one in conflicts() if one.effect == REFUSED], ids=lambda it: f"{it.one}-{it.other}"
)
def test_both_together_are_refused_in_one_line(found):
    with pytest.raises(RaggedConfigError) as refused:
        refuse_conflicts(launch(found.one, found.other))
    assert str(refused.value) == f"{found.one} is not supported with {found.other}: {found.why}; {found.advice}"


@pytest.mark.parametrize(
    "found", [one for one in conflicts() if one.effect != REFUSED], ids=lambda it: f"{it.one}-{it.other}"
)
def test_what_a_server_does_by_itself_is_left_out_with_a_reason(found):
    assert against(found.one, launch(found.other)) == found
    refuse_conflicts(launch(found.other))


def test_nothing_speaks_against_a_plain_start():
    assert against(CODES, launch()) is None
    assert against(FITTED, launch()) is None
    refuse_conflicts(launch())
    flags = launch()
    refuse_conflicts(Start(flags.options, flags.server_args))


def test_conflicts_name_cases_that_exist():
    known = {*cases()[0], *cases()[1], CODES, FITTED, CHECKED}
    assert {name for one in conflicts() for name in (one.one, one.other)} <= known


def test_no_pair_stands_twice():
    pairs = [frozenset((one.one, one.other)) for one in conflicts()]
    assert len(set(pairs)) == len(pairs)


def test_the_docs_have_the_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "conflicts"])
    cli.main()
    assert capsys.readouterr().out in (Path(__file__).parents[2] / "docs" / "conflicts.md").read_text()
