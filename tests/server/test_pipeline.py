"""Pipeline stages on CPUs (gloo): layers of a model on several ranks, each with slabs of its own layers."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

from tests.oracle import Oracle
from tests.server.client import generate_all, server_settings
from tests.server.unequal_heads import RATIO, SEGMENT, converse, difference_to_oracle, flags, make_model

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("tp", "stages"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.thorough)])
def test_stages_agree_with_the_oracle(servers, tmp_path, tp, stages):
    """One conversation, and requests that are on several stages at once."""
    model = make_model("llama", tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp * stages))}
    more = ("--pp-size", str(stages), "--ragged-profile", str(model.profile))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 512, length).tolist() for length in (SEGMENT - 10, 2 * SEGMENT, 3 * SEGMENT + 50)]
    with servers.serve(model.path, *flags(tp, RATIO), *more, log=tmp_path / "server.log", env=env) as server:
        said = converse(server)
        answers = generate_all(server, prompts, 40)
        shown, log = server_settings(server), server.log_text()
    assert difference_to_oracle(model, said) < 1e-4
    oracle = Oracle(str(model.path), model.kept, SEGMENT, "keydiff")
    for prompt, answer in zip(prompts, answers, strict=True):
        want = oracle.logprobs(prompt + answer.tokens)[-len(answer.tokens) :]
        np.testing.assert_allclose(answer.output_logprobs, want, atol=1e-4)
    assert "2 pipeline stages with 1/2 layers, slabs of" in log
    # What a stage could do alone, and what it does with the others.
    lines = re.findall(r"(\d+) virtual tokens, open segments with (\d+) tokens a page", log)
    assert (len(lines), len(set(lines))) == (tp * stages, 1)
    assert shown["kept_mean"] == pytest.approx(model.kept.mean())
    kept = [model.kept[:1].sum(), model.kept[1:].sum()]
    if tp == 1:
        assert shown["rank_imbalance"] == pytest.approx(max(kept) / np.mean(kept))
        assert shown["slab_bytes"] == kept[0] * 2 * model.head_dim * 4
