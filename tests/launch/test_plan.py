"""Ranks that were started with other plans notice it before they serve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.multiprocessing

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.launch.plan import ServingPlan, choose_budgets
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile_choice import Uniform
from sgl_ragged.serve.ranks import require_equal_digests


def plan(*, mean: float = 0.5, more: int = 0, **changed: object) -> ServingPlan:
    geometry = ModelGeometry("toy", "0" * 16, num_layers=1, num_heads=2, q_per_kv=1, head_dim=16)
    settings = dict(ratio=0.5, segment=64, scorer="keydiff", profile="uniform", kernel="torch", source="somewhere")
    statistics = ({"query_mean": np.full((2, 4), mean, dtype=np.float32)},)
    kept = np.array([[16, 32]]) + more
    return ServingPlan(geometry=geometry, ranks=2, kept=kept, statistics=statistics, **(settings | changed))


def test_digests_are_about_what_is_served():
    assert plan().digest == plan(source="elsewhere").digest
    placed = plan_placement(plan().kept, 2, "permute")
    others = (plan(mean=0.6), plan(more=16), plan(scorer="h2o"), plan(segment=128), plan(placement=placed))
    assert len({one.digest for one in (plan(), *others)}) == 6


def test_heads_that_keep_every_token_need_no_budgets():
    geometry = ModelGeometry("toy", "0" * 16, num_layers=3, num_heads=2, q_per_kv=1, head_dim=16)
    chosen = choose_budgets(geometry, profile=Uniform(), scorer="gate", ratio=1, segment=64)
    assert (chosen.kept == 64).all()
    assert chosen.kept.shape == (3, 2)
    assert chosen.source == "every token is kept: heads need no budgets"


def join(rank: int, digests: tuple[str, str], rendezvous: str, results: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        require_equal_digests(digests[rank], 2, None)
        said = "served"
    except RaggedConfigError as error:
        said = str(error)
    with open(f"{results}.{rank}", "w") as file:
        file.write(said)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("equal", [True, False])
def test_ranks_compare_their_digests(tmp_path, equal):
    digests = (plan().digest, plan().digest if equal else plan(more=16).digest)
    arguments = (digests, str(tmp_path / "rendezvous"), str(tmp_path / "result"))
    torch.multiprocessing.start_processes(join, arguments, nprocs=2, start_method="fork")
    said = [(tmp_path / f"result.{rank}").read_text() for rank in range(2)]
    if equal:
        assert said == ["served", "served"]
    else:
        assert said[0] == said[1]
        assert all(digest in said[0] for digest in digests)
