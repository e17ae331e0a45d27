"""Models whose heads need strongly unequal budgets, for servers with several ranks."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from benchmarks.harness.launch import Server
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.profiles.profile import profile_kept
from tests.models import SIZES, make_llama, make_profile, make_qwen3
from tests.oracle import Oracle
from tests.server.client import flush, found_of, generate

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


def make_model(name: str, folder: Path) -> Model:
    """One of MU in `folder`, which exists."""
    make, per_kv = {"llama": (make_llama, 2), "qwen3": (functools.partial(make_qwen3, q_per_kv=4), 4)}[name]
    # Smaller weights than other tests': rounding, which the order of ranks' sums changes, shows less in logprobs.
    path, file = make(folder / "model", initializer_range=0.1), folder / "profile.safetensors"
    profile = make_profile(path, file, segment=SEGMENT, mu=MU[name])
    model = Model(path, file, profile_kept(profile, RATIO, SEGMENT), profile.head_dim, per_kv)
    assert model.kept.max() >= 4 * model.kept.min()
    return model


def flags(tp: int, ratio: float) -> list[str]:
    """Of servers with `tp` ranks, but for the profile."""
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--tp", str(tp)),
        *("--kv-pool", "ragged", "--kv-bytes", str(KV_BYTES), "--max-running-requests", str(REQUESTS)),
        *("--ragged-ratio", str(ratio), "--ragged-segment", str(SEGMENT), "--chunked-prefill-size", str(3 * SEGMENT)),
    ]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """tokens: all of it. first: logprobs of a prompt from its second token on, and of decoded tokens over a border.
    second: those of the last tokens, which answer a second turn."""

    tokens: list[int]
    first: np.ndarray
    second: np.ndarray


def converse(server: Server, seed: int = 0, cached: bool = True) -> Conversation:
    """A prompt of several segments, decoded over a border, and a second turn, from the cache and cold, which agree.

    cached: whether all but the last open token of the first turn is found.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, 512, 6 * SEGMENT - 20).tolist()
    first = generate(server, prompt, 50, logprobs_from=0)
    turn = prompt + first.tokens + rng.integers(3, 512, 70).tolist()
    warm = generate(server, turn, 20)
    flush(server)
    cold = generate(server, turn, 20)
    assert cold.cached == 0 < warm.cached
    assert not cached or warm.cached == found_of(6 * SEGMENT + 29, SEGMENT)
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    return Conversation(
        turn + warm.tokens, np.concatenate([first.input_logprobs, first.output_logprobs]), warm.output_logprobs
    )


def difference_to_oracle(model: Model, said: Conversation) -> float:
    """Largest difference of logprobs to the dense-mask oracle's, in one process."""
    want = Oracle(str(model.path), model.kept, SEGMENT, "keydiff").logprobs(said.tokens)
    return float(
        max(np.abs(said.first - want[: len(said.first)]).max(), np.abs(said.second - want[-len(said.second) :]).max())
    )
