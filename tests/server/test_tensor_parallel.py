"""Tensor-parallel servers on the CPU (gloo), heads in every placement, against the dense-mask oracle in one process."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.harness.server_pool import ServerPool
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.profiles.budgets import uniform_kept
from tests.oracle import Oracle
from tests.server.client import flush, found_of, generate
from tests.server.unequal_heads import KV_BYTES, MU, RATIO, REQUESTS, SEGMENT, Model, flags, make_model

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Model]:
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in MU}


def serve(servers: ServerPool, model: Model, tp: int, ratio: float, *more: str, log: Path):
    cores = sorted(os.sched_getaffinity(0))
    profile = str(model.profile) if ratio < 1 else "uniform"
    # SGLang wants to be told the cores of every rank.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp))}
    return servers.serve(model.path, *flags(tp, ratio), "--ragged-profile", profile, *more, log=log, env=env)


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
        prompt = rng.integers(3, 512, 6 * SEGMENT - 20).tolist()
        first = generate(server, prompt, 50, logprobs_from=0)
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
