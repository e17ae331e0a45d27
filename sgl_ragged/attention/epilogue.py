"""What is done behind attention over slabs and tails, layer by layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Epilogue(Protocol):
    """One step; steps are applied in a list, learned sinks behind all of them.

    A split head's exchange between ranks is one, what was fetched for a head another.
    """

    def describe(self, batch: Any) -> None:
        """Called before a batch runs, not when one is captured. Changes the state."""
        ...

    def needed(self, layer: int) -> bool:
        """True if it has anything to do in a layer; that must not change."""
        ...

    def apply(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Attention's output with this step.

        Args:
            queries, output: [tokens, heads, q_per_kv, head_dim]; output may be changed in place.
            lse: float32 [tokens, heads, q_per_kv], natural log-sum-exps; -inf where nothing is attended to. May be
                changed in place.
            batch: SGLang's ForwardBatch.
        """
        ...
