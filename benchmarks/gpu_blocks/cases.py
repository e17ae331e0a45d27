"""What is measured: models, shapes and cases, the most informative first in each list. Plain numpy.

The dry run and the measurement take their cases from here, so that what is computed ahead is what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from sgl_ragged.mem_pool.slab_format import FORMATS, INT8, WIDE, SlabFormat
from sgl_ragged.profiles.budgets import fit_kept

PROFILES = Path(__file__).parents[2] / "tests" / "data" / "measured_profiles.npz"
SEGMENT = 256
ITEMSIZE = 2
"""Bytes of a bf16 element, the dtype of all timed cases."""


@dataclass(frozen=True)
class Model:
    """Attention shapes of one model on one rank, and whose measured shares its heads take.

    `profile` is a key of measured_profiles.npz in scope `layer`, so that every layer meets the ratio by itself.
    `layers` are the measured layers, spread over the depth. `one_head`: the rank holds one head of each layer.
    """

    name: str
    profile: str
    layers: tuple[int, ...]
    heads: int
    q_per_kv: int
    head_dim: int = 128
    segment: int = SEGMENT
    one_head: bool = False


LLAMA_8B = Model("Llama-3.1-8B", "keydiff/llama-3.1-8b-instruct/layer/evictable", (2, 11, 20, 29), 8, 4)
QWEN3_4B = Model("Qwen3-4B", "keydiff/qwen3-4b-instruct-2507/layer/evictable", (3, 12, 21, 32), 8, 4)
# No shares of the 70B model are at hand: layer i takes one head of layer i of the 8B model, heads of low to high rank.
LLAMA_70B = Model("Llama-70B TP8", LLAMA_8B.profile, LLAMA_8B.layers, 1, 8, one_head=True)
MODELS = (LLAMA_8B, LLAMA_70B, QWEN3_4B)

RATIOS = (0.25, 0.5, 1.0)
PREFILL_RATIO = 0.25


@cache
def _shares(profile: str) -> np.ndarray:
    with np.load(PROFILES) as archive:
        return archive[profile]


def kept_counts(model: Model, ratio: float, layers: int | None = None, all_layers: bool = False) -> np.ndarray:
    """Kept counts n of the model's measured layers: int64 [layers, heads].

    Args:
        layers: only so many of them.
        all_layers: every layer of the profile instead.
    """
    numbers = slice(None) if all_layers else list(model.layers[:layers])
    kept = fit_kept(_shares(model.profile)[numbers], ratio, model.segment, "layer")
    if not model.one_head:
        return kept
    rank = (2 * np.arange(len(kept)) + 1) * kept.shape[1] // (2 * len(kept))
    return np.take_along_axis(np.sort(kept, axis=1), rank[:, None], axis=1)


@dataclass(frozen=True)
class Slabs:
    """What a decode case keeps and how: a format of slabs, or a whole cache in FP8 E4M3.

    `ratio` is that of tokens; where `of_bytes`, of the bytes of an uncompressed bf16 cache, tails left aside.
    """

    ratio: float
    form: SlabFormat = WIDE
    fp8: bool = False
    of_bytes: bool = False

    @property
    def stored(self) -> str:
        return "fp8" if self.fp8 else self.form.name

    @property
    def plain(self) -> bool:
        """Whether all is bf16."""
        return self.stored == WIDE.name

    @property
    def name(self) -> str:
        if self.plain:
            return f"{self.ratio:g}"
        return f"{self.ratio:g} of the {'bytes' if self.of_bytes else 'tokens'} in {self.stored}"

    @property
    def itemsize(self) -> int:
        """Bytes of a number in tails."""
        return 1 if self.fp8 else ITEMSIZE

    def slab_bytes(self, kept: np.ndarray, head_dim: int) -> int:
        """Bytes of the parts of a slab, by the tokens that each keeps."""
        rows = int(kept.sum()) * self.form.row_bytes(head_dim, self.itemsize)
        return rows + kept.size * self.form.header_bytes(head_dim, self.itemsize)

    def kept(self, model: Model, layers: int | None = None) -> np.ndarray:
        """`kept_counts` of the model."""
        share = self.ratio
        if self.of_bytes:
            dim = model.head_dim
            header = self.form.header_bytes(dim, self.itemsize) / model.segment
            share = (share * 2 * dim * ITEMSIZE - header) / self.form.row_bytes(dim, self.itemsize)
        return kept_counts(model, min(1.0, share), layers)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of the CTA map that are timed. At ratio 1 all heads are equal, so all methods but `none` agree."""
        return ("exact", "uniform", "algorithm1", "none") if self.plain and self.ratio < 1 else ("exact",)


WIDE_SLABS = tuple(Slabs(ratio) for ratio in RATIOS)
NARROW = (Slabs(0.25, FORMATS["k8v4"]), Slabs(0.25, FORMATS["k6v4"]), Slabs(0.25, INT8), Slabs(0.25, fp8=True))
NARROW_SLABS = (Slabs(0.25), *NARROW, *(replace(one, of_bytes=True) for one in NARROW))
"""Beside a quarter of the tokens in bf16: as many in fewer bytes, and more in as many bytes."""


@dataclass(frozen=True)
class DecodeCase:
    """Decode attention of `batch` requests of equal length."""

    model: Model
    context: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model.name}, {_short(self.context)}, batch {self.batch}"

    @property
    def length(self) -> int:
        """Tokens of each request: half an open segment, as it is on average, and sealed segments before it."""
        return self.context - self.model.segment // 2

    @property
    def sealed(self) -> int:
        return (self.length - 1) // self.model.segment

    @property
    def tail(self) -> int:
        """Tokens of the open segment."""
        return self.length - self.sealed * self.model.segment


K = 1024
DECODE_CASES = tuple(
    DecodeCase(model, context, batch)
    for model, context, batches in (
        (LLAMA_8B, 32 * K, (4, 16, 1, 64)),
        (LLAMA_8B, 128 * K, (1, 16, 4)),
        (LLAMA_70B, 32 * K, (16, 1, 64, 4)),
        (QWEN3_4B, 32 * K, (4, 16)),
        (LLAMA_8B, 8 * K, (16, 1, 64, 4)),
        (LLAMA_70B, 128 * K, (16, 1, 64, 4)),
        (QWEN3_4B, 128 * K, (4, 16)),
        (LLAMA_8B, 128 * K, (64,)),
        (QWEN3_4B, 32 * K, (1, 64)),
        (LLAMA_70B, 8 * K, (16, 64, 4, 1)),
        (QWEN3_4B, 8 * K, (16, 1, 64, 4)),
        (QWEN3_4B, 128 * K, (1, 64)),
    )
    for batch in batches
)
FORMAT_CASES = (
    DecodeCase(LLAMA_8B, 32 * K, 16),
    DecodeCase(LLAMA_8B, 128 * K, 4),
    DecodeCase(LLAMA_8B, 32 * K, 1),
    DecodeCase(LLAMA_70B, 32 * K, 16),
)


@dataclass(frozen=True)
class ExtendCase:
    """Prefill of one chunk for each of `requests` requests that have `prefix` tokens, a multiple of the segment."""

    model: Model
    prefix: int
    chunk: int
    requests: int = 1

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.requests} x {self.chunk} after {_short(self.prefix)}"

    @property
    def length(self) -> int:
        return self.prefix + self.chunk

    @property
    def tokens(self) -> int:
        return self.requests * self.chunk


EXTEND_CASES = (
    ExtendCase(LLAMA_8B, 32 * K, 2 * K),
    ExtendCase(LLAMA_8B, 128 * K, 2 * K),
    ExtendCase(LLAMA_8B, 32 * K, 64),
    ExtendCase(LLAMA_8B, 128 * K, 64),
    ExtendCase(LLAMA_8B, 32 * K, 512, requests=4),
    ExtendCase(LLAMA_70B, 32 * K, 2 * K),
)


@dataclass(frozen=True)
class SealCase:
    """Sealing a chunk's segments in one layer, for some scorers; and pending segments over all layers."""

    model: Model
    chunk: int
    scorers: tuple[str, ...] = ("keydiff", "key_norm", "value_key_norm")
    pending: tuple[int, ...] = (1, 8, 64)

    @property
    def segments(self) -> int:
        return self.chunk // self.model.segment


SEAL_CASE = SealCase(LLAMA_8B, 2 * K)


@dataclass(frozen=True)
class AppendCase:
    """Copying tokens to tails: one token for each of a batch of requests, or the remainder of one chunk."""

    model: Model
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)

    @property
    def remainder(self) -> int:
        return self.model.segment - 1


APPEND_CASE = AppendCase(LLAMA_8B)


@dataclass(frozen=True)
class BesideCase:
    """What a step does beside attention.

    hidden, features: of gates, as calibration trains them. queries: of a codebook, per query head and all of them.
    overlay: tokens that a head is given. interval: of a pivot's questions, tokens. slabs: copied to the
    host at a time. programs: of such copies.
    """

    model: Model
    batches: tuple[int, ...] = (1, 16, 64)
    context: int = 32 * K
    chunk: int = 2 * K
    hidden: int = 4096
    features: int = 128
    queries: int = 336
    overlay: int = 128
    interval: int = 16
    slabs: int = 16
    programs: tuple[int, ...] = (2, 4, 8, 16, 32)


BESIDE_CASE = BesideCase(LLAMA_8B)


@dataclass(frozen=True)
class OverheadCase:
    """Host time of describing batches; requests of `context` tokens."""

    model: Model
    context: int = 32 * K
    batches: tuple[int, ...] = (1, 64)
    chunk: int = 2 * K


OVERHEAD_CASE = OverheadCase(LLAMA_8B)


@dataclass(frozen=True)
class CorrectnessCase:
    """All operations on small requests with ragged ends, against float64. `dtype`: of queries, a name of torch's.

    form: of slabs. cache: the name of an FP8 cache's dtype; the queries' where it is empty.
    """

    dtype: str
    q_per_kv: int
    head_dim: int
    scorer: str
    method: str
    segment: int = SEGMENT
    kept: tuple[tuple[int, ...], ...] = ((16, 80, 144, 256), (256, 64, 64, 32))
    form: SlabFormat = WIDE
    cache: str = ""

    @property
    def name(self) -> str:
        stored = f"-{self.form.name}" if self.form.quantised else f"-{self.cache}" if self.cache else ""
        return f"{self.dtype}-q{self.q_per_kv}-d{self.head_dim}-{self.scorer}-{self.method}{stored}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompts."""
        return 1, self.segment - 1, self.segment, self.segment + 1, 10 * self.segment + 7


CORRECTNESS_CASES = (
    CorrectnessCase("bfloat16", 4, 128, "keydiff", "exact"),
    CorrectnessCase("bfloat16", 8, 128, "key_norm", "uniform"),
    CorrectnessCase("bfloat16", 4, 128, "keydiff", "exact", form=FORMATS["k8v4"]),
    CorrectnessCase("bfloat16", 4, 128, "keydiff", "exact", cache="float8_e4m3fn"),
    CorrectnessCase("bfloat16", 4, 80, "keydiff", "exact"),
    CorrectnessCase("bfloat16", 1, 64, "value_key_norm", "algorithm1"),
    CorrectnessCase("bfloat16", 8, 128, "key_norm", "uniform", form=INT8),
    CorrectnessCase("bfloat16", 4, 96, "value_key_norm", "exact", form=FORMATS["k8v4"]),
    CorrectnessCase("bfloat16", 16, 256, "keydiff", "exact"),
    CorrectnessCase("bfloat16", 5, 128, "value_key_norm", "none"),
    CorrectnessCase("float16", 4, 128, "keydiff", "algorithm1"),
    CorrectnessCase("float32", 4, 128, "keydiff", "exact"),
    CorrectnessCase("bfloat16", 4, 64, "keydiff", "exact", 128, ((16, 48, 80, 128), (128, 64, 64, 32))),
    CorrectnessCase("float16", 8, 64, "value_key_norm", "uniform"),
    CorrectnessCase("bfloat16", 2, 256, "key_norm", "exact"),
    CorrectnessCase("float32", 1, 64, "key_norm", "none"),
    CorrectnessCase("float32", 5, 256, "value_key_norm", "exact"),
)


def _short(tokens: int) -> str:
    return f"{tokens // K}K" if tokens % K == 0 else str(tokens)
