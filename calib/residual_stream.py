"""The residual stream of a served model, and the change that attention's outputs make to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from calib.output_error import Added
from calib.query_moments import attends_to_everything

OUTPUT_PROJECTION = "RowParallelLinear"
"""SGLang's class of the linear layer that follows attention."""

Positions = Callable[[int], torch.Tensor | None]
"""Function from the number of tokens in a forward pass to the observed positions, int64; None to observe nothing."""


class ResidualStream:
    """Observes the input of the norm before each full-attention layer, which is the residual stream.

    Args:
        positions: called in every forward pass.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._stream: torch.Tensor | None = None
        # Layer whose stream was observed, layer whose attention runs, and the projection that follows it.
        self._normed_layer: torch.nn.Module | None = None
        self._layer: Any = None
        self._projection: Any = None

    @classmethod
    def hook_into(cls, model: torch.nn.Module, positions: Positions) -> ResidualStream | None:
        """Register hooks on the model's layers.

        Returns:
            None if the model is not built of layers, norms and projections as SGLang's models are, or if its heads are
            on several ranks.
        """
        stream, modules = cls(positions), dict(model.named_modules())
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
            attention.register_forward_pre_hook(stream._attention_hook(layer, projections[0]))
            for norm in layer.children():
                weight = getattr(norm, "weight", None)
                if isinstance(weight, torch.Tensor) and weight.ndim == 1:
                    norm.register_forward_pre_hook(stream._norm_hook(layer), with_kwargs=True)
        return stream

    def _attention_hook(self, layer: torch.nn.Module, projection: torch.nn.Module) -> Callable[..., None]:
        def before_attention(*_: object) -> None:
            self._layer, self._projection = layer, projection

        return before_attention

    def _norm_hook(self, layer: torch.nn.Module) -> Callable[..., None]:
        def before_norm(_: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            terms = [x for x in (*args, kwargs.get("residual")) if isinstance(x, torch.Tensor)][:2]
            positions = self._positions(len(terms[0])) if terms else None
            if positions is not None:
                # SGLang passes the residual and what is to be added to it. The norm may change both in place.
                self._stream = sum((x[positions].float() for x in terms), torch.zeros(()))
                self._normed_layer = layer

        return before_norm

    @property
    def known(self) -> bool:
        """True if the stream of the layer whose attention runs was observed. Fused norms may bypass the hooks."""
        return self._stream is not None and self._normed_layer is self._layer

    def after_attention(self, outputs: torch.Tensor) -> tuple[Added, torch.Tensor]:
        """Describe the residual stream after the attention of the layer that runs.

        Args:
            outputs: float32 [Q, heads * d], attention's outputs at the observed positions.

        Returns:
            A function from a change of the outputs, shaped like `outputs`, to the change of the stream, float32 [Q,
            hidden size]; and the square of the stream after attention, float32 [Q].
        """
        assert self._stream is not None, "callers check `known` first"
        scale: torch.Tensor | float = 1.0
        if hasattr(self._layer, "pre_feedforward_layernorm"):
            # In Gemma, attention's output is normed before it is added. The norm of the whole output scales small
            # changes, too.
            norm = self._layer.post_attention_layernorm
            weight = norm(torch.ones_like(self._stream[:1]).to(norm.weight.dtype)).float()
            scale = weight / self._project(outputs).square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-6)

        def added(change: torch.Tensor) -> torch.Tensor:
            return self._project(change) * scale

        return added, (self._stream + added(outputs)).square().sum(dim=-1)

    def _project(self, outputs: torch.Tensor) -> torch.Tensor:
        # The projection of zeros is subtracted, because a bias is no part of a change. Scaling the largest entry to 1
        # avoids underflow in 16 bits.
        size = outputs.abs().amax().clamp_min(1e-30)
        rows = torch.cat([outputs / size, torch.zeros_like(outputs[:1])])
        projected = self._projection(rows.to(next(self._layer.parameters()).dtype))
        projected = (projected[0] if isinstance(projected, tuple) else projected).float()
        return (projected[:-1] - projected[-1:]) * size
