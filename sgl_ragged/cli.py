"""Console script `sgl-ragged`: show a layout, or check an installation, without starting a server."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.sizing import LOADS_TOKENS, check_limits, fit_pool, parse_bytes
from sgl_ragged.mem_pool.slab_format import ASKED
from sgl_ragged.mem_pool.slab_format import AUTO as BY_RATIO
from sgl_ragged.model_options import add_model_options, choose_kept, read_model
from sgl_ragged.plan import ServingPlan, kept_share
from sgl_ragged.plugin.flags import dashed

if TYPE_CHECKING:
    import torch

CHUNK = 8192
"""Tokens of a chunk of prefill on most GPUs that SGLang knows."""

IMPORTED = ("sglang", "torch", "transformers")
"""Packages that warn, when they are imported, of what a machine lacks; nothing is served here."""

DTYPES = ("float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2")

NOTHING_ELSE: dict[str, Any] = dict(
    speculative_algorithm=None,
    disaggregation_mode="null",
    speculative_ngram_max_bfs_breadth=1,
    speculative_ngram_external_corpus_path=None,
    speculative_ngram_external_sam_budget=0,
    speculative_eagle_topk=1,
    speculative_num_steps=3,
    speculative_num_draft_tokens=None,
    speculative_token_map=None,
    speculative_draft_window_size=None,
    speculative_use_block_verification=False,
    enable_multi_layer_eagle=False,
    speculative_adaptive=False,
    speculative_use_rejection_sampling=False,
    speculative_draft_kv_cache_dtype=None,
    decoupled_spec_role="null",
    enable_watermark=False,
    enable_lora=None,
    lora_paths=None,
    enable_hierarchical_cache=False,
    radix_cache_backend=None,
    enable_mixed_chunk=False,
    disable_hybrid_swa_memory=False,
    tp_size=1,
    pp_size=1,
    nnodes=1,
    chunked_prefill_size=None,
)
"""Of SGLang's settings, those that features ask about, where no server is started."""


def main() -> None:
    """Entry point; ends with status 1 and one line on bad input."""
    try:
        with quiet_imports():
            options = make_parser().parse_args()
            options.run(options)
    except RaggedConfigError as error:
        sys.exit(f"sgl-ragged: {error}")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """No warnings of IMPORTED, neither raised nor logged; their errors, and all that others say, stay."""
    loggers = [logging.getLogger(package) for package in IMPORTED]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=rf"({'|'.join(IMPORTED)})(\.|$)")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def make_parser() -> argparse.ArgumentParser:
    """Commands and their flags, those of features among them."""
    parser = argparse.ArgumentParser(prog="sgl-ragged", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    layout = commands.add_parser("layout", help="what a KV budget holds, for a model on disk")
    add_model_options(layout, None)
    layout.add_argument("--kv-bytes", required=True, help="KV budget, such as 24GiB")
    layout.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the KV cache [bfloat16]")
    layout.add_argument(
        "--slab-dtype", choices=ASKED, default=BY_RATIO, help=f"how finished segments are stored [{BY_RATIO}]"
    )
    layout.add_argument("--max-running-requests", type=int)
    layout.add_argument("--max-total-tokens", type=int)
    layout.add_argument("--chunked-prefill-size", type=int, default=CHUNK, help="for models with sliding windows")
    layout.add_argument("--pp-size", type=int, default=1, help="pipeline stages; shown is the one that decides [1]")
    layout.add_argument("--swa-full-tokens-ratio", type=float, help="the same")
    for name, text in layout_flags():
        layout.add_argument(f"--{name}", help=text.replace("--ragged-", "--"))
    for name in layout_also():
        layout.add_argument(dashed(name), help="as SGLang's")
    layout.add_argument("--json", action="store_true")
    layout.set_defaults(run=show_layout)
    check = commands.add_parser("check", help="whether the plugin serves on the installed SGLang")
    check.set_defaults(run=check_installation)
    conflicts = commands.add_parser("conflicts", help="what does not go together, as a table in Markdown")
    conflicts.set_defaults(run=show_conflicts)
    return parser


def cache_dtype(name: str) -> torch.dtype:
    """Of DTYPES."""
    import torch

    return {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(name) or getattr(torch, name)


def layout_flags() -> list[tuple[str, str]]:
    """Flags of features that `layout` has, too, without their prefix, and their help."""
    from sgl_ragged.plugin.feature import features
    from sgl_ragged.plugin.options import FLAGS

    names = [name for feature in features() for name in feature.layout_flags]
    return [(name.replace("_", "-"), FLAGS[f"ragged_{name}"].metadata["parser"]["help"]) for name in names]


def layout_also() -> list[str]:
    """Settings of SGLang that `layout` has flags for."""
    from sgl_ragged.plugin.feature import features

    return [name for feature in features() for name in feature.layout_also]


def show_layout(options: argparse.Namespace) -> None:
    """Print the pool's sizes on one rank that holds all heads."""
    import torch

    from sgl_ragged.mem_pool.kv_dtype import is_fp8
    from sgl_ragged.mem_pool.slab_store import open_pages, side_bytes
    from sgl_ragged.plugin.conflicts import refuse_conflicts
    from sgl_ragged.plugin.deciding import choose_share
    from sgl_ragged.plugin.feature import Prefill, Rank, features
    from sgl_ragged.plugin.joining import (
        describe_features,
        feature_bytes,
        join_features,
        page_bytes,
        refuse_in_vain,
        settle_features,
        side_pages,
    )
    from sgl_ragged.plugin.launch import Launch
    from sgl_ragged.plugin.model_support import pipeline_stages
    from sgl_ragged.plugin.options import make_options
    from sgl_ragged.scorers import get_scorer

    budget = parse_bytes(options.kv_bytes)
    check_limits(options.segment, options.max_running_requests, options.max_total_tokens)
    if options.chunked_prefill_size < 1:
        raise RaggedConfigError(f"--chunked-prefill-size {options.chunked_prefill_size} must be at least 1")
    names = ["ratio", "segment", "slab_dtype", *(name.replace("-", "_") for name, _ in layout_flags())]
    asked = make_options(
        {"kv_pool": "ragged"} | {f"ragged_{name}": getattr(options, name) for name in names}, from_command_line=True
    )
    assert asked is not None, "a pool is asked for"
    model_config = read_model(options)
    kv_dtype = cache_dtype(options.dtype)
    if options.pp_size < 1:
        raise RaggedConfigError(f"--pp-size {options.pp_size} must be at least 1")
    given = {name: getattr(options, name) for name in ("pp_size", *layout_also())}
    launch = Launch(asked, SimpleNamespace(**NOTHING_ELSE | given), model_config, kv_dtype)
    geometry = launch.geometry
    assert geometry is not None, "the model is known"
    refuse_in_vain(launch)
    refuse_conflicts(launch)
    share = choose_share(launch, geometry.head_dim)
    chosen = choose_kept(options, geometry, share, kv_dtype.itemsize)
    launch = replace(launch, chosen=chosen)
    plan = ServingPlan(
        geometry=geometry,
        ranks=1,
        ratio=share.ratio,
        segment=options.segment,
        scorer=options.scorer,
        profile=options.profile,
        kernel="torch",
        kept=chosen.kept,
        source=chosen.source,
        statistics=(),
        form=share.form,
        stages=pipeline_stages(geometry, options.pp_size),
    )
    tokens = kept_share(geometry, share.ratio, options.segment, share.form, kv_dtype.itemsize)
    plan = join_features(plan, launch, settle_features(launch), tokens)
    # Queries beside an FP8 cache have the model's dtype.
    queries = torch.bfloat16 if is_fp8(kv_dtype) else kv_dtype
    slabs = plan.stage_slab_bytes(kv_dtype.itemsize)
    rank = Rank(plan.stage(slabs.index(max(slabs))), 0, kv_dtype.itemsize, queries.itemsize)
    own = rank.plan.layout(0)
    side = side_bytes(get_scorer(options.scorer), own, plan.q_per_kv, queries) + feature_bytes(rank)
    schedule = SimpleNamespace(
        swa_full_tokens_ratio=options.swa_full_tokens_ratio,
        _swa_full_tokens_ratio_explicitly_set=options.swa_full_tokens_ratio is not None,
    )
    _, beside = side_pages(rank, Prefill(options.chunked_prefill_size, schedule))
    sizes = fit_pool(
        own,
        kv_dtype.itemsize,
        open_pages(get_scorer(options.scorer), plan.slab_layouts, plan.q_per_kv, kv_dtype, queries),
        budget,
        options.max_running_requests,
        side,
        options.max_total_tokens,
        beside,
        page_bytes(rank),
    )
    if sizes.warning is not None:
        print(f"sgl-ragged: warning: {sizes.warning}", file=sys.stderr)
    if not options.json:
        print(plan.source)
        stages = [plan.describe_stages(sizes.itemsize)] if plan.stages else []
        print("; ".join([sizes.describe(), *stages, *describe_features(plan, sizes)]))
        print("\ntokens of a request   requests at once   full KV    gain")
        for tokens in LOADS_TOKENS:
            requests, full = sizes.requests_of(tokens)
            gain = f"{requests / full:.2f}x" if full else "-"
            print(f"{tokens:>19}   {requests:>16}   {full:>7}   {gain:>5}")
        return
    names = ["slab_bytes", "num_slots", "max_total_tokens", "rows_bytes", "max_requests", "total_bytes", "full_tokens"]
    shown = {name: getattr(sizes, name) for name in names} | {"kept": plan.kept.tolist(), "slab_dtype": plan.form.name}
    shown |= {"open_page_tokens": sizes.open_pages.tokens, "stage_slab_bytes": slabs}
    loads = [(tokens, *sizes.requests_of(tokens)) for tokens in LOADS_TOKENS]
    shown |= {"loads": [dict(zip(("tokens", "requests", "full_requests"), load, strict=True)) for load in loads]}
    shown |= {"kept_ratio": sizes.layout.mean_kept_share, "kept_bytes_ratio": sizes.layout.byte_share(sizes.itemsize)}
    for feature in features():
        shown |= feature.layout_info(feature.of(plan), rank, sizes)
    print(json.dumps(shown))


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
