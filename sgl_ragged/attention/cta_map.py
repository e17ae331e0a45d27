"""CTA map: how many CTAs (thread blocks) each head gets in decode attention, known ahead of time.

All heads of a request have equally many sealed segments, so a head's load is proportional to its kept count n, and the
CTAs of its heads depend on the layout and the number of CTAs alone: neither on lengths nor on the request. The decode
grid of a layer is (batch, CTAs of the layer); CTA j of a head with s parts takes the j-th of s equal parts of the
head's kept rows of one request, so its load is n / s.

Source: TANGRAM section 4.3, Algorithm 1. Loads are kept tokens per segment of 16 or more tokens; only proportions
matter. Pure numpy, importable without SGLang, without torch and without a GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_ragged.errors import RaggedConfigError

METHODS = ("exact", "algorithm1", "uniform", "none")

BALANCE = 1.10
"""Method "exact" adds waves until a layer takes at most this times the least possible time, if time were load."""


def algorithm1(budgets: np.ndarray, num_ctas: int) -> np.ndarray:
    """TANGRAM's Algorithm 1: every head group gets CTAs in proportion to its budget, each rounded alone.

    The paper leaves open what round() does with ties: here they go up (2.5 gives 3). The counts of a layer need not
    sum to `num_ctas`.

    Args:
        budgets: float [num_layers, num_groups], non-negative, aggregated per group (Phi).
        num_ctas: CTAs to hand out in each layer (N_CTA).

    Returns:
        int64 [num_layers, num_groups]: S = max(1, round(Phi / tau)) with tau = sum(Phi) / N_CTA of the layer; all
        ones where a layer's budgets are all 0.

    Raises:
        RaggedConfigError: budgets are not [layers, groups] or negative, or num_ctas is not positive.
    """
    _check_positive("CTAs per request", num_ctas)
    budgets = np.asarray(budgets, dtype=np.float64)
    if budgets.ndim != 2 or budgets.size == 0 or not np.isfinite(budgets).all() or (budgets < 0).any():
        raise RaggedConfigError(f"budgets must be [layers, groups] and not negative, got shape {budgets.shape}")
    total = budgets.sum(axis=1, keepdims=True)
    # Phi * N / sum, not Phi / (sum / N): rounded once only, so that ties of whole budgets are seen as ties.
    shares = budgets * num_ctas / np.where(total > 0, total, 1.0)
    return np.maximum(1, np.floor(shares + 0.5)).astype(np.int64)


def cta_counts(kept: np.ndarray, resident_ctas: int, batch: int, method: str) -> np.ndarray:
    """Return the CTAs of every head.

    - "exact": the CTAs of the batch run in w whole waves. w waves hold N = floor(w * resident_ctas / batch) CTAs of
      each request. Each head gets one and the next goes to the head with the largest load n / s (ties to the lower
      head) until N are handed out. No division of N has a smaller largest load L: any other gives some head fewer
      parts, and that head's last CTA here was given at a load no smaller than L. w is the least, with a CTA for each
      head, for which w * L, the time of w waves of the largest load, is at most BALANCE times batch * sum(n) /
      resident_ctas, the least possible time. Then the largest load is at most BALANCE times the mean one. `makespan`
      is at most BALANCE, too: there are at most w CTAs per slot, so whenever one starts, some slot has ended at most
      w - 1 of them.
    - "algorithm1": TANGRAM's Algorithm 1 on N = max(1, resident_ctas // batch), every head its own group.
    - "uniform": max(1, N // num_heads) each, the usual number of KV splits; "none": one each.

    Args:
        kept: int [num_layers, num_heads], positive.
        resident_ctas: CTAs that the GPU holds at once, at least 1.
        batch: requests of equal length, at least 1.

    Returns:
        int64 [num_layers, num_heads], at least 1: CTAs of each head of one request.

    Raises:
        RaggedConfigError: unknown method, or kept counts, CTAs or a batch that are not positive.
    """
    kept = _check_kept(kept)
    _check_positive("resident CTAs", resident_ctas)
    _check_positive("batch", batch)
    if method == "exact":
        return np.array([_exact_counts(row, resident_ctas, batch) for row in kept.tolist()], dtype=np.int64)
    num_ctas = max(1, resident_ctas // batch)
    if method == "algorithm1":
        return algorithm1(kept, num_ctas)
    if method == "uniform":
        return np.full_like(kept, max(1, num_ctas // kept.shape[1]))
    if method == "none":
        return np.ones_like(kept)
    raise RaggedConfigError(f"unknown method {method!r} of the CTA map; known: {', '.join(METHODS)}")


def _exact_counts(row: list[int], resident_ctas: int, batch: int) -> list[int]:
    counts, total, kept = [1] * len(row), len(row), sum(row)
    largest_first = [(-float(n), head) for head, n in enumerate(row)]
    heapq.heapify(largest_first)
    waves = -(-len(row) * batch // resident_ctas)
    # This ends: x = waves * resident_ctas / batch is less than N + 1 and L at most kept / (N - heads), so
    # x * L / kept < x / (x - 1 - heads), which is at most 1.1 from x = 11 * (heads + 1) on. So N, too, is less than
    # 11 * (heads + 1) + resident_ctas / batch.
    while True:
        while total < waves * resident_ctas // batch:
            head = largest_first[0][1]
            counts[head] += 1
            total += 1
            heapq.heapreplace(largest_first, (-row[head] / counts[head], head))
        if -largest_first[0][0] * (waves * resident_ctas / batch) / kept <= BALANCE:
            return counts
        waves += 1


def cta_table(counts_row: np.ndarray, kept_row: np.ndarray) -> np.ndarray:
    """Return the work of each CTA of one layer, longest first.

    Args:
        counts_row: int [num_heads], CTAs of each head.
        kept_row: int [num_heads], kept count of each head.

    Returns:
        int32 [num_ctas, 4], num_ctas = sum of the counts: (head, part, parts, place). `place` is where the CTA leaves
        its partial result, head-major: the head's first place (`head_parts`) plus part. Rows are sorted by load
        kept / parts, largest first, those of equal load by place.
    """
    counts = np.asarray(counts_row, dtype=np.int64)
    head = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(head))
    part = place - head_parts(counts)[head, 0]
    order = np.argsort(-(np.asarray(kept_row) / counts)[head], kind="stable")
    return np.stack([head, part, counts[head], place], axis=1)[order].astype(np.int32)


def head_parts(counts_row: np.ndarray) -> np.ndarray:
    """Return the places of each head's partial results, int32 [num_heads, 2]: (first place, parts)."""
    counts = np.asarray(counts_row, dtype=np.int64)
    return np.stack([np.cumsum(counts) - counts, counts], axis=1).astype(np.int32)


def imbalance(kept: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return largest / mean CTA load of each layer, float64 [num_layers]; 1 if all loads are equal.

    Args:
        kept, counts: int [num_layers, num_heads].
    """
    return (kept / counts).max(axis=1) * counts.sum(axis=1) / kept.sum(axis=1)


def makespan(kept: np.ndarray, counts: np.ndarray, batch: int, resident_ctas: int) -> np.ndarray:
    """Return each layer's largest load over the least possible, float64 [num_layers], at least 1.

    The waves model: the CTAs of `batch` requests of equal length start longest first (the batch is the fastest
    varying index of the grid), each in the slot that is free first, on `resident_ctas` slots. Returned is the largest
    load of a slot over the mean load of all slots. It takes no account of what a GPU does when slots stand idle: the
    the other CTAs then share its bandwidth.

    Args:
        kept, counts: int [num_layers, num_heads].
        batch: requests.
        resident_ctas: CTAs that the GPU holds at once.

    Raises:
        RaggedConfigError: batch or resident_ctas is not positive.
    """
    _check_positive("batch", batch)
    _check_positive("resident CTAs", resident_ctas)
    largest = []
    for row, parts in zip(kept, counts, strict=True):
        loads = np.repeat(row / parts, parts * batch)
        slots = [0.0] * resident_ctas
        for load in np.sort(loads)[::-1].tolist():
            heapq.heapreplace(slots, slots[0] + load)
        largest.append(max(slots))
    return np.array(largest) * resident_ctas / (kept.sum(axis=1) * batch)


@dataclass(frozen=True, eq=False)
class CtaMap:
    """CTAs of all heads of all layers for several batch sizes, kept with the layout.

    Args:
        kept: int64 [num_layers, num_heads], the layout's kept counts.
        counts_by_batch: batch bucket -> int64 [num_layers, num_heads], CTAs of each head per request.
        method: one of METHODS.
        resident_ctas: CTAs that the GPU holds at once.
    """

    kept: np.ndarray
    counts_by_batch: Mapping[int, np.ndarray]
    method: str
    resident_ctas: int

    def for_batch(self, batch: int) -> np.ndarray:
        """Return counts int64 [num_layers, num_heads] of the smallest bucket that holds the batch, else the largest."""
        return self.counts_by_batch[
            min((b for b in self.counts_by_batch if b >= batch), default=max(self.counts_by_batch))
        ]

    def most_parts(self, max_batch: int) -> int:
        """Return the most CTAs of one layer over all batches up to `max_batch`, for which partial results need room."""
        return max(batch * int(self.for_batch(batch).sum(axis=1).max()) for batch in range(1, max_batch + 1))


def batch_buckets(most: int) -> list[int]:
    """Return batch sizes to make a map for: all up to 8, then each an eighth larger than the last, up to `most`.

    Waves are full for a bucket's own batch; a smaller one leaves at most an eighth of them empty.
    """
    buckets = [1]
    while buckets[-1] < most:
        buckets.append(min(buckets[-1] + max(1, buckets[-1] // 8), most))
    return buckets


def build_cta_map(kept: np.ndarray, resident_ctas: int, batches: Sequence[int], method: str = "exact") -> CtaMap:
    """Build the CTA map of a layout; batches with equal counts in every layer share one array.

    Args:
        kept: int [num_layers, num_heads], kept counts.
        resident_ctas: CTAs of the decode kernel that the GPU holds at once: SMs * CTAs per SM.
        batches: batch buckets, in any order.
        method: as in `cta_counts`.

    Raises:
        RaggedConfigError: no batches, or one that is not positive; see also `cta_counts`.
    """
    kept = _check_kept(kept)
    if not batches:
        raise RaggedConfigError("a CTA map needs at least one batch size")
    counts_by_batch: dict[int, np.ndarray] = {}
    shared: dict[bytes, np.ndarray] = {}
    for batch in sorted(set(batches)):
        counts = cta_counts(kept, resident_ctas, batch, method)
        counts_by_batch[batch] = shared.setdefault(counts.tobytes(), counts)
    for array in (kept, *shared.values()):
        array.setflags(write=False)
    return CtaMap(kept, counts_by_batch, method, resident_ctas)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise RaggedConfigError(f"{name} must be at least 1, not {value}")


def _check_kept(kept: np.ndarray) -> np.ndarray:
    kept = np.asarray(kept)
    if kept.ndim != 2 or kept.size == 0 or kept.dtype.kind not in "iu" or (kept < 1).any():
        raise RaggedConfigError(f"kept counts must be positive integers [layers, heads], got {kept.dtype} {kept.shape}")
    return kept.astype(np.int64)
