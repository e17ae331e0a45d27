"""Gate: keep the tokens that a small network, trained during calibration, predicts to receive most attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn.functional import gelu

from sgl_ragged.scorers.base import Scorer, SegmentData

STEP = 2.0**-10
"""Scores are rounded to multiples of STEP, in nats of predicted attention.

In the first layer a token's hidden state depends on the token alone, so repeated tokens tie. Decode and prefill
multiply matrices of different shapes; without rounding, the last bits would break these ties differently in each.
"""


@dataclass(frozen=True)
class FoldedGate:
    """A layer's network with the normalisation of inputs folded into its weights.

    The network is skip z + output gelu(hidden z + bias), with z = (x - m) * s.

    Args:
        weights: float32 [features + heads, hidden size], hidden and skip times s.
        offset: float32 [features + heads], added to the products of weights and x.
        output: float32 [heads, features].
    """

    weights: torch.Tensor
    offset: torch.Tensor
    output: torch.Tensor

    @classmethod
    def of(cls, statistics: Mapping[str, torch.Tensor]) -> FoldedGate:
        """Fold the tensors `Gate.statistics` of one layer."""
        mean, scale, hidden, bias = (statistics[name][0].double() for name in Gate.shared_statistics)
        weights = torch.cat([hidden, statistics["skip"].double()]) * scale
        offset = -(weights @ mean)
        offset[: len(bias)] += bias
        return cls(weights.float(), offset.float(), statistics["output"].float().contiguous())

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute features before their activation and skipped outputs: float32 [tokens, features + heads].

        Args:
            hidden_states: [tokens, hidden size].
        """
        return torch.addmm(self.offset, hidden_states.float(), self.weights.T)

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """Compute scores from `features`; they equal `Gate.token_scores` up to rounding.

        `attention.kernels.gate` is the Triton kernel for this operation.
        """
        inactive, skipped = features.split([self.output.shape[1], self.output.shape[0]], dim=1)
        return round_scores(skipped + gelu(inactive) @ self.output.T)


def round_scores(scores: torch.Tensor) -> torch.Tensor:
    """Round scores to multiples of STEP."""
    return (scores / STEP).round() * STEP


class Gate(Scorer):
    """Scores a token by the hidden state x that enters attention.

    The score is skip z + output gelu(hidden z + bias), with z = (x - m) * s. Each layer has one network with one output
    per head. `calib.gate` trains it to predict the logarithm of the largest attention that later segments pay to the
    token. Scores are multiples of STEP.

    Source: gates on hidden states are in Kim, Han, Yun, "Fast KVzip" (2026), and in KVzap (linear and MLP surrogates of
    KVzip's scores); KVpop (2026) uses future attention as the target.
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
        return round_scores(scores)

    def score(self, segment: SegmentData) -> torch.Tensor:
        assert segment.token_scores is not None, "tokens are scored before their segment is sealed"
        return segment.token_scores.float()
