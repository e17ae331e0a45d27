"""Pipeline stages of a plan: together they are the whole, and heads are balanced within each."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sgl_ragged import cli
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.launch.models import pipeline_stages
from sgl_ragged.launch.placing import place_stages
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.profiles.geometry import ModelGeometry
from tests.models import make_llama

LAYERS, HEADS, RANKS, STAGES = 5, 4, 2, ((0, 2), (2, 5))


@pytest.fixture
def plan() -> ServingPlan:
    rng = np.random.default_rng(0)
    return ServingPlan(
        geometry=ModelGeometry("toy", "0" * 16, num_layers=LAYERS, num_heads=HEADS, q_per_kv=2, head_dim=16),
        ranks=RANKS,
        ratio=0.3,
        segment=64,
        scorer="keydiff",
        profile="uniform",
        kernel="torch",
        kept=16 * rng.integers(1, 5, (LAYERS, HEADS)),
        source="somewhere",
        statistics=tuple({"mean": rng.standard_normal((HEADS, 3)).astype(np.float32)} for _ in range(LAYERS)),
        stages=STAGES,
    )


COST = CostModel(hidden=32, head_dim=16, q_per_kv=2, segment=64, weight_itemsize=4, kv_itemsize=4)


@pytest.mark.parametrize("mode", ["none", "permute", "split"])
def test_stages_are_the_whole(plan, mode):
    if mode != "none":
        plan = replace(plan, fairkv=mode, placement=place_stages(plan, mode, COST))
    stages = [plan.stage(number) for number in range(2)]
    assert [stage.geometry.layer_numbers for stage in stages] == [(0, 1), (2, 3, 4)]
    for rank in range(RANKS):
        whole = plan.layout(rank)
        parts = [stage.layout(rank) for stage in stages]
        assert sum(part.slab_elems for part in parts) == whole.slab_elems
        np.testing.assert_array_equal(np.concatenate([part.kept for part in parts]), whole.kept)
        statistics = [layer for stage in stages for layer in stage.rank_statistics(rank)]
        for found, wanted in zip(statistics, plan.rank_statistics(rank), strict=True):
            np.testing.assert_array_equal(found["mean"], wanted["mean"])
    assert [layout.slab_elems for layout in plan.slab_layouts] == [
        stage.layout(rank).slab_elems for stage in stages for rank in range(RANKS)
    ]
    assert plan.stage_slab_bytes(4) == [max(layout.slab_bytes(4) for layout in stage.layouts) for stage in stages]
    assert "2 pipeline stages with 2/3 layers" in plan.describe_stages(4)


def test_without_stages_a_plan_is_its_own(plan):
    plan = replace(plan, stages=())
    assert plan.stage(0) is plan
    assert [layout.slab_elems for layout in plan.slab_layouts] == [layout.slab_elems for layout in plan.layouts]


def test_ranks_with_other_stages_notice(plan):
    digests = {replace(plan, stages=stages).digest for stages in ((), STAGES, ((0, 3), (3, 5)))}
    assert len(digests) == 3


def test_heads_are_balanced_within_each_stage(plan):
    """Balanced over all layers alone, a stage may lean to one side and another to the other."""
    kept = 16 * np.array([[4, 3, 3, 2], [2, 1, 1, 1], [1, 4, 3, 4], [3, 3, 4, 3], [3, 3, 3, 4]])

    def largest(load: np.ndarray) -> list[int]:
        return [int(load[first:end].sum(axis=0).max()) for first, end in STAGES]

    whole = plan_placement(kept, RANKS, "permute", cost=COST)
    placement = place_stages(replace(plan, kept=kept), "permute", COST)
    assert (largest(whole.load), largest(placement.load)) == ([144, 320], [144, 304])


def test_all_stages_have_equally_many_places(plan):
    """A stage of equal heads gains nothing from splitting; the other one does."""
    kept = np.array([[16, 16, 16, 16]] * 2 + [[64, 16, 16, 16]] * 3)
    cheap = replace(COST, hidden=1, segment=4096)
    parts = [plan_placement(kept[first:end], RANKS, "split", cost=cheap).places for first, end in STAGES]
    assert len(set(parts)) == 2
    assert place_stages(replace(plan, kept=kept), "split", cheap).heads.shape[:2] == (LAYERS, RANKS)


def test_layers_are_divided_as_sglang_does(plan, monkeypatch):
    assert pipeline_stages(plan.geometry, 1) == ()
    assert pipeline_stages(plan.geometry, 2) == STAGES
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "4,1")
    assert pipeline_stages(plan.geometry, 2) == ((0, 4), (4, 5))
    for partition in ("4,2", "5", "many,1"):
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", partition)
        with pytest.raises(RaggedConfigError, match="SGLANG_PP_LAYER_PARTITION"):
            pipeline_stages(plan.geometry, 2)
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "5,0")
    with pytest.raises(RaggedConfigError, match="has 5 layers, and each stage needs one"):
        pipeline_stages(plan.geometry, 2)
    monkeypatch.delenv("SGLANG_PP_LAYER_PARTITION")
    with pytest.raises(RaggedConfigError, match="has 5 layers"):
        pipeline_stages(plan.geometry, 6)


def test_layout_divides_a_budget_by_the_largest_stage(tmp_path, monkeypatch, capsys):
    model = make_llama(tmp_path / "model")
    flags = ["sgl-ragged", "layout", "--model", str(model), "--kv-bytes", "64MiB", "--ratio", "0.3", "--json"]
    monkeypatch.setattr("sys.argv", flags)
    cli.main()
    one = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", [*flags, "--pp-size", "2"])
    cli.main()
    two = json.loads(capsys.readouterr().out)
    assert sum(two["stage_slab_bytes"]) == sum(one["stage_slab_bytes"]) == one["slab_bytes"]
    assert two["slab_bytes"] == two["stage_slab_bytes"][0]
    assert max(two["stage_slab_bytes"]) < one["slab_bytes"]
    assert two["max_total_tokens"] > one["max_total_tokens"]
    monkeypatch.setattr("sys.argv", [*flags, "--pp-size", "2", "--history", "1024"])
    with pytest.raises(SystemExit, match="--pp-size is not supported with --ragged-history"):
        cli.main()
