"""Bytes, floating-point operations, and the least time in which a GPU can do them. Plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.gpu_blocks.cases import ITEMSIZE, DecodeCase, ExtendCase, Model, Slabs
from sgl_ragged.mem_pool.open_pages import OpenPages

REPLAY_BYTES = 256 << 20
"""One replay of a timed graph reads at least this much, several times the 50 to 60 MB of an L2 cache."""

COPY_BANDWIDTH = 4.3e12
"""Bytes per second that a device-to-device copy moves on an H200, reads plus writes; for the dry run alone."""

TENSOR_RATE = 989e12
"""Dense bf16 FLOP per second on the H200's data sheet; for the dry run alone."""


@dataclass(frozen=True)
class Work:
    """The least work of one call: bytes moved once each, and floating-point operations."""

    bytes: int
    flop: int

    def floor_us(self, bandwidth: float = COPY_BANDWIDTH, rate: float = TENSOR_RATE) -> float:
        """Microseconds of the slower of the two, in bytes and FLOP per second."""
        return 1e6 * max(self.bytes / bandwidth, self.flop / rate)

    def memory_floor_us(self, bandwidth: float = COPY_BANDWIDTH) -> float:
        return 1e6 * self.bytes / bandwidth


def full_decode_work(case: DecodeCase) -> Work:
    """`decode_work` over an uncompressed bf16 cache."""
    return decode_work(case, np.full(case.model.heads, case.model.segment), Slabs(1.0))


def decode_work(case: DecodeCase, kept_row: np.ndarray, slabs: Slabs) -> Work:
    """One layer of decode attention: keys and values that the query sees, queries and output.

    Args:
        kept_row: int [heads].
    """
    model = case.model
    sealed, tail = case.sealed * int(kept_row.sum()), model.heads * case.tail
    seen = case.sealed * slabs.slab_bytes(kept_row, model.head_dim) + tail * 2 * model.head_dim * slabs.itemsize
    query_elements = case.batch * model.heads * model.q_per_kv * model.head_dim
    return Work(
        bytes=case.batch * seen + ITEMSIZE * 2 * query_elements,
        flop=4 * case.batch * (sealed + tail) * model.q_per_kv * model.head_dim,
    )


def extend_work(case: ExtendCase, kept_row: np.ndarray | None) -> Work:
    """One layer of a chunk's attention: pairs of query and key that are not masked; history, chunk and output once."""
    model, segment = case.model, case.model.segment
    chunk_pairs = case.chunk * (case.chunk + 1) // 2
    if kept_row is None:
        rows = model.heads * case.prefix
        pairs = model.heads * (case.chunk * case.prefix + chunk_pairs)
    else:
        total = int(kept_row.sum())
        position = case.prefix + np.arange(case.chunk)
        sealed = position // segment
        rows = int(sealed.max()) * total
        pairs = int(sealed.sum()) * total + model.heads * int((position % segment + 1).sum())
    own = case.tokens * model.heads * model.head_dim * (2 + 2 * model.q_per_kv)
    return Work(
        bytes=ITEMSIZE * (case.requests * rows * 2 * model.head_dim + own),
        flop=4 * case.requests * pairs * model.q_per_kv * model.head_dim,
    )


def mean_work(works: list[Work]) -> Work:
    return Work(*(round(sum(getattr(w, field) for w in works) / len(works)) for field in ("bytes", "flop")))


def seal_work(model: Model, segments: int, kept: np.ndarray, scorer: str, *, staged: bool = False) -> Work:
    """Sealing segments of the layers in `kept` [layers, heads]: what is scored once, kept rows read and written.

    Args:
        staged: whether their own pages, which are as large as what is kept, are copied first.
    """
    scored = segments * kept.size * model.segment * model.head_dim * (2 if scorer == "value_key_norm" else 1)
    rows = segments * int(kept.sum()) * model.head_dim
    return Work(bytes=ITEMSIZE * (scored + (8 if staged else 4) * rows), flop=0)


def append_work(model: Model, tokens: int) -> Work:
    return Work(bytes=ITEMSIZE * 4 * tokens * model.heads * model.head_dim, flop=0)


@dataclass(frozen=True)
class DecodeExtent:
    """How a decode case is laid out in memory.

    layers: measured layers, fewer than the model's where memory is short.
    copies: by what is kept, how many batches with slabs of their own each replay goes through.
    full_calls: calls per replay over the uncompressed cache, each with a cache of its own.
    """

    layers: int
    copies: dict[Slabs, int]
    full_calls: int
    bytes: int


def fit_decode(
    case: DecodeCase, variants: tuple[Slabs, ...], memory: int, replay_bytes: int = REPLAY_BYTES
) -> DecodeExtent | str:
    """The most layers that fit `memory` bytes, and what goes with them, or the reason why not even one layer fits.

    Args:
        variants: what is held in memory at once, beside the uncompressed cache.
    """
    model = case.model
    full = full_decode_work(case).bytes
    full_calls = max(1, -(-replay_bytes // full))
    needed = 0
    for layers in range(len(model.layers), 0, -1):
        copies, needed = {}, full_calls * full
        for one in variants:
            kept = one.kept(model, layers)
            once = sum(decode_work(case, row, one).bytes for row in kept)
            copies[one] = max(1, -(-replay_bytes // once))
            rows = case.batch * copies[one]
            slab = one.slab_bytes(kept, model.head_dim)
            pages = OpenPages.of(model.segment, slab, kept.size * 2 * model.head_dim * one.itemsize)
            # As `stage.make_stage` gives them out.
            needed += rows * (case.sealed + 1 + 2 * pages.most) * slab
        if needed <= memory:
            return DecodeExtent(layers, copies, full_calls, needed)
    held = ", ".join(one.name for one in variants)
    return f"one layer at ratios {held} needs {needed / 1e9:.0f} GB of {memory / 1e9:.0f}"
