"""Tensor-parallel servers on the CPU (gloo), heads in every placement, against the dense-mask oracle in one process."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.harness.server_pool import ServerPool
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.profiles.budgets import profile_kept, uniform_kept
from tests.models import SIZES, make_llama, make_profile, make_qwen3
from tests.oracle import Oracle
from tests.server.client import flush, found_of, generate

pytestmark = pytest.mark.server

SEGMENT, RATIO, KV_BYTES, REQUESTS = 128, 0.3, 16 * 2**20, 4
# The first heads of most layers need most: in the checkpoint's order, rank 0 would hold nearly everything.
MU = {
    "llama": np.array([[0.9, 0.7, 0.05, 0.1], [0.8, 0.3, 0.1, 0.05], [0.1, 0.9, 0.6, 0.05]]),
    "qwen3": np.array([[0.9, 0.1], [0.2, 0.6]]),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on disk, its profile, and what each head keeps at RATIO."""

    path: Path
    profile: Path
    kept: np.ndarray
    head_dim: int
    q_per_kv: int

    def placement(self, kept: np.ndarray, tp: int, mode: str) -> Placement:
        """The plan that the server must follow, from its description alone."""
        cost = CostModel(SIZES["hidden_size"], self.head_dim, self.q_per_kv, SEGMENT, weight_itemsize=4, kv_itemsize=4)
        return plan_placement(kept, tp, mode, cost=cost)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Model]:
    made = {}
    for name, make, per_kv in (("llama", make_llama, 2), ("qwen3", functools.partial(make_qwen3, q_per_kv=4), 4)):
        folder = tmp_path_factory.mktemp(name)
        # Smaller weights than other tests': rounding, which the order of ranks' sums changes, shows less in logprobs.
        path, file = make(folder / "model", initializer_range=0.1), folder / "profile.safetensors"
        profile = make_profile(path, file, segment=SEGMENT, mu=MU[name])
        made[name] = Model(path, file, profile_kept(profile, RATIO, SEGMENT), profile.head_dim, per_kv)
        assert made[name].kept.max() >= 4 * made[name].kept.min()
    return made


def serve(servers: ServerPool, model: Model, tp: int, ratio: float, *more: str, log: Path):
    cores = sorted(os.sched_getaffinity(0))
    flags = [
        *("--dtype", "float32", "--skip-tokenizer-init", "--tp", str(tp)),
        *("--kv-pool", "ragged", "--kv-bytes", str(KV_BYTES), "--max-running-requests", str(REQUESTS)),
        *("--ragged-ratio", str(ratio), "--ragged-segment", str(SEGMENT), "--chunked-prefill-size", str(3 * SEGMENT)),
        *("--ragged-profile", str(model.profile) if ratio < 1 else "uniform"),
    ]
    # SGLang wants to be told the cores of every rank.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp))}
    return servers.serve(model.path, *flags, *more, log=log, env=env)


def virtual_tokens(model: Model, placement: Placement) -> int:
    """What the start-up line must say, from the placement alone: the rank with most to store decides."""
    layers, _, places = placement.heads.shape
    loads, token = placement.load.sum(axis=0), 2 * model.head_dim * 4
    # Open segments have as many tokens a page on every rank, and up to so many pages and a stage, now and before.
    most = -(-SEGMENT // (int(loads.min()) // (layers * places)))
    beside = (REQUESTS + 1) * 2 * most * 4
    return ((KV_BYTES - beside) // (int(loads.max()) * token) - 1) * SEGMENT


@pytest.mark.parametrize(
    ("name", "tp", "mode", "ratio"),
    [
        pytest.param("llama", 2, "none", RATIO, marks=pytest.mark.thorough),
        ("llama", 2, "permute", RATIO),
        pytest.param("llama", 2, "permute", 1.0, marks=pytest.mark.thorough),
        ("llama", 2, "split", RATIO),
        pytest.param("llama", 4, "split", RATIO, marks=pytest.mark.thorough),
        pytest.param("qwen3", 2, "split", RATIO, marks=pytest.mark.thorough),
        # More ranks than heads: every head is on two ranks.
        pytest.param("qwen3", 4, "none", RATIO, marks=pytest.mark.thorough),
    ],
)
def test_ranks_agree_with_the_oracle(servers, models, tmp_path, name, tp, mode, ratio):
    """A prompt of several segments and a second turn, decoded over borders, from the cache and cold."""
    model = models[name]
    kept = model.kept if ratio < 1 else uniform_kept(*model.kept.shape, 1.0, SEGMENT)
    rng = np.random.default_rng(0)
    # What permute does is what is done where nothing is asked for.
    asked = [] if mode == "permute" else ["--ragged-fairkv", mode]
    with serve(servers, model, tp, ratio, *asked, log=tmp_path / "server.log") as server:
        prompt = rng.integers(3, 512, 5 * SEGMENT + 30).tolist()
        first = generate(server, prompt, SEGMENT, logprobs_from=0)
        turn = prompt + first.tokens + rng.integers(3, 512, 70).tolist()
        warm = generate(server, turn, 20)
        flush(server)
        cold = generate(server, turn, 20)
        updated = httpx.post(f"{server.url}/update_weights_from_disk", json={"model_path": str(model.path)}, timeout=60)
        log = server.log_text()
    assert (warm.cached, cold.cached) == (found_of(6 * SEGMENT + 29, SEGMENT), 0)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    want = Oracle(str(model.path), kept, SEGMENT, "keydiff").logprobs(turn + warm.tokens)
    found = np.concatenate([first.input_logprobs, first.output_logprobs])
    difference = max(
        np.abs(found - want[: len(found)]).max(), np.abs(warm.output_logprobs - want[len(turn) - 1 :]).max()
    )
    print(f"{name} tp {tp} {mode} ratio {ratio}: largest difference {difference:.1e}")
    assert difference < 1e-4
    if tp <= kept.shape[1]:
        placement = model.placement(kept, tp, mode)
        assert placement.splits_heads == (mode == "split")
        assert f" {virtual_tokens(model, placement)} virtual tokens" in log
    if mode == "none":
        assert "heads placed on" not in log
        # The budgets matter: without them the same positions look different.
        full = Oracle(str(model.path), np.full_like(kept, SEGMENT), SEGMENT, "keydiff").logprobs(turn)
        assert np.abs(full - want[: len(full)]).max() > 0.05
    else:
        assert f"heads placed on {tp} ranks ({mode})" in log
        assert (updated.status_code, "--ragged-fairkv none" in updated.text) == (400, True)


def test_capacity_grows_with_the_placement(models):
    """What the start-up lines are held to: as many times more tokens as the largest slab is smaller."""
    model = models["llama"]
    placements = {mode: model.placement(model.kept, 2, mode) for mode in ("none", "permute")}
    loads = {mode: placement.load.sum(axis=0).max() for mode, placement in placements.items()}
    tokens = {mode: virtual_tokens(model, placement) for mode, placement in placements.items()}
    assert loads["none"] > 1.2 * loads["permute"]
    assert tokens["permute"] / tokens["none"] == pytest.approx(loads["none"] / loads["permute"], rel=0.02)
