"""Steps after attention over slabs and tails, layer by layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Epilogue(Protocol):
    """One step; steps are applied in the order of a list, and learned sinks after all of them.

    A split head's exchange between ranks is one, what was fetched for a head another.
    """

    def describe(self, batch: Any) -> None:
        """Prepare for a batch before it runs, not when it is captured. Changes the state."""
        ...

    def needed(self, layer: int) -> bool:
        """Return True if the step does anything in a layer; this must not change."""
        ...

    def apply(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Apply the step to attention's output.

        Args:
            queries, output: [tokens, heads, q_per_kv, head_dim]; output may be changed in place.
            lse: float32 [tokens, heads, q_per_kv], natural log-sum-exps; -inf where nothing is attended to. May be
                changed in place.
            batch: SGLang's ForwardBatch.
        """
        ...
