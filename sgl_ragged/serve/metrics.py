"""The ragged pool for operators: Prometheus metrics, and the settings in /server_info.

The hooks run in the scheduler, but for one in the process that starts the replicas of --dp-size. SGLang writes its
metrics once per prefill and every --decode-log-interval steps of decode; ours are written at the same moments and when
the cache was flushed, from numbers that are on the host already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from sgl_ragged.launch.plan import WorkerSettings
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.rank_sizes import summary
from sgl_ragged.serve.feature import serve_features
from sgl_ragged.serve.pool import RaggedTokenToKVPool, slab_allocator, slab_pool
from sgl_ragged.serve.radix_cache import OpenRadixCache

_METRICS = "_sgl_ragged_metrics"
"""Attribute of SGLang's collector that holds ours."""

PREFIX = "sglang:ragged_"

_GAUGES = {
    "kept_ratio": "Kept / full KV bytes of a sealed segment, from the head budgets of this rank.",
    "slab_bytes_in_use": "Allocated pages on this rank times bytes per slab; pages of cached prefixes count.",
    "open_bytes_in_use": "Of slab_bytes_in_use, pages that open segments of requests have in addition to their first.",
    "kept_open_bytes_in_use": "Of slab_bytes_in_use, pages with open segments that requests have left behind.",
    "rank_imbalance": "Largest / mean kept bytes of a segment over all ranks, pipeline stages included; 1 if equal.",
}
_COUNTERS = {
    "sealed_segments": "Segments sealed on this rank.",
    "reused_open_tokens": "Tokens of kept open segments with which requests have gone on.",
    "seal_seconds": "Host seconds around sealing on this rank: the work itself on a CPU; on a GPU the time to launch "
    "it, not the time it takes there.",
}


def rank_imbalance(layouts: list[SlabLayout]) -> float:
    """Return the largest / mean kept elements of a segment over the ranks."""
    elems = [layout.slab_elems for layout in layouts]
    return max(elems) * len(elems) / sum(elems)


class RaggedMetrics:
    """The metrics of one rank.

    Args:
        labels: names and values, SGLang's own.
        pool: what they are about; its store counts seals.
        allocator: SGLang's, which hands out the pool's pages.
        rank_imbalance: as `rank_imbalance` gives it.
    """

    def __init__(
        self, labels: dict[str, Any], pool: RaggedTokenToKVPool, allocator: Any, rank_imbalance: float
    ) -> None:
        # prometheus_client decides at its first import whether processes share files, and SGLang sets that up late.
        from prometheus_client import Counter, Gauge

        self._pool, self._allocator = pool, slab_allocator(allocator)
        gauges = _GAUGES | {name: text for feature in pool.observed for name, text in feature.gauges.items()}
        self._gauges = {
            name: Gauge(PREFIX + name, text, labels.keys(), multiprocess_mode="mostrecent").labels(**labels)
            for name, text in gauges.items()
        }
        families = {name: Counter(PREFIX + name, text, labels.keys()) for name, text in _COUNTERS.items()}
        own: dict[str, str] = {}
        for feature in pool.observed:
            for name, text in feature.counters.items():
                own[name] = feature.label
                families[name] = Counter(PREFIX + name, text, (*labels, *([feature.label] if feature.label else [])))
        self._counters = {
            (name, value): families[name].labels(**labels, **({own[name]: value} if value else {}))
            for name, value in self._totals
        }
        self._counted = dict.fromkeys(self._counters, 0.0)
        self._gauges["kept_ratio"].set(pool.sizes.layout.byte_share(pool.sizes.itemsize))
        self._gauges["rank_imbalance"].set(rank_imbalance)
        self.update()

    def update(self) -> None:
        """Write what has changed since the last call."""
        sizes = self._pool.sizes
        pages = (self._allocator.size - self._allocator.available_size()) // sizes.layout.segment
        self._gauges["slab_bytes_in_use"].set(pages * sizes.slab_bytes)
        segments = self._pool.open_segments
        self._gauges["open_bytes_in_use"].set(segments.in_use * sizes.slab_bytes)
        self._gauges["kept_open_bytes_in_use"].set(segments.kept.num_pages * sizes.slab_bytes)
        for feature in self._pool.observed:
            for name in feature.gauges:
                self._gauges[name].set(feature.readings()[name, ""])
        for key, total in self._totals.items():
            self._counters[key].inc(total - self._counted[key])
            self._counted[key] = total

    @property
    def _totals(self) -> dict[tuple[str, str], float]:
        """Return counts by counter name and label value, which is empty for counters without a label."""
        seals = self._pool.store.seal_meter
        totals: dict[tuple[str, str], float] = {
            ("sealed_segments", ""): seals.segments,
            ("reused_open_tokens", ""): self._pool.open_segments.kept.reused_tokens,
            ("seal_seconds", ""): seals.seconds,
        }
        for feature in self._pool.observed:
            totals |= {key: value for key, value in feature.readings().items() if key[0] in feature.counters}
        return totals


def settings(serving: WorkerSettings, pool: RaggedTokenToKVPool) -> dict[str, Any]:
    """Return `ragged` of /server_info: the flags, and the settings that result from them.

    Kept tokens are over the heads of all ranks; slots, tokens and bytes are of the rank that answers, the first.
    """
    plan, size = serving.served_plan, pool.sizes
    layouts = plan.layouts
    share = sum(layout.mean_kept_share for layout in layouts) / len(layouts)
    of_bytes = sum(layout.byte_share(size.itemsize) for layout in layouts) / len(layouts)
    of_features = [one.server_info(plan.settings_of(one.name), pool) for one in serve_features()]
    return {
        "summary": "; ".join(summary(plan, size)),
        "ratio": plan.ratio,
        "segment": plan.segment,
        "scorer": plan.scorer,
        "scorer_weights": serving.scorer_weights,
        "profile": plan.profile,
        "profile_source": plan.source,
        "plan_digest": plan.digest,
        "fairkv": plan.fairkv,
        "kernel": plan.kernel,
        "self_check": None if pool.self_check is None else asdict(pool.self_check),
        # `serve.start_check` writes the result here, in the process with the HTTP server.
        "quality": {"skipped": serving.check} if isinstance(serving.check, str) else None,
        "kept_min": min(int(layout.kept.min()) for layout in layouts),
        "kept_mean": share * plan.segment,
        "kept_median": float(np.median(plan.kept)),
        "kept_max": max(int(layout.kept.max()) for layout in layouts),
        "kept_ratio": share,
        "slab_dtype": plan.form.name,
        "fitted": plan.unfitted is None,
        "kept_bytes_ratio": of_bytes,
        "rank_imbalance": rank_imbalance(plan.slab_layouts),
        "slots": size.num_slots,
        "virtual_tokens": size.max_total_tokens,
        "max_requests": size.max_requests,
        "slab_bytes": size.slab_bytes,
        "open_page_tokens": size.open_pages.tokens,
        "rows_bytes": size.rows_bytes,
        "total_bytes": size.total_bytes,
        **{key: value for info in of_features for key, value in info.items()},
    }


def scheduler_ready(serving: WorkerSettings, original: Callable, scheduler: Any) -> dict[str, Any]:
    """Add the ragged settings to the scheduler's report that it is ready, and create the metrics."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool, layouts = slab_pool(allocator.get_kvcache()), serving.served_plan.slab_layouts
    if scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
        collector = scheduler.metrics_collector
        metrics = RaggedMetrics(collector.labels, pool, allocator, rank_imbalance(layouts))
        setattr(collector, _METRICS, metrics)
        # SGLang writes no metrics after a flush until the next batch, or half a minute later.
        pool.on_flush.append(metrics.update)
    kept = {"open_segments_kept": isinstance(scheduler.tree_cache, OpenRadixCache)}
    return {**original(scheduler), "ragged": settings(serving, pool) | kept}


def controller_ready(original: Callable, controller: Any) -> dict[str, Any]:
    """Pass on the pool's settings from the first ready scheduler, which SGLang's controller of replicas drops."""
    return {**original(controller), "ragged": controller._scheduler_init_infos[0]["ragged"]}


def write_metrics(scheduler: Any) -> None:
    """Write our metrics, where the scheduler reports any."""
    metrics = getattr(getattr(scheduler, "metrics_collector", None), _METRICS, None)
    if metrics is not None:
        metrics.update()


def log_stats(original: Callable, collector: Any, stats: Any) -> None:
    """Write our metrics when SGLang writes those of its scheduler."""
    original(collector, stats)
    metrics = getattr(collector, _METRICS, None)
    if metrics is not None:
        metrics.update()
