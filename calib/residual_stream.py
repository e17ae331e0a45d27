"""What flows through a served model beside attention: the residual stream, and what attention adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from calib.output_error import Added
from calib.query_moments import attends_to_everything

OUTPUT_PROJECTION = "RowParallelLinear"
"""SGLang's class of the linear layer behind attention."""

Positions = Callable[[int], torch.Tensor | None]
"""Of how many tokens pass, int64 those to look at, or None for none of them."""


class ResidualStream:
    """Sees what is normed before each layer's attention: the stream. Layers with windows are not looked at.

    Args:
        positions: asked in every forward pass.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._stream: torch.Tensor | None = None
        # Whose stream that is, and whose attention runs, with the projection behind it.
        self._normed: torch.nn.Module | None = None
        self._layer: Any = None
        self._projection: Any = None

    @classmethod
    def of(cls, model: torch.nn.Module, positions: Positions) -> ResidualStream | None:
        """With hooks on the model's layers; None if it is not built of layers, norms and projections as SGLang's are,
        or if its heads are on several ranks."""
        made, modules = cls(positions), dict(model.named_modules())
        for name, attention in modules.items():
            if not attends_to_everything(attention):
                continue
            path = name.split(".")
            depth = next((n for n in range(len(path) - 1, 0, -1) if path[n - 1].isdigit()), 0)
            projections = [
                child
                for child in modules[".".join(path[:-1])].children()
                if type(child).__name__ == OUTPUT_PROJECTION and getattr(child, "tp_size", 1) == 1
            ]
            if len(projections) != 1 or not depth:
                return None
            layer = modules[".".join(path[:depth])]
            attention.register_forward_pre_hook(made._attending(layer, projections[0]))
            for norm in layer.children():
                weight = getattr(norm, "weight", None)
                if isinstance(weight, torch.Tensor) and weight.ndim == 1:
                    norm.register_forward_pre_hook(made._norming(layer), with_kwargs=True)
        return made

    def _attending(self, layer: torch.nn.Module, projection: torch.nn.Module) -> Callable[..., None]:
        def attends(*_: object) -> None:
            self._layer, self._projection = layer, projection

        return attends

    def _norming(self, layer: torch.nn.Module) -> Callable[..., None]:
        def norms(_: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            both = [x for x in (*args, kwargs.get("residual")) if isinstance(x, torch.Tensor)][:2]
            positions = self._positions(len(both[0])) if both else None
            if positions is not None:
                # What has not been added yet is given beside it; the norm may change both in place.
                self._stream = sum((x[positions].float() for x in both), torch.zeros(()))
                self._normed = layer

        return norms

    @property
    def known(self) -> bool:
        """True if the stream of the layer whose attention runs was seen: kernels that norm may be fused with others."""
        return self._stream is not None and self._normed is self._layer

    def behind(self, outputs: torch.Tensor) -> tuple[Added, torch.Tensor]:
        """Change of the stream of the layer that runs by a change of attention's outputs, and the stream's square.

        Args:
            outputs: float32 [Q, heads * d], what attention gives at the positions that are looked at.

        Returns:
            From changes, like `outputs`, to what they add, float32 [Q, hidden size]; and float32 [Q], of the stream
            behind attention.
        """
        assert self._stream is not None, "it is known"
        scale: torch.Tensor | float = 1.0
        if hasattr(self._layer, "pre_feedforward_layernorm"):
            # As in Gemma: what attention gives is normed before it is added. Changes are small beside it.
            norm = self._layer.post_attention_layernorm
            weight = norm(torch.ones_like(self._stream[:1]).to(norm.weight.dtype)).float()
            scale = weight / self._projected(outputs).square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-6)

        def added(change: torch.Tensor) -> torch.Tensor:
            return self._projected(change) * scale

        return added, (self._stream + added(outputs)).square().sum(dim=-1)

    def _projected(self, outputs: torch.Tensor) -> torch.Tensor:
        # A bias is no part of a change. The largest is brought to 1, for numbers of few bits.
        size = outputs.abs().amax().clamp_min(1e-30)
        both = torch.cat([outputs / size, torch.zeros_like(outputs[:1])])
        found = self._projection(both.to(next(self._layer.parameters()).dtype))
        found = (found[0] if isinstance(found, tuple) else found).float()
        return (found[:-1] - found[-1:]) * size
