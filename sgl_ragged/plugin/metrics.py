"""What an operator sees of the ragged pool: Prometheus metrics and the settings in /server_info.

Both hooks run in the scheduler. SGLang writes its metrics once per prefill and every --decode-log-interval steps of
decode; ours are written at the same moments, from numbers that the host has anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ragged.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.plan import ServingPlan
from sgl_ragged.plugin.options import RaggedOptions, serving_plan
from sgl_ragged.plugin.pool import RaggedTokenToKVPool

_METRICS = "_sgl_ragged_metrics"
"""Attribute of SGLang's collector that holds ours."""

PREFIX = "sglang:ragged_"

_GAUGES = {
    "kept_ratio": "Kept / full KV bytes of a sealed segment, from the head budgets of this rank.",
    "slab_bytes_in_use": "Bytes of the slabs that are allocated on this rank, those of cached prefixes among them.",
    "tail_bytes_in_use": "Bytes of the tails on this rank that belong to a request.",
    "rank_imbalance": "Largest / mean kept bytes of a segment over the tensor-parallel ranks; 1 if they are equal.",
}
_COUNTERS = {
    "sealed_segments": "Segments sealed on this rank.",
    "seal_seconds": "Host seconds around sealing on this rank: the work itself on a CPU; on a GPU the time to launch "
    "it, not the time it takes there.",
}

_TIER_COUNTERS = {
    "restored_segments": "Segments that came back from below the device on this rank: copied from the host, read from "
    "storage to the host, or computed again though the host has them.",
    "restored_bytes": "Bytes that were moved for that on this rank.",
}


def imbalance(layouts: list[SlabLayout]) -> float:
    """Largest / mean kept elements of a segment over the ranks."""
    elems = [layout.slab_elems for layout in layouts]
    return max(elems) * len(elems) / sum(elems)


class RaggedMetrics:
    """The metrics of one rank.

    Args:
        labels: names and values, SGLang's own.
        pool: what they are about; its store counts seals.
        allocator: SGLang's, which hands out the pool's pages.
        requests: SGLang's request table, whose rows have the tails.
        rank_imbalance: as `imbalance` gives it.
    """

    def __init__(
        self, labels: dict[str, Any], pool: RaggedTokenToKVPool, allocator: Any, requests: Any, rank_imbalance: float
    ) -> None:
        # prometheus_client decides at its first import whether processes share files, and SGLang sets that up late.
        from prometheus_client import Counter, Gauge

        self._pool, self._allocator, self._requests = pool, allocator, requests
        self._gauges = {
            name: Gauge(PREFIX + name, text, labels.keys(), multiprocess_mode="mostrecent").labels(**labels)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, labels.keys()).labels(**labels) for name, text in _COUNTERS.items()
        }
        self._counted = dict.fromkeys(_COUNTERS, 0.0)
        self._tier_counters = {}
        if pool.tier is not None:
            for name, text in _TIER_COUNTERS.items():
                counter = Counter(PREFIX + name, text, (*labels, "tier"))
                for way in getattr(pool.tier, name.removeprefix("restored_")):
                    self._tier_counters[name, way] = counter.labels(**labels, tier=way)
                    self._counted[f"{name} {way}"] = 0.0
        self._gauges["kept_ratio"].set(pool.sizes.layout.mean_kept_share)
        self._gauges["rank_imbalance"].set(rank_imbalance)
        self.update()

    def update(self) -> None:
        """Write what has changed since the last call."""
        sizes, meter = self._pool.sizes, self._pool.store.seal_meter
        pages = (self._allocator.size - self._allocator.available_size()) // sizes.layout.segment
        rows = self._requests.size - self._requests.available_size()
        self._gauges["slab_bytes_in_use"].set(pages * sizes.slab_bytes)
        self._gauges["tail_bytes_in_use"].set(rows * sizes.row_bytes)
        for name, total in (("sealed_segments", meter.segments), ("seal_seconds", meter.seconds)):
            self._counters[name].inc(total - self._counted[name])
            self._counted[name] = total
        for (name, way), counter in self._tier_counters.items():
            total, key = getattr(self._pool.tier, name.removeprefix("restored_"))[way], f"{name} {way}"
            counter.inc(total - self._counted[key])
            self._counted[key] = total


def summary(plan: ServingPlan, size: PoolSizes) -> str:
    """The start-up line."""
    return f"ragged KV pool (ratio {plan.ratio}, scorer {plan.scorer}): {size.describe()}"


def settings(options: RaggedOptions, pool: RaggedTokenToKVPool) -> dict[str, Any]:
    """`ragged` in /server_info: what was asked for and what became of it.

    Kept tokens are over the heads of all ranks; slots, tokens and bytes are of the rank that answers, the first.
    """
    plan, size = serving_plan(options), pool.sizes
    layouts = plan.layouts
    share = sum(layout.mean_kept_share for layout in layouts) / len(layouts)
    return {
        "summary": summary(plan, size),
        "ratio": plan.ratio,
        "segment": plan.segment,
        "scorer": plan.scorer,
        "scorer_weights": options.scorer_weights,
        "profile": plan.profile,
        "profile_source": plan.source,
        "plan_digest": plan.digest,
        "fairkv": plan.fairkv,
        "kernel": plan.kernel,
        "kept_min": min(int(layout.kept.min()) for layout in layouts),
        "kept_mean": share * plan.segment,
        "kept_max": max(int(layout.kept.max()) for layout in layouts),
        "kept_ratio": share,
        "rank_imbalance": imbalance(layouts),
        "slots": size.num_slots,
        "virtual_tokens": size.max_total_tokens,
        "max_requests": size.max_requests,
        "slab_bytes": size.slab_bytes,
        "tails_bytes": size.tails_bytes,
        "total_bytes": size.total_bytes,
        "host_codec": plan.tier and plan.tier.codec,
        "host_row_bytes": pool.tier and pool.tier.row_bytes,
    }


def scheduler_ready(options: RaggedOptions, original: Callable, scheduler: Any) -> dict[str, Any]:
    """What the scheduler tells the launcher when it is ready, the ragged settings added; makes the metrics."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool, layouts = allocator.get_kvcache(), serving_plan(options).layouts
    if scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
        collector = scheduler.metrics_collector
        metrics = RaggedMetrics(collector.labels, pool, allocator, scheduler.req_to_token_pool, imbalance(layouts))
        setattr(collector, _METRICS, metrics)
    return {**original(scheduler), "ragged": settings(options, pool)}


def log_stats(options: RaggedOptions, original: Callable, collector: Any, stats: Any) -> None:
    """Where SGLang writes its scheduler's metrics, ours are written, too."""
    original(collector, stats)
    metrics = getattr(collector, _METRICS, None)
    if metrics is not None:
        metrics.update()
