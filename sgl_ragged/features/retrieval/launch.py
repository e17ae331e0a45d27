"""Retrieval, as a feature of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_ragged.features.history.launch import HISTORY
from sgl_ragged.features.host_tier.launch import HOST_TIER
from sgl_ragged.features.windows.launch import WINDOWS
from sgl_ragged.launch.feature import Feature, Rank, Seam, Worker
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import (
    CODES,
    FITTED,
    FLASHINFER,
    MANY_RANKS,
    MIXED,
    NODES,
    SPLIT,
    STAYS_UNFITTED,
    STAYS_WIDE,
    TREE,
    Conflict,
    Launch,
)
from sgl_ragged.mem_pool.sizing import PoolSizes, parse_bytes
from sgl_ragged.serve.hooks import BATCH, REGISTRY, RUN_BATCH, TREE_CLASS

if TYPE_CHECKING:
    import numpy as np

PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
HOOKS = "sgl_ragged.features.retrieval.serve"


@dataclass(frozen=True)
class RetrievalFlags:
    """Values as given."""

    reservoir: int | None = flag(
        None,
        "Host memory of all ranks together, such as 8GiB, for what heads drop of segments: what attention comes back "
        "to is fetched from there.",
        shown="none, nothing is fetched",
        type=lambda text: parse_bytes(str(text)),
        metavar="N",
    )
    overlay: int | None = flag(
        None, "With --ragged-reservoir: tokens that a head can be given back at a time.", shown="128", type=int
    )
    pivots: int | None = flag(
        None,
        "With --ragged-reservoir: heads that keep everything and watch what attention comes back to.",
        shown="2",
        type=int,
    )
    watch_interval: int | None = flag(
        None, "With --ragged-reservoir: tokens between two looks at what pivots attend to.", shown="8", type=int
    )
    drift: float | None = flag(
        None,
        "With --ragged-reservoir: overlap with what was fetched last, below which is fetched anew.",
        shown="0.5",
        type=float,
    )


class Retrieving(Feature):
    """Settings: `retrieval_plan.RetrievalPlan`."""

    name = "retrieval"
    case = "--ragged-reservoir"
    flags = RetrievalFlags
    in_vain = (
        "{flags}: these are about fetching what heads dropped, which needs host memory; add --ragged-reservoir, or "
        "drop them"
    )
    needed_for = " with --ragged-reservoir"
    radix_cache = ("ragged_retrieval", "sgl_ragged.features.retrieval.radix_cache.retrieval_cache")
    conflicts = (
        Conflict(case, HISTORY.case, "it frees segments that would have to be watched"),
        Conflict(case, HOST_TIER.case, "it brings segments back without what heads dropped of them"),
        Conflict(case, NODES, "it has not been run over nodes"),
        Conflict(case, TREE, "it takes the place of a radix cache that is needed"),
        Conflict(case, MIXED, "it decodes within prefill, where pivots do not look"),
        Conflict(case, SPLIT, "it stores heads in parts, and pivots watch as a whole"),
        Conflict(case, FLASHINFER, "flashinfer plans without overlays", "use triton"),
        Conflict(case, WINDOWS.case, "their radix cache shares pages by windows, too", "drop it"),
        Conflict(case, MANY_RANKS, "a rank would have only some of the queries of a pivot", "use as many as heads"),
        Conflict(CODES, case, "pivots of --ragged-reservoir read keys as numbers", "use wide", STAYS_WIDE),
        Conflict(FITTED, case, "what --ragged-reservoir gives back would count twice", "", STAYS_UNFITTED),
    )
    seams = (
        Seam(f"{BATCH}.prepare_for_extend", ("self",), f"{HOOKS}.begin_prefill"),
        Seam(*RUN_BATCH, f"{HOOKS}.name_requests"),
        Seam(f"{PAGED}._release_page_ids", ("self", "page_ids"), f"{HOOKS}.forget_pages"),
        Seam(f"{PAGED}.clear", ("self",), f"{HOOKS}.forget_all_pages"),
        Seam(f"{REGISTRY}.register_radix_cache_backend", ("name", "factory")),
        Seam(f"{REGISTRY}.create_unified_radix_cache", ("ctx", "cache_class")),
        Seam(f"{TREE_CLASS}.swa_reprefill_tail_tokens", ("self", "req")),
        Seam(f"{TREE_CLASS}.checkpoint", ("self", "req", "up_to", "kwargs")),
        Seam(f"{TREE_CLASS}.on_release", ("self", "req", "checkpointed")),
    )

    def asked(self, launch: Launch) -> bool:
        return launch.options.of(RetrievalFlags).reservoir is not None

    def settle(self, launch: Launch) -> Any:
        from sgl_ragged.features.retrieval.retrieval_plan import asked_retrieval

        return asked_retrieval(launch.options.of(RetrievalFlags))

    def budgets(self, settings: Any, launch: Launch, share: float) -> tuple[Any, np.ndarray]:
        from sgl_ragged.features.retrieval.retrieval_plan import RetrievalPlan, choose_pivots

        assert launch.chosen is not None, "budgets are chosen"
        roles, kept = choose_pivots(launch.chosen, settings.pivots, share, launch.options.segment)
        return RetrievalPlan(settings, roles), kept

    def join(self, settings: Any, plan: ServingPlan, launch: Launch) -> Any:
        assert launch.kv_dtype is not None, "the model is known"
        settings.entries(plan, launch.kv_dtype.itemsize)
        return settings

    def state(self, settings: Any) -> tuple[Any, ...]:
        return settings.state

    def row_bytes(self, settings: Any, rank: Rank) -> int:
        return settings.overlay_bytes(rank.plan, rank.number, rank.itemsize, rank.query_itemsize)

    def attach(self, settings: Any, worker: Worker) -> Any:
        from sgl_ragged.features.retrieval.serve import make_retriever
        from sgl_ragged.features.retrieval.watching import Watching

        worker.pool.attached[self.name] = retriever = make_retriever(settings, worker)
        worker.pool.epilogues.append(Watching(retriever))
        return worker.given

    def describe(self, settings: Any, sizes: PoolSizes) -> str:
        return settings.asked.describe(settings.roles)

    def server_info(self, settings: Any, pool: Any) -> dict[str, Any]:
        if settings is None:
            return {"retrieval": None}
        retriever = pool.attached[self.name]
        said = {
            "overlay": settings.asked.overlay,
            "pivots": [list(pivot) for pivot in settings.roles.pivots],
            "segments": retriever.reservoir.capacity,
            "reservoir_bytes": retriever.reservoir.nbytes,
            "overlay_bytes": retriever.device_bytes,
        }
        return {"retrieval": said}

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        if settings is None:
            return {}
        return {
            "overlay_bytes": self.row_bytes(settings, rank),
            "reservoir_bytes": settings.asked.reservoir_bytes,
            "pivots": [list(pivot) for pivot in settings.roles.pivots],
        }


RETRIEVAL = Retrieving()
