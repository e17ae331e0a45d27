"""Gate: a small network, trained during calibration, foresees how much attention a token will receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn.functional import gelu

from sgl_ragged.scorers.base import Scorer, SegmentData

STEP = 2.0**-10
"""Of scores, in nats of foreseen attention: what differs by less is a tie, which goes to the earlier token.

What enters the first layer is the token alone, so a token that is repeated ties with itself. Decode and prefill
multiply matrices of other shapes, and their last bits would choose among such tokens, each in its own way.
"""


@dataclass(frozen=True)
class FoldedGate:
    """A layer's network with fewer operations: `skip z + output gelu(hidden z + bias)` of z = (x - m) * s.

    weights: float32 [features + heads, hidden size], hidden and skip times s. offset: float32 [features + heads], what
    is added to their products with x. output: float32 [heads, features].
    """

    weights: torch.Tensor
    offset: torch.Tensor
    output: torch.Tensor

    @classmethod
    def of(cls, statistics: Mapping[str, torch.Tensor]) -> FoldedGate:
        """From `Gate.statistics` of one layer."""
        mean, scale, hidden, bias = (statistics[name][0].double() for name in Gate.shared_statistics)
        weights = torch.cat([hidden, statistics["skip"].double()]) * scale
        offset = -(weights @ mean)
        offset[: len(bias)] += bias
        return cls(weights.float(), offset.float(), statistics["output"].float().contiguous())

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, features + heads]: features before their activation, then what skips them, of hidden states
        [tokens, hidden size]."""
        return torch.addmm(self.offset, hidden_states.float(), self.weights.T)

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """`Gate.token_scores` of `features`, but for last bits; `attention.kernels.gate` is the same by a kernel."""
        shut, skipped = features.split([self.output.shape[1], self.output.shape[0]], dim=1)
        return rounded(skipped + gelu(shut) @ self.output.T)


def rounded(scores: torch.Tensor) -> torch.Tensor:
    """The nearest multiples of STEP."""
    return (scores / STEP).round() * STEP


class Gate(Scorer):
    """From the hidden state x that enters attention: score = skip z + output gelu(hidden z + bias), z = (x - m) * s.

    One network per layer with one output per head; `calib.gate` trains it to foresee the logarithm of the largest
    attention that later segments pay to the token. Scores are multiples of STEP. Gates read from hidden states are in
    Kim, Han, Yun, "Fast KVzip" (2026), and KVzap (linear and MLP surrogates of KVzip's scores); KVpop (2026) takes
    future attention as the target.
    """

    name = "gate"
    statistics = ("input_mean", "input_scale", "hidden", "hidden_bias", "skip", "output")
    shared_statistics = ("input_mean", "input_scale", "hidden", "hidden_bias")
    axes = MappingProxyType(
        {
            "input_mean": ("hidden size",),
            "input_scale": ("hidden size",),
            "hidden": ("features", "hidden size"),
            "hidden_bias": ("features",),
            "skip": ("hidden size",),
            "output": ("features",),
        }
    )
    reads_hidden_states = True
    scores_tokens_alone = True
    trained = True

    def token_scores(self, hidden_states: torch.Tensor, statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mean, scale, hidden, bias = (statistics[name][0].float() for name in self.shared_statistics)
        inputs = (hidden_states.float() - mean) * scale
        features = gelu(inputs @ hidden.T + bias)
        scores = inputs @ statistics["skip"].float().T + features @ statistics["output"].float().T
        return rounded(scores)

    def score(self, segment: SegmentData) -> torch.Tensor:
        assert segment.token_scores is not None, "tokens are scored before their segment is sealed"
        return segment.token_scores.float()
