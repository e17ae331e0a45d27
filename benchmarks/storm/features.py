"""Features that storms combine, and the command line of a server with some of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.launch import LAUNCH_SERVER
from benchmarks.harness.unpinned_launch import UNPINNED_LAUNCH
from benchmarks.storm.material import ADAPTERS, GEMMA3, GPT_OSS, RANK, RECALL, Material

POOL_SEGMENTS, CONTEXT_TOKENS = 32, 1600
"""Of a storm's server: fewer tokens than its clients ask for at a time, and as many as the longest prompt needs beside
what is reserved for its open segments."""

SEGMENT = 64
"""Tokens, of servers that ask for no other."""

QUIET_TOKENS = 4096
"""Of a quiet server's pool."""

RUNNING = 7
"""Requests at a time, half of the clients."""


@dataclass(frozen=True)
class Feature:
    """What a user switches on by some flags.

    slot: features of one slot are settings of one flag: a server has one of them.
    flags: {names} in them are filled in by `Server`.
    model, scorer: where the feature is one. segment: tokens, where the feature says so.
    shares: whether requests share prefixes.
    inexact: why answers may differ from a quiet server's, for features that say so; "" for the others.
    """

    name: str
    text: str
    slot: str = ""
    flags: tuple[str, ...] = ()
    model: str | None = None
    scorer: str | None = None
    segment: int | None = None
    inexact: str = ""
    shares: bool = True

    @property
    def hides(self) -> bool:
        """Whether a storm with it says less about the other features: answers may differ, or nothing is shared."""
        return bool(self.inexact) or not self.shares


_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through")
_FP8 = "two computations of a key that differ in its last bit may be rounded to neighbours (docs/kernels.md)"
_CODES = "two computations of a key that differ in its last bit may be rounded to neighbours (docs/slab-formats.md)"
_CHAINS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", "5"),
)
_FEW_BYTES = ("--ragged-ratio", "0.1")
"""Of more, codes would keep every token beside a cache in float32."""
_CODEC = "a restored prefix is not what was served (docs/host-tier.md)"

FEATURES: dict[str, Feature] = {
    one.name: one
    for one in (
        Feature("keydiff", "scorer of keys alone", "scorer", scorer="keydiff"),
        Feature("snapkv", "scorer with queries beside the tails", "scorer", scorer="snapkv"),
        Feature("expected-attention", "scorer with statistics", "scorer", scorer="expected_attention"),
        Feature("gate", "scorer of hidden states", "scorer", scorer="gate"),
        Feature(
            "gpt-oss",
            "sliding windows and sinks",
            "model",
            # On CPUs SGLang cannot run the kernels that it takes by itself for these experts.
            ("--moe-runner-backend", "triton", "--swa-full-tokens-ratio", "{windows}"),
            model=GPT_OSS,
        ),
        Feature("gemma3", "sliding windows", "model", ("--swa-full-tokens-ratio", "{windows}"), model=GEMMA3),
        Feature("fp8-e4m3", "FP8 cache", "cache", ("--kv-cache-dtype", "fp8_e4m3"), inexact=_FP8),
        Feature("fp8-e5m2", "FP8 cache", "cache", ("--kv-cache-dtype", "fp8_e5m2"), inexact=_FP8),
        Feature("int8", "slabs in 8 bits", "slabs", ("--ragged-slab-dtype", "int8", *_FEW_BYTES), inexact=_CODES),
        Feature("k8v4", "slabs in 8 and 4 bits", "slabs", ("--ragged-slab-dtype", "k8v4", *_FEW_BYTES), inexact=_CODES),
        Feature("k6v4", "slabs in 6 and 4 bits", "slabs", ("--ragged-slab-dtype", "k6v4", *_FEW_BYTES), inexact=_CODES),
        Feature("k4v4", "slabs in 4 bits", "slabs", ("--ragged-slab-dtype", "k4v4", *_FEW_BYTES), inexact=_CODES),
        Feature("fit", "kept keys and values are fitted", flags=("--ragged-fit", "auto")),
        Feature("drafts", "chains of drafts by n-grams", flags=_CHAINS),
        Feature("history", "bounded histories", flags=("--ragged-history", "{history}")),
        Feature("tier", "slabs in host memory", "tier", _TIER),
        Feature(
            "disk",
            "slabs in host memory and on disk",
            "tier",
            (*_TIER, "--hicache-storage-backend", "file", "--file-storage-path", "{pages}"),
        ),
        Feature("recompute", "segments computed while others load", "restore", ("--ragged-restore", "recompute")),
        Feature("codec-fp8", "host tier in 8 bits", "codec", ("--ragged-host-codec", "fp8"), inexact=_CODEC),
        Feature("codec-shared", "host tier shares layers", "codec", ("--ragged-host-codec", "shared"), inexact=_CODEC),
        Feature(
            "reservoir",
            "retrieval of what heads dropped",
            flags=("--ragged-reservoir", "256MiB", "--ragged-overlay", "24"),
            inexact="a retraction, and a chunk that ends in a prompt's last tokens, change answers (docs/retrieval.md)",
        ),
        Feature(
            "lora",
            "requests with adapters and without",
            flags=(
                *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK)),
                *("--max-loras-per-batch", str(ADAPTERS + 1), "--lora-paths", "{adapters}"),
            ),
        ),
        Feature("mixed-chunk", "decode within prefill", flags=("--enable-mixed-chunk",)),
        Feature("small-chunk", "chunks of one segment", "chunk", ("--chunked-prefill-size", "{segment}")),
        Feature("odd-chunk", "chunks of three segments", "chunk", ("--chunked-prefill-size", "{three}")),
        Feature("unaligned-chunk", "chunks that end in segments", "chunk", ("--chunked-prefill-size", "100")),
        Feature("fcfs", "first come, first served", "policy", ("--schedule-policy", "fcfs")),
        Feature("lpm", "longest prefix first", "policy", ("--schedule-policy", "lpm")),
        Feature("dfs-weight", "depth first through the tree", "policy", ("--schedule-policy", "dfs-weight")),
        Feature("priority", "requests that preempt others", "policy", ("--enable-priority-scheduling",)),
        Feature("no-overlap", "scheduler and device take turns", flags=("--disable-overlap-schedule",)),
        Feature("no-radix", "nothing is shared", flags=("--disable-radix-cache",), shares=False),
        Feature("tp2", "two ranks", flags=("--tp", "2")),
        # At a lower ratio all heads would keep a segment's last 16 tokens, and nothing could be chosen.
        Feature("segment-32", "short segments", flags=("--ragged-ratio", "0.6"), segment=32),
        Feature("ratio-1", "nothing is dropped", flags=("--ragged-ratio", "1")),
    )
}

HIDING = frozenset(one.name for one in FEATURES.values() if one.hides)

USUAL = ("keydiff", "fcfs")
"""What a server has that asks for nothing else in these slots."""

NEEDS_TIER = ("recompute", "codec-fp8", "codec-shared")


def chosen(names: Sequence[str]) -> tuple[Feature, ...]:
    """The features, with what they need and with what a server has anyway, in the order of FEATURES.

    Raises:
        SettingsError: an unknown name, or two of one slot.
    """
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        raise SettingsError(f"unknown features {', '.join(unknown)}; known: {', '.join(FEATURES)}")
    taken = {FEATURES[name] for name in names}
    if not {"tier", "disk"} & {one.name for one in taken} and set(NEEDS_TIER) & set(names):
        taken.add(FEATURES["tier"])
    slots = {one.slot for one in taken}
    taken |= {FEATURES[name] for name in USUAL if FEATURES[name].slot not in slots}
    found = tuple(one for one in FEATURES.values() if one in taken)
    for one in found:
        both = [other.name for other in found if other.slot and other.slot == one.slot]
        if len(both) > 1:
            raise SettingsError(f"{' and '.join(both)} are settings of the same flag: choose one of them")
    return found


@dataclass(frozen=True)
class ServerSettings:
    """A server to start: model folder, flags, environment; and the names that requests may give for adapters."""

    model: Path
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()

    @property
    def launcher(self) -> tuple[str, ...]:
        return UNPINNED_LAUNCH if self.adapters else LAUNCH_SERVER


STRICT = {
    # SGLang's own accounting after every batch, not only when idle.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
RETRACTING = {
    # Retractions for certain, beside those that the full pool brings.
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "20",
}


def server_settings(features: Sequence[Feature], material: Material, pages: Path, *, quiet: bool) -> ServerSettings:
    """The server of a storm, or a quiet one: the same flags, a larger pool, and no retractions.

    pages: folder for what goes to disk.
    """
    names = {one.name for one in features}
    model = next((one.model for one in features if one.model), RECALL)
    scorer = next(one.scorer for one in features if one.scorer)
    segment = next((one.segment for one in features if one.segment), SEGMENT)
    adapters = tuple(f"adapter{number}" for number in range(ADAPTERS)) if "lora" in names else ()
    profile = material.profile(model, scorer, segment)
    values = {
        "segment": str(segment),
        "three": str(3 * segment),
        "history": "512",
        "windows": "1" if quiet else "0.7",
        "pages": str(pages),
    }
    flags = [
        *("--dtype", "float32", "--skip-tokenizer-init", "--sleep-on-idle", "--context-length", str(CONTEXT_TOKENS)),
        *("--kv-pool", "ragged", "--ragged-ratio", "0.3", "--ragged-segment", str(segment), "--kv-bytes", "256MiB"),
        *("--ragged-slab-dtype", "wide", "--ragged-fit", "none"),
        *("--max-total-tokens", str(QUIET_TOKENS if quiet else POOL_SEGMENTS * SEGMENT)),
        *("--max-running-requests", str(RUNNING), "--chunked-prefill-size", "256"),
        # Admits more than will fit, so that the pool fills up.
        *("--schedule-conservativeness", "0.05"),
    ]
    if "codec-shared" in names:
        # Layers can be shared where heads keep equally many tokens.
        flags += ["--ragged-profile", "uniform", "--ragged-scorer", scorer]
        flags += ["--ragged-scorer-weights", str(profile)] if scorer in ("gate", "expected_attention") else []
    else:
        flags += ["--ragged-profile", str(profile)]
    for one in features:
        for flag in one.flags:
            if flag == "{adapters}":
                flags += [f"{name}={path}" for name, path in zip(adapters, material.adapters(model), strict=True)]
            else:
                flags.append(flag.format(**values))
    env = dict(STRICT if quiet else STRICT | RETRACTING)
    if "tp2" in names:
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    return ServerSettings(material.model(model), tuple(flags), env, adapters)
