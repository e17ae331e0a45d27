"""The seam through which features join a server: what each says of itself, and when it is asked.

A feature is one object in a file of its own. Those of this package are in the rooms named for them; other packages
bring theirs as entry points of the group `sgl_ragged.features`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.plan import Joined, ServingPlan
from sgl_ragged.launch.start import Conflict, Launch
from sgl_ragged.mem_pool.sizing import PoolSizes, SidePages

if TYPE_CHECKING:
    import numpy as np
    import torch

    from sgl_ragged.launch.options import RaggedOptions
    from sgl_ragged.serve.pool import RaggedTokenToKVPool

GROUP = "sgl_ragged.features"
"""Entry points of this group are features of other packages."""


@dataclass(frozen=True)
class Seam:
    """A function of SGLang: its dotted path, its parameters, and the path of the hook that wraps it.

    Without a hook it is one that the launcher uses (`resolution`), or a method that our attention backend overrides.
    SGLang has a default for each of these, so one that it calls by another name would not be missed: decode would go on
    with the description of an earlier batch.
    """

    target: str
    parameters: tuple[str, ...]
    hook: str | None = None


@dataclass(frozen=True)
class Rank:
    """One rank's share of a plan. itemsize, query_itemsize: bytes per element of the cache and of queries beside it."""

    plan: ServingPlan
    number: int
    itemsize: int
    query_itemsize: int


@dataclass(frozen=True)
class Prefill:
    """chunk: tokens of one at most. schedule: SGLang's settings of that name, or what has their attributes."""

    chunk: int
    schedule: Any


@dataclass(frozen=True)
class Worker:
    """A worker whose pool has been made.

    given: the pool as SGLang is to get it, `pool` itself or what earlier features have put around it.
    sizes: SGLang's MemoryPoolConfig. req_to_token: its request table.
    """

    options: RaggedOptions
    rank: Rank
    pool: RaggedTokenToKVPool
    given: Any
    sizes: Any
    req_to_token: torch.Tensor


class Feature:
    """A part of a server beside slabs and tails. What a subclass does not say is nothing.

    name: in plans, of what it attaches to the pool, and in /server_info. case: in the table of conflicts.
    flags: a dataclass of `flags.flag`s; they are given in vain without the feature, and `in_vain` is what is said then.
    layout_also: settings of SGLang on which sizes depend; `sgl-ragged layout` has their flags, too.
    needed_for: words for what its seams are needed for, such as " with --flag".
    radix_cache: the name under which it registers one, and the path of SGLang's factory.
    known_backend: the attention backend that SGLang is to see while it looks at the model, where it serves some models
        with backends that it knows by name alone.
    cases: what else a start can have of it, for the table of conflicts.
    """

    name: ClassVar[str]
    case: ClassVar[str]
    flags: ClassVar[type | None] = None
    in_vain: ClassVar[str] = "{flags} given in vain: drop it"
    layout_also: ClassVar[tuple[str, ...]] = ()
    needed_for: ClassVar[str] = ""
    seams: tuple[Seam, ...] = ()
    radix_cache: ClassVar[tuple[str, str] | None] = None
    known_backend: ClassVar[str | None] = None
    cases: ClassVar[Mapping[str, Callable[[Launch], bool]]] = {}
    conflicts: ClassVar[tuple[Conflict, ...]] = ()

    # In the launcher, in this order.

    def asked(self, launch: Launch) -> bool:
        """True if a start has it. It is asked before SGLang has read the model, and again after that."""
        return False

    def settle(self, launch: Launch) -> Any:
        """Settings of a start that has it. Raises RaggedConfigError for what cannot be honoured."""
        return True

    def declare(self, settings: Any, launch: Launch) -> dict[str, Any]:
        """Settings of SGLang that change with it, once SGLang has resolved its own."""
        return {}

    def budgets(self, settings: Any, launch: Launch, share: float) -> tuple[Any, np.ndarray]:
        """Settings and kept tokens once budgets are chosen; share: of the tokens that heads keep on average."""
        assert launch.chosen is not None, "budgets are chosen"
        return settings, launch.chosen.kept

    def join(self, settings: Any, plan: ServingPlan, launch: Launch) -> Any:
        """Settings once heads are placed and the features before it have joined."""
        return settings

    def state(self, settings: Any) -> tuple[Any, ...]:
        """Numbers, names and arrays among the settings that decide what workers compute."""
        return ()

    # What it takes.

    def row_bytes(self, settings: Any, rank: Rank) -> int:
        """Device bytes per request row."""
        return 0

    def page_bytes(self, settings: Any, rank: Rank) -> int:
        """Device bytes per page that another cache takes, whose tokens have the same locations."""
        return 0

    def side_pages(self, settings: Any, rank: Rank, prefill: Prefill) -> SidePages | None:
        """Pages of another pool beside slabs, one feature's at most."""
        return None

    def pool_config(self, tokens: int, page_tokens: int) -> dict[str, int]:
        """Fields of SGLang's MemoryPoolConfig with which its side pages are told; tokens: of slabs."""
        return {}

    def page_tokens(self, sizes: Any) -> int:
        """The tokens of its side pages in SGLang's MemoryPoolConfig."""
        return 0

    # In a worker.

    def own_pool(self, settings: Any, configurator: Any, build: Callable[[], Any]) -> Any:
        """The pool of a model that it runs beside the served one, which `build` makes as SGLang would; None where it is
        the served model's that is asked for. configurator: SGLang's, of the model."""
        return None

    def allocator(self, found: Any, kvcache: Any, settings: dict[str, Any]) -> Any:
        """The allocator in place of the one that SGLang has made, where the pool has more than slabs: one feature's at
        most. settings: what its constructor takes beside sizes and `kvcache`."""
        return None

    def attach(self, settings: Any, worker: Worker) -> Any:
        """Put what it runs into `pool.attached`; returns the pool that SGLang is to get."""
        return worker.given

    def layer_backend(self, model_runner: Any, kernel: str) -> Any:
        """SGLang's attention backend of layers that are not in slabs."""
        return None

    def why_weights_stay(self) -> str | None:
        """Why weights cannot be updated at run time."""
        return None

    # For operators.

    def describe(self, settings: Any, sizes: PoolSizes) -> str | None:
        """Its part of the start-up line."""
        return None

    def server_info(self, settings: Any, pool: RaggedTokenToKVPool) -> dict[str, Any]:
        """Its part of `ragged` in /server_info; settings is None where it has not joined."""
        return {}

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        """Its part of `sgl-ragged layout --json`; settings is None where it has not joined."""
        return {}

    def require(self) -> None:
        """Raise RaggedConfigError where SGLang lacks what it needs."""
        from sgl_ragged.serve.hooks import check_seams

        check_seams(self.seams, self.needed_for)

    def of(self, plan: ServingPlan) -> Any:
        """Its settings in a plan; None where it has not joined."""
        return plan.settings_of(self.name)

    def joined(self, settings: Any) -> Joined:
        """Its entry in a plan."""
        return Joined(self.name, settings, self.state(settings))


@functools.cache
def features() -> tuple[Feature, ...]:
    """All features, in the order in which they join: a host tier last, whose rows are named by all before it.

    Raises RaggedConfigError where one of another package cannot be loaded.
    """
    from sgl_ragged.features.disaggregation.launch import DISAGGREGATION
    from sgl_ragged.features.drafts.launch import DRAFTS
    from sgl_ragged.features.history.launch import HISTORY
    from sgl_ragged.features.host_tier.launch import HOST_TIER
    from sgl_ragged.features.retrieval.launch import RETRIEVAL
    from sgl_ragged.features.windows.launch import WINDOWS

    others = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            others.append(entry.load())
        except Exception as error:
            raise RaggedConfigError(
                f"feature {entry.name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}; remove its "
                f"package, or mend it"
            ) from error
    return (RETRIEVAL, HISTORY, WINDOWS, DRAFTS, DISAGGREGATION, *others, HOST_TIER)


def joined_features(plan: ServingPlan) -> list[tuple[Feature, Any]]:
    """Those that a plan has, with their settings."""
    settings = {one.name: one.settings for one in plan.features}
    return [(feature, settings[feature.name]) for feature in features() if feature.name in settings]
