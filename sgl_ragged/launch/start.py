"""A start as the launcher knows it: by its flags, then with the model, then with the budgets of its heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_ragged.launch.models import model_geometry

if TYPE_CHECKING:
    import torch

    from sgl_ragged.launch.options import RaggedOptions
    from sgl_ragged.launch.plan import BudgetChoice
    from sgl_ragged.profiles.geometry import ModelGeometry


@dataclass(frozen=True)
class Start:
    """The flags of a start. server_args: SGLang's ServerArgs, as they were given."""

    options: RaggedOptions
    server_args: Any


@dataclass(frozen=True)
class ModelStart(Start):
    """Flags and model.

    view: SGLang's resolved settings. model: its ModelConfig. kv_dtype: the cache's dtype.
    served: False for `sgl-ragged layout`, where SGLang has resolved nothing and `view` is `server_args`.
    """

    view: Any
    model: Any
    kv_dtype: torch.dtype
    served: bool = True

    @property
    def geometry(self) -> ModelGeometry:
        """Geometry of the whole model."""
        return model_geometry(self.model)


@dataclass(frozen=True, kw_only=True)
class BudgetedStart(ModelStart):
    """Flags, model, and the budgets of the model's heads."""

    chosen: BudgetChoice
