"""A feature's half in a worker: its hooks, what it attaches to the pool, and what operators see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sgl_ragged.features import load_halves
from sgl_ragged.launch.plan import Rank, ServingPlan, WorkerSettings

if TYPE_CHECKING:
    import torch

    from sgl_ragged.serve.pool import RaggedTokenToKVPool


@dataclass(frozen=True)
class Hook:
    """A function that wraps one of SGLang's, in every process that serves.

    target: the function's path in `sglang_contract`. function: takes the original function first; before that the
    `WorkerSettings` if `bound`.
    """

    target: str
    function: Callable
    bound: bool = False


@dataclass(frozen=True)
class Worker:
    """A worker whose pool has been made.

    outer: the pool as SGLang is to get it, `pool` itself or what earlier features have put around it.
    sizes: SGLang's MemoryPoolConfig. req_to_token: its request table, int32 [rows, tokens].
    """

    serving: WorkerSettings
    rank: Rank
    pool: RaggedTokenToKVPool
    outer: Any
    sizes: Any
    req_to_token: torch.Tensor


class SidePool(Protocol):
    """Layers that are not in slabs: their pages in SGLang's pool, its allocator, and their attention."""

    def pool_config(self, tokens: int, side_tokens: int) -> dict[str, int]:
        """Return fields of SGLang's MemoryPoolConfig for tokens in slabs and tokens in side pages."""
        ...

    def side_tokens(self, sizes: Any) -> int:
        """Return the tokens of side pages in SGLang's MemoryPoolConfig."""
        ...

    def allocator(self, found: Any, kvcache: Any, common: dict[str, Any]) -> Any:
        """Return the allocator in place of SGLang's.

        Args:
            found: SGLang's.
            kvcache: the pool.
            common: arguments of the constructor in addition to sizes and `kvcache`.
        """
        ...

    def layer_backend(self, model_runner: Any, kernel: str) -> Any:
        """Return SGLang's attention backend of these layers."""
        ...


class ServeFeature:
    """What workers do for a feature, from the settings in the plan. Every method has a default that does nothing.

    name: as in the plan. hooks: functions of SGLang that it wraps.
    radix_cache: name of its radix cache and SGLang's factory for it, or None.
    side_pool: how to serve layers that are not in slabs, or None; one feature of a plan at most has it.
    """

    name: ClassVar[str]
    hooks: ClassVar[tuple[Hook, ...]] = ()
    radix_cache: ClassVar[tuple[str, Callable] | None] = None
    side_pool: ClassVar[SidePool | None] = None

    def own_pool(self, settings: Any, configurator: Any, build: Callable[[], Any]) -> Any:
        """Return the pool of a second model, which `build` makes as SGLang would; None for the served model's.

        Args:
            configurator: SGLang's, of the model whose pool is made.
        """
        return None

    def attach(self, settings: Any, worker: Worker) -> Any:
        """Put what it runs into the pool's `attached`. Returns the pool that SGLang is to get."""
        return worker.outer

    def server_info(self, settings: Any, pool: RaggedTokenToKVPool) -> dict[str, Any]:
        """Its part of `ragged` in /server_info; settings is None where it has not joined."""
        return {}


def serve_features() -> tuple[ServeFeature, ...]:
    """Return the workers' halves of all features, in the order in which they join."""
    return load_halves("serve")


def joined_features(plan: ServingPlan) -> list[tuple[ServeFeature, Any]]:
    """Return the features of a plan with their settings."""
    settings = {one.name: one.settings for one in plan.features}
    return [(feature, settings[feature.name]) for feature in serve_features() if feature.name in settings]


def side_pool(plan: ServingPlan) -> SidePool | None:
    """Return how a plan's layers that are not in slabs are served; None if there are none."""
    return next((one.side_pool for one, _ in joined_features(plan) if one.side_pool is not None), None)
