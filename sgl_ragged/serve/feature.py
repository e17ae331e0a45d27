"""A feature's half in a worker: its hooks, what it attaches to the pool, and what operators see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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


class ServeFeature:
    """What workers do for a feature, from the settings in the plan. Every method has a default that does nothing.

    name: as in the plan. hooks: functions of SGLang that it wraps.
    radix_cache: name of its radix cache and SGLang's factory for it, or None.
    """

    name: ClassVar[str]
    hooks: ClassVar[tuple[Hook, ...]] = ()
    radix_cache: ClassVar[tuple[str, Callable] | None] = None

    def pool_config(self, tokens: int, page_tokens: int) -> dict[str, int]:
        """Fields of SGLang's MemoryPoolConfig for side pages; tokens: of slabs. page_tokens: of side pages."""
        return {}

    def page_tokens(self, sizes: Any) -> int:
        """Tokens of its side pages in SGLang's MemoryPoolConfig."""
        return 0

    def own_pool(self, settings: Any, configurator: Any, build: Callable[[], Any]) -> Any:
        """Return the pool of a second model, which `build` makes as SGLang would; None for the served model's.

        Args:
            configurator: SGLang's, of the model whose pool is made.
        """
        return None

    def allocator(self, found: Any, kvcache: Any, common: dict[str, Any]) -> Any:
        """Return the allocator in place of SGLang's, or None; one feature of a plan at most has one.

        Args:
            common: arguments of its constructor in addition to sizes and `kvcache`.
        """
        return None

    def attach(self, settings: Any, worker: Worker) -> Any:
        """Put what it runs into the pool's `attached`. Returns the pool that SGLang is to get."""
        return worker.outer

    def layer_backend(self, model_runner: Any, kernel: str) -> Any:
        """Return SGLang's attention backend of layers that are not in slabs, or None."""
        return None

    def why_weights_stay(self) -> str | None:
        """Return why weights cannot be updated at run time, or None."""
        return None

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
