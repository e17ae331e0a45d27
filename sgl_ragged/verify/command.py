"""`sgl-ragged verify`: its flags, its table and its exit status."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.comparison import Comparison, PromptResult, compare
from sgl_ragged.verify.distributions import Distance
from sgl_ragged.verify.prompts import built_in_prompts, read_prompts
from sgl_ragged.verify.running_server import RunningServer

MAX_KL = 0.05
MAX_OWN_KL = 1e-3


def add_verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the server to verify")
    parser.add_argument(
        "--against", metavar="URL", help="a server of the same model to compare with, SGLang's pool say"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="your own prompts: a text, or .jsonl with messages, prompt, text or input_ids on each line "
        "[four built-in texts]",
    )
    parser.add_argument(
        "--max-kl", type=float, default=MAX_KL, help=f"exit 1 if the mean KL to --against is larger [{MAX_KL}]"
    )
    parser.add_argument(
        "--max-own-kl",
        type=float,
        default=MAX_OWN_KL,
        help=f"exit 1 if that of hits to misses, or of decode to prefill, is larger [{MAX_OWN_KL}]",
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of the table")


def verify(options: argparse.Namespace) -> None:
    """Ask, print, and end the process with status 1 beyond a limit. Raises RaggedConfigError as `compare` does."""
    for name in ("max_kl", "max_own_kl"):
        if not getattr(options, name) > 0:
            raise RaggedConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} must be positive")
    prompts = built_in_prompts() if options.prompts is None else read_prompts(options.prompts)
    against = None if options.against is None else RunningServer(options.against)

    def report(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    found = compare(RunningServer(options.url), against, prompts, report)
    report("")
    faults = limits_exceeded(found, options.max_kl, options.max_own_kl)
    print(json.dumps(found.as_json() | {"faults": faults}) if options.json else table(found))
    for line in faults:
        print(f"sgl-ragged: {line}", file=sys.stderr)
    if faults:
        sys.exit(1)


def limits_exceeded(found: Comparison, max_kl: float, max_own_kl: float) -> list[str]:
    """Return a line for each mean that exceeds its limit; NaN does."""
    limits = (
        ("to_reference", "KL to --against", "--max-kl", max_kl),
        ("hit_to_miss", "KL of cache hits to misses", "--max-own-kl", max_own_kl),
        ("decode_to_prefill", "KL of decode to prefill", "--max-own-kl", max_own_kl),
    )
    return [
        f"{name} is {mean.kl:.2g}, and {flag} allows {limit:g}"
        for kind, name, flag, limit in limits
        if (mean := found.mean(kind)) is not None and not mean.kl <= limit
    ]


def table(found: Comparison) -> str:
    """Return the table that people read."""
    lines = [
        f"{'prompt':<16} {'tokens':>7} {'KL':>9} {'delta NLL':>10} {'same top-1':>10} {'hit/miss':>9} {'decode':>9}"
    ]
    lines += [_row(one.name, one.tokens, one) for one in found.prompts]
    if len(found.prompts) > 1:
        means = {kind: found.mean(kind) for kind in ("to_reference", "hit_to_miss", "decode_to_prefill")}
        decode = means["decode_to_prefill"]
        assert decode is not None, "every prompt is decoded from"
        total = sum(one.tokens for one in found.prompts)
        lines.append(
            _row("all", total, PromptResult("all", total, means["to_reference"], means["hit_to_miss"], decode))
        )
    lines.append("")
    if found.against is None:
        lines.append(
            "No reference: pass --against URL of a server with SGLang's pool to measure what compression costs."
        )
    else:
        lines.append(f"KL, delta NLL and same top-1 from {found.against}, after each prompt's first segment; nats.")
    lines.append("hit/miss: KL of predictions with the prefix from the cache to those without. decode: to prefill.")
    for url, cache in ((found.url, found.cache), (found.against, found.against_cache)):
        if cache:
            lines.append(f"{url}: {_cache_line(cache)}")
    return "\n".join(lines)


def _row(name: str, tokens: int, one: PromptResult) -> str:
    reference = one.to_reference
    shown = ("-", "-", "-") if reference is None else _shown(reference)
    hit = "-" if one.hit_to_miss is None else f"{one.hit_to_miss.kl:.1e}"
    return (
        f"{name[:16]:<16} {tokens:>7} {shown[0]:>9} {shown[1]:>10} {shown[2]:>10} {hit:>9} "
        f"{one.decode_to_prefill.kl:>9.1e}"
    )


def _shown(distance: Distance) -> tuple[str, str, str]:
    return f"{distance.kl:.5f}", f"{distance.nll:+.4f}", f"{distance.same_top1:.3f}"


def _cache_line(cache: dict[str, object]) -> str:
    tokens, kept, dtype = cache.get("tokens"), cache.get("kept_bytes_ratio"), cache.get("slab_dtype")
    line = f"{tokens} tokens in the cache" if tokens is not None else "size of the cache unknown"
    if isinstance(kept, float):
        line += f", {kept:.3f} of the bytes of a 16-bit cache, slabs {dtype}"
    return line
