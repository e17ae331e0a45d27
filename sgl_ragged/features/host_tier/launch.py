"""The host tier, as a feature of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_ragged.features.host_tier.restore_schedule import AUTO, MODES
from sgl_ragged.features.host_tier.tier_plan import CODEC_NAMES
from sgl_ragged.features.windows.launch import WINDOWS
from sgl_ragged.launch.feature import Feature, Seam, Worker
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import CODES, NODES, STAYS_WIDE, Conflict, Launch
from sgl_ragged.serve.hooks import ADAPTER_ID, RUN_BATCH

CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache"

CODEC = "--ragged-host-codec fp8 or shared"

HOLDS_WEIGHTS = (
    "weights cannot be updated at run time while a tier below the device holds slabs of the ones before; restart "
    "without --enable-hierarchical-cache"
)
"""What SGLang answers to requests that would write any weights."""


@dataclass(frozen=True)
class TierFlags:
    """Values as given."""

    restore: str | None = flag(
        None,
        "With --enable-hierarchical-cache: load segments from the host, or compute the first of them meanwhile; auto: "
        "what pays.",
        shown=AUTO,
        choices=MODES,
    )
    host_codec: str | None = flag(
        None,
        "How slabs lie in the host tier and in storage: as they are, in 8 bits, or without the layers that are "
        "restored from another's. All but exact lose something (docs/host-tier.md).",
        shown=CODEC_NAMES[0],
        choices=CODEC_NAMES,
    )


class HostTier(Feature):
    """Settings: `tier_plan.TierPlan`."""

    name = "tier"
    case = "--enable-hierarchical-cache"
    flags = TierFlags
    in_vain = "{flags} is about the host tier, and there is none: add --enable-hierarchical-cache, or drop the flag"
    needed_for = " with --enable-hierarchical-cache"
    cases: ClassVar[Mapping] = {
        CODEC: lambda launch: launch.options.of(TierFlags).host_codec not in (None, CODEC_NAMES[0])
    }
    conflicts = (
        Conflict(case, WINDOWS.case, "pages of windows are not copied to the host", "drop it"),
        Conflict(case, NODES, "the host memory of several machines has not been shared out yet", "drop one of the two"),
        Conflict(CODES, CODEC, "the host's codec would round it again", "use exact", STAYS_WIDE),
    )
    seams = (
        ADAPTER_ID,
        Seam("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.register_stack_strategy", ("strategy",)),
        Seam(f"{CONTROLLER}.start_writing", ("self",)),
        Seam(f"{CONTROLLER}.start_loading", ("self",)),
        Seam(f"{CONTROLLER}._generic_page_get", ("self", "operation", "hash_values", "host_indices", "extra_info")),
        Seam(
            f"{HOST_POOL}.__init__",
            (
                *("self", "dtype", "device_capacity_tokens", "size_per_token", "start_layer", "end_layer"),
                *("host_to_device_ratio", "host_size", "page_size", "layout", "pin_memory", "device", "allocator_type"),
                *("dcp_size", "dcp_rank", "pool_label", "is_dummy", "host_token_capacity"),
            ),
        ),
        Seam(f"{HOST_POOL}._allocate_host_buffer", ("self",)),
        Seam(*RUN_BATCH, "sgl_ragged.features.host_tier.serve.recompute_segments"),
    )

    def asked(self, launch: Launch) -> bool:
        return launch.server_args.enable_hierarchical_cache

    def settle(self, launch: Launch) -> Any:
        from sgl_ragged.features.host_tier.tier_state import name_adapters_by_content, refuse_storage

        refuse_storage(launch.server_args.hicache_storage_backend)
        name_adapters_by_content(launch.options.from_command_line)
        return bool(launch.server_args.hicache_ratio or launch.server_args.hicache_size)

    def declare(self, settings: Any, launch: Launch) -> dict[str, Any]:
        # SGLang would leave 10 GiB free for a host beside the device; `host_pages` sizes the host's part.
        return {"hicache_host_memory_fraction": None} if launch.view.device == "cpu" else {}

    def join(self, settings: Any, plan: ServingPlan, launch: Launch) -> Any:
        from sgl_ragged.features.host_tier.tier_state import plan_tier

        return plan_tier(plan, launch, sized=settings)

    def attach(self, settings: Any, worker: Worker) -> Any:
        from sgl_ragged.features.host_tier.serve import register_stack

        register_stack(settings, worker.options)
        return worker.given

    def why_weights_stay(self) -> str:
        return HOLDS_WEIGHTS

    def server_info(self, settings: Any, pool: Any) -> dict[str, Any]:
        restorer = pool.attached.get(self.name)
        if settings is None or restorer is None:
            return {"tier": None}
        return {"tier": {"restore": settings.restore} | restorer.settings()}


HOST_TIER = HostTier()
