"""Bounded histories, as a feature of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_ragged.features.history.bound import check_score
from sgl_ragged.launch.feature import Feature, Rank, Seam, Worker
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import MIXED, TREE, Conflict, Launch
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.serve.hooks import ADDER, BATCH, CHECKER, REGISTRY, TREE_CLASS


@dataclass(frozen=True)
class HistoryFlags:
    """Values as given."""

    history: int | None = flag(
        None,
        "Tokens of its history that a request sees at most, a multiple of the segment; what leaves its view is freed "
        "while it runs.",
        shown="all",
        type=int,
        metavar="N",
    )
    history_score: str | None = flag(
        None,
        "With --ragged-history: by which score segments leave; auto: value_novelty with a calibrated profile, else "
        "recency.",
        shown="auto",
        check=check_score,
        metavar="NAME",
    )


ADMISSION = "sgl_ragged.features.history.admission"


class History(Feature):
    """Settings: `history_plan.HistoryPlan`."""

    name = "history"
    case = "--ragged-history"
    flags = HistoryFlags
    in_vain = "{flags} says what leaves a bounded history, and this one is not: add --ragged-history, or drop the flag"
    needed_for = " with --ragged-history"
    radix_cache = ("ragged_bounded", "sgl_ragged.features.history.radix_cache.bounded_cache")
    conflicts = (
        Conflict(case, TREE, "histories have a radix cache of their own", "drop --radix-cache-backend"),
        Conflict(case, MIXED, "it decodes within prefill, where histories do not look"),
    )
    seams = (
        Seam(f"{BATCH}.check_decode_mem", ("self", "selected_indices"), f"{ADMISSION}.make_room"),
        Seam(
            f"{ADDER}._get_running_request_total_token_offset",
            ("self", "req"),
            f"{ADMISSION}.reserve_running",
        ),
        Seam(
            f"{ADDER}._check_prefill_budget",
            ("self", "req", "extend_input_len", "total_tokens", "swa_host_hit_length", "chunk_limit"),
            f"{ADMISSION}.fits",
        ),
        Seam(
            f"{ADDER}._update_prefill_budget",
            (
                *("self", "prefix_len", "extend_input_len", "max_new_tokens", "retracted_stain", "mamba_gap_reserve"),
                *("request_slot_reserve", "is_chunked_continuation", "replay_len"),
            ),
            f"{ADMISSION}.reserve_admitted",
        ),
        Seam(f"{CHECKER}._get_total_uncached_sizes", ("self",), f"{ADMISSION}.uncached_tokens"),
        Seam(f"{CHECKER}._check_kv_page_invariants", ("self",), f"{ADMISSION}.check_held_pages"),
        Seam(f"{REGISTRY}.register_radix_cache_backend", ("name", "factory")),
        Seam(f"{REGISTRY}.create_unified_radix_cache", ("ctx", "cache_class")),
        Seam(f"{TREE_CLASS}.checkpoint", ("self", "req", "up_to", "kwargs")),
        Seam(f"{TREE_CLASS}.free_kv_row", ("self", "kv", "ranges")),
        Seam(f"{TREE_CLASS}.on_release", ("self", "req", "checkpointed")),
        Seam(f"{TREE_CLASS}.evict_sliding_windows", ("self", "req", "pre_len", "eviction_interval")),
        Seam(f"{TREE_CLASS}.release_swa_prefix_lock", ("self", "req")),
    )

    def asked(self, launch: Launch) -> bool:
        return launch.options.of(HistoryFlags).history is not None

    def settle(self, launch: Launch) -> Any:
        from sgl_ragged.features.history.history_plan import asked_bound

        return asked_bound(launch)

    def declare(self, settings: Any, launch: Launch) -> dict[str, Any]:
        from sgl_ragged.features.history.history_plan import chunk_size

        return {"chunked_prefill_size": chunk_size(launch.view.chunked_prefill_size, settings, launch.options.segment)}

    def join(self, settings: Any, plan: ServingPlan, launch: Launch) -> Any:
        from sgl_ragged.features.history.history_plan import settled

        return settled(settings, plan, launch)

    def state(self, settings: Any) -> tuple[Any, ...]:
        return settings.state

    def attach(self, settings: Any, worker: Worker) -> Any:
        from sgl_ragged.features.history.serve import make_histories

        histories = make_histories(settings, worker)
        worker.pool.attached[self.name] = worker.pool.views = histories
        return worker.given

    def describe(self, settings: Any, sizes: PoolSizes) -> str:
        return f"{settings.bound.describe(sizes)}; segments leave by {settings.bound.score}"

    def server_info(self, settings: Any, pool: Any) -> dict[str, Any]:
        return {
            "history": settings and settings.bound.limit * pool.page_size,
            "history_score": settings and settings.bound.score,
        }

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {} if settings is None else {"most_request_bytes": settings.bound.request_bytes(sizes)}


HISTORY = History()
