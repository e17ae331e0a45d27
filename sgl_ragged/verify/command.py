"""`sgl-ragged verify`: its flags, its table and its exit status."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile_choice import UNIFORM
from sgl_ragged.verify.comparison import Comparison, PromptResult, Reference, compare
from sgl_ragged.verify.distributions import Distance
from sgl_ragged.verify.limits import MAX_KL, MAX_OWN_KL, MEASURED_FACTOR, allowed_kl, limits_exceeded
from sgl_ragged.verify.profile_reference import ProfileReference
from sgl_ragged.verify.prompts import TokenizedPrompt, built_in_prompts, read_prompts
from sgl_ragged.verify.running_server import RunningServer, ServersApart


def add_verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the server to verify, or a router")
    parser.add_argument("--decode", metavar="URL", help="the decode server, where --url is the prefill server")
    parser.add_argument(
        "--against", metavar="URL", help="a server of the same model to compare with, such as one with SGLang's pool"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="a profile with a reference, to compare with what calibration recorded of the uncompressed model "
        "[the server's, where this machine has the file]",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="your own prompts: a text, or .jsonl with messages, prompt, text or input_ids on each line "
        "[four built-in texts]",
    )
    parser.add_argument(
        "--max-kl",
        type=float,
        help=f"exit 1 if the mean KL to the reference is larger [{MEASURED_FACTOR} times what calibration measured at "
        f"the server's ratio; else {MAX_KL}]",
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
        limit = getattr(options, name)
        # The negation refuses NaN, too.
        if limit is not None and not limit > 0:
            raise RaggedConfigError(f"--{name.replace('_', '-')} {limit} must be positive")
    server = RunningServer(options.url) if options.decode is None else ServersApart(options.url, options.decode)
    reference, prompts = choose_reference(server, options)

    def report(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    found = compare(server, reference, prompts, report)
    report("")
    measured = _measured_kl(reference, found)
    max_kl = allowed_kl(measured) if options.max_kl is None else options.max_kl
    faults = limits_exceeded(found, max_kl, options.max_own_kl)
    if options.json:
        print(json.dumps(found.as_json() | {"measured_kl": measured, "max_kl": max_kl, "faults": faults}))
    else:
        print(table(found, measured))
    for line in faults:
        print(f"sgl-ragged: {line}", file=sys.stderr)
    if faults:
        sys.exit(1)


def choose_reference(
    server: RunningServer, options: argparse.Namespace
) -> tuple[Reference | None, list[TokenizedPrompt]]:
    """Return what to compare with, and the prompts.

    Raises:
        RaggedConfigError: flags exclude each other, a file cannot be read, or the server does not answer.
    """
    if options.profile is not None and (options.against is not None or options.prompts is not None):
        other = "--against" if options.against is not None else "--prompts"
        raise RaggedConfigError(f"--profile has its own texts and predictions, so {other} has no effect; remove one")
    recorded = None
    if options.profile is not None:
        recorded = ProfileReference.from_file(options.profile)
    elif options.against is None and options.prompts is None:
        recorded = _reference_of(server)
    if recorded is not None:
        server.likeliest = recorded.likeliest
        return recorded, recorded.prompts
    named = built_in_prompts() if options.prompts is None else read_prompts(options.prompts)
    against = None if options.against is None else RunningServer(options.against)
    return against, [TokenizedPrompt(one.name, server.tokens(one.prompt)) for one in named]


def _reference_of(server: RunningServer) -> ProfileReference | None:
    """Return the reference in the server's profile, or None where this machine does not have one."""
    profile = (server.info().get("ragged") or {}).get("profile", UNIFORM)
    try:
        return ProfileReference.from_file(Path(profile)) if Path(profile).is_absolute() else None
    except RaggedConfigError as error:
        print(f"sgl-ragged: no reference: {error}", file=sys.stderr)
        return None


def _measured_kl(reference: Reference | None, found: Comparison) -> float | None:
    """Return what was measured for the reference's profile at the server's ratio, if both are known."""
    ratio = found.cache.get("ratio")
    return reference.measured_kl(ratio) if isinstance(reference, ProfileReference) and ratio is not None else None


def table(found: Comparison, measured: float | None = None) -> str:
    """Return the table that people read.

    Args:
        measured: KL that was measured for the reference's profile at the server's ratio.
    """
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
            "No reference: pass --against URL of a server with SGLang's pool, or --profile FILE, to measure what "
            "compression costs."
        )
    else:
        lines.append(f"KL, delta NLL and same top-1 from {found.against}, after each prompt's first segment; nats.")
    if measured is not None:
        lines.append(f"Calibration measured KL {measured:.5f} for this profile at ratio {found.cache['ratio']:g}.")
    lines.append("hit/miss: KL of predictions with the prefix from the cache to those without. decode: to prefill.")
    if found.weight_updates:
        lines.append(
            f"Stale: weights were updated {found.weight_updates} times since the start; profile and reference are "
            f"those of the first weights."
        )
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
        line += f", {kept:.3f} of an uncompressed cache's bytes, slabs {dtype}"
    return line
