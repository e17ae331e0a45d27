"""Ranks that were started with other budgets notice it before they serve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.multiprocessing

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.served_budgets import ServedBudgets, require_equal_digests


def budgets(**changed: float) -> ServedBudgets:
    mean = np.full((2, 4), changed.get("mean", 0.5), dtype=np.float32)
    kept = np.array([[16, 32]]) + int(changed.get("more", 0))
    return ServedBudgets(kept=kept, source=f"{changed}", statistics=({"query_mean": mean},))


def test_digests_are_about_what_is_served():
    assert budgets().digest == ServedBudgets(budgets().kept, "elsewhere", budgets().statistics).digest
    assert len({budgets().digest, budgets(mean=0.6).digest, budgets(more=16).digest}) == 3


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
    digests = (budgets().digest, budgets().digest if equal else budgets(more=16).digest)
    arguments = (digests, str(tmp_path / "rendezvous"), str(tmp_path / "result"))
    torch.multiprocessing.start_processes(join, arguments, nprocs=2, start_method="fork")
    said = [(tmp_path / f"result.{rank}").read_text() for rank in range(2)]
    if equal:
        assert said == ["served", "served"]
    else:
        assert said[0] == said[1]
        assert all(digest in said[0] for digest in digests)
