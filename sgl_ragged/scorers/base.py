"""What a scorer is."""

from __future__ import annotations

from typing import Protocol

import torch


class Scorer(Protocol):
    """Ranks the tokens of one finished segment for every head on its own.

    A scorer is a pure function of the segment: no state, no randomness, no look at other segments. That is
    what makes a sealed segment depend on the tokens up to its end alone, so that it can be shared.
    """

    name: str

    def score(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Score tokens; higher is kept first.

        Args:
            keys: [..., S, head_dim], after RoPE, in the KV dtype. Leading axes are independent heads.
            values: [..., S, head_dim].

        Returns:
            float32 [..., S]. Does not change its arguments.
        """
        ...
