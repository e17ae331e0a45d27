"""--ragged-fairkv in the launcher: what is settled, what is refused, and what ranks are given."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.planner import describe_placement
from sgl_ragged.launch import placing
from sgl_ragged.launch.plan import ATTRIBUTE, ServingPlan
from sgl_ragged.profiles.geometry import ModelGeometry
from tests.launch.test_plugin import refusal, resolved
from tests.models import make_llama, make_profile, make_qwen3

GEOMETRY = ModelGeometry("toy", "0" * 16, num_layers=1, num_heads=2, q_per_kv=1, head_dim=16)
RAGGED = ("--kv-pool", "ragged", "--ragged-segment", "128", "--ragged-ratio", "0.3", "--ragged-profile", "uniform")


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """A core for each rank of any of these starts: none of them starts a worker."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(8))))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("qwen3"), q_per_kv=4)


@pytest.fixture(scope="module")
def profile(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    make_profile(llama, path, segment=128)
    return path


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the launcher warns of; SGLang takes other handlers off the log."""
    said: list[str] = []
    monkeypatch.setattr(placing.logger, "warning", lambda text, *values: said.append(text % values))
    return said


def settled(model, *flags: str) -> ServingPlan:
    return getattr(resolved(model, *RAGGED, *flags), ATTRIBUTE).plan


def test_default_is_permute_where_ranks_divide_the_heads(llama, qwen3, warnings):
    assert settled(llama).fairkv == "none"
    assert settled(llama).placement is None
    assert settled(llama, "--tp", "2").fairkv == "permute"
    assert settled(llama, "--tp", "2", "--ragged-fairkv", "none").placement is None
    assert not warnings
    assert settled(qwen3, "--tp", "4").placement is None
    assert "2 KV heads cannot be divided among 4 ranks" in warnings[0]


def test_ranks_get_the_heads_of_the_placement(llama, profile):
    plan = settled(llama, "--tp", "2", "--ragged-profile", str(profile))
    for layer in range(3):
        heads = [plan.heads(rank)[layer] for rank in range(2)]
        assert sorted(np.concatenate(heads)) == [0, 1, 2, 3]
        for rank in range(2):
            layout = plan.layout(rank)
            np.testing.assert_array_equal(layout.kept[layer], plan.kept[layer, heads[rank]])
    line = describe_placement(plan.placement, plan.kept)
    assert line.startswith("heads placed on 2 ranks (permute): busy 0.")


def test_split_gives_every_rank_more_heads(llama, profile):
    """Workers build the model with a head for each place; budgets remain those of the checkpoint's heads."""
    from sglang.srt.arg_groups.overrides import model_config_of

    given = ("--json-model-override-args", '{"rms_norm_eps": 1e-4}')
    args = resolved(llama, *RAGGED, "--tp", "4", "--ragged-profile", str(profile), "--ragged-fairkv", "split", *given)
    plan, config = getattr(args, ATTRIBUTE).plan, model_config_of(args)
    assert (plan.geometry.num_heads, plan.geometry.q_per_kv) == (4, 2)
    assert (config.get_total_num_kv_heads(), config.get_total_num_attention_heads(), config.head_dim) == (8, 16, 64)
    assert config.hf_text_config.rms_norm_eps == 1e-4
    assert sum(layout.kept.sum() for layout in plan.layouts) == plan.kept.sum()
    assert [layout.full_heads for layout in plan.layouts] == [1] * 4


def test_split_needs_a_config_that_takes_heads(llama):
    plan = settled(llama, "--tp", "2", "--ragged-fairkv", "split")
    with pytest.raises(RaggedConfigError, match="does not take other numbers of heads"):
        placing.require_places(plan, dataclasses.replace(plan.geometry, num_heads=8))


def test_more_ranks_than_heads_repeat_them(qwen3):
    plan = settled(qwen3, "--tp", "4")
    found = [plan.heads(rank).tolist() for rank in range(4)]
    assert found == [[[0], [0]], [[0], [0]], [[1], [1]], [[1], [1]]]


def test_statistics_and_gates_follow_the_heads(llama, profile, tmp_path):
    """Gates of hidden states too: each rank computes those of its own places."""
    from sgl_ragged.scorers.fastkvzip import FastKVzip

    shapes = dict(q_proj=(2, 4, 256), q_bias=(2, 4), k_proj=(4, 256), q_norm=(4,), k_norm=(4,), sink_keys=(3, 4))
    torch.manual_seed(0)
    gates = {name: torch.randn(3, 4, *shape) for name, shape in (shapes | dict(bias=(2,))).items()}
    save_file(gates, tmp_path / "gates.safetensors")
    make_profile(llama, tmp_path / "p.safetensors", scorer="fastkvzip", segment=128)
    weights = ("--ragged-scorer", "fastkvzip", "--ragged-scorer-weights", str(tmp_path / "gates.safetensors"))
    plan = settled(llama, "--tp", "2", "--ragged-profile", str(tmp_path / "p.safetensors"), *weights)
    hidden, scorer = torch.randn(5, 256), FastKVzip()
    for rank in range(2):
        statistics = [
            {name: torch.from_numpy(array) for name, array in tensors.items()} for tensors in plan.rank_statistics(rank)
        ]
        for layer, heads in enumerate(plan.placement.heads[:, rank]):
            whole = scorer.token_scores(hidden, {name: tensor[layer] for name, tensor in gates.items()})
            found = scorer.token_scores(hidden, statistics[layer])
            torch.testing.assert_close(found, whole[:, torch.from_numpy(heads.copy())])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "1", "--ragged-fairkv", "permute"), "there is one rank; use --tp"),
        (("--tp", "3"), "--tp 3 does not divide 4 KV heads"),
        (("--tp", "2", "--ragged-fairkv", "permute", "--load-format", "dummy"), "dummy bypasses the default loader"),
        (("--tp", "2", "--ragged-fairkv", "permute", "--quantization", "fp8"), "the weights are quantised (fp8)"),
        (("--tp", "2", "--ragged-fairkv", "permute", "--enable-lora", "--max-lora-rank", "8"), "LoRA"),
        (("--tp", "8", "--ragged-fairkv", "permute"), "4 KV heads cannot be divided among 8 ranks"),
        (("--tp", "8", "--ragged-scorer", "h2o"), "use at most 4 ranks"),
        (("--tp", "2", "--ragged-fairkv", "split", "--load-format", "dummy"), "dummy bypasses the default loader"),
    ],
)
def test_what_cannot_be_honoured_is_refused(llama, flags, words):
    assert words in refusal(llama, *RAGGED, *flags)


def test_fused_checkpoints_are_seen_before_anything_starts(llama, tmp_path, warnings):
    """By the names in the checkpoint's index: permute is refused, the default steps back with the reason."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((llama / name).read_text())
    tensors = {f"model.layers.{layer}.self_attn.qkv_proj.weight": torch.zeros(2) for layer in range(3)}
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    asked = ("--tp", "2", "--ragged-fairkv", "permute")
    assert "queries, keys and values in one tensor" in refusal(tmp_path, *RAGGED, *asked)
    assert settled(tmp_path, "--tp", "2").fairkv == "none"
    assert "queries, keys and values in one tensor" in warnings[0]
    index = {"weight_map": dict.fromkeys(load_file(llama / "model.safetensors"), "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert settled(tmp_path, *asked).fairkv == "permute"


def test_calibration_keeps_the_model_order(llama):
    from sglang.srt.entrypoints.engine import Engine

    from sgl_ragged import register

    register.extend_engine()
    common = dict(
        model_path=str(llama),
        device="cpu",
        tp_size=2,
        kv_pool="ragged",
        ragged_observer=object(),
        ragged_profile="uniform",
    )
    args = Engine.server_args_class(**common)
    args.resolve_once()
    assert getattr(args, ATTRIBUTE).plan.fairkv == "none"
    args = Engine.server_args_class(**common, ragged_fairkv="permute")
    with pytest.raises(RaggedConfigError, match="the calibrator records heads in the model's order"):
        args.resolve_once()
