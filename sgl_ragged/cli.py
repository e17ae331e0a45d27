"""Console script `sgl-ragged`: show a layout, or check an installation, without starting a server."""

from __future__ import annotations

import argparse
import json
import sys
import warnings

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.history.bound import AUTO, history_bound
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import check_limits, fit_pool, parse_bytes
from sgl_ragged.mem_pool.slab_format import ASKED, settle_share
from sgl_ragged.mem_pool.slab_format import AUTO as BY_RATIO
from sgl_ragged.model_options import add_model_options, choose_kept, read_geometry
from sgl_ragged.plan import choose_pivots
from sgl_ragged.retrieval.settings import Retrieval

CHUNK = 8192
"""Tokens of a chunk of prefill on most GPUs that SGLang knows."""

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}


def main() -> None:
    """Entry point; ends with status 1 and one line on bad input."""
    parser = argparse.ArgumentParser(prog="sgl-ragged", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    layout = commands.add_parser("layout", help="what a KV budget holds, for a model on disk")
    add_model_options(layout, None)
    layout.add_argument("--kv-bytes", required=True, help="KV budget, such as 24GiB")
    layout.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16", help="of the KV cache [bfloat16]")
    layout.add_argument(
        "--slab-dtype", choices=ASKED, default=BY_RATIO, help=f"how finished segments are stored [{BY_RATIO}]"
    )
    layout.add_argument("--max-running-requests", type=int)
    layout.add_argument("--max-total-tokens", type=int)
    layout.add_argument("--chunked-prefill-size", type=int, default=CHUNK, help="for models with sliding windows")
    layout.add_argument("--swa-full-tokens-ratio", type=float, help="the same")
    layout.add_argument("--history", type=int, metavar="N", help="tokens that a request sees at most [all]")
    layout.add_argument("--reservoir", metavar="BYTES", help="host memory for what heads drop, such as 8GiB [none]")
    layout.add_argument("--overlay", type=int, metavar="N", help="with --reservoir: tokens that a head is given back")
    layout.add_argument("--pivots", type=int, metavar="N", help="the same: heads that watch")
    layout.add_argument("--json", action="store_true")
    layout.set_defaults(run=show_layout)
    check = commands.add_parser("check", help="whether the plugin serves on the installed SGLang")
    check.set_defaults(run=check_installation)
    conflicts = commands.add_parser("conflicts", help="what does not go together, as a table in Markdown")
    conflicts.set_defaults(run=show_conflicts)
    options = parser.parse_args()
    try:
        with warnings.catch_warnings():
            # SGLang warns of what this machine's processor lacks when it is imported; it is not asked to serve here.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
            options.run(options)
    except RaggedConfigError as error:
        sys.exit(f"sgl-ragged: {error}")


def show_layout(options: argparse.Namespace) -> None:
    """Print the pool's sizes on one rank that holds all heads."""
    import torch

    from sgl_ragged.history.sglang_plan import with_lag
    from sgl_ragged.mem_pool.slab_store import side_bytes
    from sgl_ragged.scorers import get_scorer
    from sgl_ragged.windows.sglang_pool import window_needs

    budget = parse_bytes(options.kv_bytes)
    check_limits(options.segment, options.max_running_requests, options.max_total_tokens)
    if options.chunked_prefill_size < 1:
        raise RaggedConfigError(f"--chunked-prefill-size {options.chunked_prefill_size} must be at least 1")
    if options.swa_full_tokens_ratio is not None and not 0 < options.swa_full_tokens_ratio <= 1:
        raise RaggedConfigError(f"--swa-full-tokens-ratio {options.swa_full_tokens_ratio} is outside (0, 1]")
    bound = history_bound(options.history, AUTO, options.segment)
    itemsize = DTYPE_BYTES[options.dtype]
    readable = itemsize > 1 and options.reservoir is None
    geometry = read_geometry(options)
    share = settle_share(options.slab_dtype, options.ratio, geometry.head_dim, itemsize, options.segment, readable)
    form = share.form
    if form.quantised and not readable:
        raise RaggedConfigError(
            f"--slab-dtype {form.name} does not go with an FP8 cache, nor with --reservoir; use wide"
        )
    chosen = choose_kept(options, geometry, share, itemsize)
    if bound is not None:
        bound = with_lag(bound, geometry, options.segment)
    kept, roles, retrieval = chosen.kept, None, _retrieval(options)
    if retrieval is not None:
        roles, kept = choose_pivots(chosen, retrieval.pivots, share.ratio, options.segment)
    layout = SlabLayout(kept=kept, head_dim=geometry.head_dim, segment=options.segment, form=form)
    # Queries beside an FP8 cache have the model's dtype.
    queries = torch.bfloat16 if options.dtype.startswith("fp8") else getattr(torch, options.dtype)
    side = side_bytes(get_scorer(options.scorer), layout, geometry.q_per_kv, queries)
    overlay_bytes = 0
    if retrieval is not None and roles is not None:
        watched = sum(map(len, roles.satellites))
        overlay_bytes = retrieval.row_bytes(watched, geometry.head_dim, geometry.q_per_kv, itemsize, queries.itemsize)
        side += overlay_bytes
    windows = window_needs(
        geometry,
        ranks=1,
        itemsize=itemsize,
        segment=options.segment,
        chunk=options.chunked_prefill_size,
        share=options.swa_full_tokens_ratio,
        bounded=bound is not None,
    )
    plan = fit_pool(layout, itemsize, budget, options.max_running_requests, side, options.max_total_tokens, windows)
    if plan.warning is not None:
        print(f"sgl-ragged: warning: {plan.warning}", file=sys.stderr)
    if not options.json:
        print(chosen.source)
        print(plan.describe() if bound is None else f"{plan.describe()}; {bound.describe(plan)}")
        if retrieval is not None and roles is not None:
            print(
                f"{len(roles.pivots)} pivots watch for {watched} heads; each request's overlays take {overlay_bytes} "
                f"bytes of its tail, and what heads drop at most {retrieval.reservoir_bytes} bytes on the host"
            )
        return
    names = ["slab_bytes", "num_slots", "max_total_tokens", "tails_bytes", "max_requests"]
    names += ["window_pages", "windows_bytes", "total_bytes", "full_tokens"]
    shown = {name: getattr(plan, name) for name in names} | {"kept": kept.tolist(), "slab_dtype": form.name}
    shown |= {"kept_ratio": layout.mean_kept_share, "kept_bytes_ratio": layout.byte_share(itemsize)}
    if bound is not None:
        shown["most_request_bytes"] = bound.request_bytes(plan)
    if retrieval is not None and roles is not None:
        shown |= {"overlay_bytes": overlay_bytes, "reservoir_bytes": retrieval.reservoir_bytes}
        shown["pivots"] = [list(pivot) for pivot in roles.pivots]
    print(json.dumps(shown))


def _retrieval(options: argparse.Namespace) -> Retrieval | None:
    """What was asked for, with the server's defaults. Raises RaggedConfigError."""
    from sgl_ragged.retrieval.sglang_plan import DEFAULTS

    given = {name: getattr(options, name) for name in ("overlay", "pivots") if getattr(options, name) is not None}
    if options.reservoir is None:
        if given:
            raise RaggedConfigError(f"--{next(iter(given))} is about what --reservoir holds: add it, or drop the other")
        return None
    chosen = DEFAULTS | given
    return Retrieval(
        reservoir_bytes=parse_bytes(options.reservoir),
        overlay=chosen["overlay"],
        pivots=chosen["pivots"],
        interval=chosen["watch_interval"],
        drift=chosen["drift"],
    )


def check_installation(_: argparse.Namespace) -> None:
    """Print one line if the release is supported and its seams match, else raise RaggedConfigError."""
    from sgl_ragged.plugin.seams import RAGGED_SEAMS, check_seams, installed_release

    check_seams(RAGGED_SEAMS)
    print(f"SGLang {installed_release()} is supported: all {len(RAGGED_SEAMS)} seams match")


def show_conflicts(_: argparse.Namespace) -> None:
    """Print the table of docs/conflicts.md."""
    from sgl_ragged.plugin.conflicts import table

    print(table())


if __name__ == "__main__":
    main()
