"""Console script `sgl-ragged`: sizes and checks without a server, calibration, and comparison of running servers."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sgl_ragged.check_command import add_check_flags, check_installation
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.calibration_process import calibrator
from sgl_ragged.launch.command_line import all_flags, make_options
from sgl_ragged.launch.conflicts import refuse_conflicts, table
from sgl_ragged.launch.decide import choose_share, decide_without_calibrating
from sgl_ragged.launch.feature import launch_features
from sgl_ragged.launch.flags import dashed
from sgl_ragged.launch.gpu_budget import estimate_budget
from sgl_ragged.launch.joining import refuse_flags_without_effect, settle_features
from sgl_ragged.launch.model_source import config_folder
from sgl_ragged.launch.models import expected_kv_dtype, load_model_config, refuse_kv_scheme, refuse_model
from sgl_ragged.launch.node_plan import Choices
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import Prefill, Rank, ServingPlan
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.mem_pool.kv_dtype import beside_cache
from sgl_ragged.mem_pool.sizing import LOADS_TOKENS, PoolSizes, check_limits, parse_bytes
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.quality import MeasuredQuality
from sgl_ragged.rank_sizes import fit_all_ranks, summary
from sgl_ragged.verify.command import add_verify_flags, verify

CHUNK = 8192
"""Tokens of a chunk of prefill on most GPUs that SGLang knows."""

IMPORTED = ("sglang", "torch", "transformers")
"""Packages that warn, when they are imported, of what a machine lacks; nothing is served here."""

CACHE_DTYPES = ("bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Values of --kv-cache-dtype."""

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""Values of --dtype."""

DRAFT_FLAGS = ("speculative_algorithm", "speculative_draft_model_path")
"""Settings of SGLang's drafts on which sizes depend."""

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
    nnodes=1,
    chunked_prefill_size=None,
    load_format="auto",
    json_model_override_args="{}",
)
"""Of SGLang's settings, those that features ask about, where no server is started."""


def main() -> None:
    """Entry point; ends with status 1 and one line on bad input."""
    try:
        with quiet_imports():
            parser = make_parser()
            options, others = parser.parse_known_args()
            if others and options.run is not calibrate:
                parser.error(f"unrecognized arguments: {' '.join(others)}")
            options.run(argparse.Namespace(**vars(options), others=others))
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
    layout = commands.add_parser("layout", help="what a KV budget holds, by the flags of a server")
    add_layout_flags(layout)
    layout.add_argument("--json", action="store_true")
    layout.set_defaults(run=show_layout)
    check = commands.add_parser("check", help="whether the plugin serves on the installed SGLang")
    add_check_flags(check)
    check.set_defaults(run=check_installation)
    verifying = commands.add_parser("verify", help="how far a running server's distributions are from another server's")
    add_verify_flags(verifying)
    verifying.set_defaults(run=verify)
    calibrating = commands.add_parser("calibrate", help="make a profile: python -m calib run", add_help=False)
    calibrating.set_defaults(run=calibrate)
    conflicts = commands.add_parser("conflicts", help="what does not go together, as a table in Markdown")
    conflicts.set_defaults(run=show_conflicts)
    return parser


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add the server's flags on which sizes depend, under the server's names; ours without `--ragged-`, too."""
    parser.add_argument(
        *("--model-path", "--model"),
        required=True,
        metavar="MODEL",
        help="folder, config.json, or name of a model whose config is in Hugging Face's cache",
    )
    parser.add_argument("--revision", help="as SGLang's")
    for keyword, one in all_flags().items():
        if keyword == "kv_pool":
            parser.add_argument("--kv-pool", choices=("ragged",), default="ragged", help=argparse.SUPPRESS)
            continue
        names = [dashed(keyword)]
        if keyword.startswith("ragged_"):
            names.append(dashed(keyword.removeprefix("ragged_")))
        told = {key: value for key, value in one.metadata["parser"].items() if key != "type"}
        parser.add_argument(*names, dest=keyword, **told)
    parser.add_argument(
        "--gpu",
        type=parse_bytes,
        metavar="SIZE",
        help="memory of each GPU, such as 80GB, instead of --kv-bytes: weights and SGLang's reserve are subtracted",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model, as SGLang's [auto]")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", *CACHE_DTYPES), default="auto", help="as SGLang's [auto: the model's]"
    )
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1, help="as SGLang's [1]")
    parser.add_argument("--pp-size", "--pipeline-parallel-size", "--pp", type=int, default=1, help="as SGLang's [1]")
    parser.add_argument("--max-running-requests", type=int, help="as SGLang's")
    parser.add_argument("--max-total-tokens", type=int, help="as SGLang's")
    parser.add_argument(
        "--chunked-prefill-size", type=int, default=CHUNK, help=f"for models with sliding windows [{CHUNK}]"
    )
    parser.add_argument("--swa-full-tokens-ratio", type=float, help="the same")
    for name in DRAFT_FLAGS:
        parser.add_argument(dashed(name), help="as SGLang's")


def show_layout(options: argparse.Namespace) -> None:
    """Print what a server with these flags would decide, and the sizes of its first rank."""
    asked = make_options({name: getattr(options, name) for name in all_flags()}, from_command_line=True)
    assert asked is not None, "a pool is asked for"
    check_layout(options, asked.segment)
    start = read_start(options, asked)
    if options.gpu is not None:
        budget = estimate_budget(options.gpu, start.model, options.tp_size * options.pp_size)
        start = replace(start, options=replace(start.options, kv_bytes=budget.kv))
        print(budget, file=sys.stderr if options.json else sys.stdout)
    choices = Choices("torch", choose_share(start), settle_features(start))
    plan = decide_without_calibrating(start, choices)
    slabs = plan.stage_slab_bytes(start.kv_dtype.itemsize)
    sizes = pool_sizes(plan, start, options)
    if sizes.warning is not None:
        print(f"sgl-ragged: warning: {sizes.warning}", file=sys.stderr)
    if not options.json:
        print(plan.source)
        print("\n".join(summary(plan, sizes)))
        print("\ntokens of a request   requests at once   full KV    gain")
        for tokens in LOADS_TOKENS:
            requests, full = sizes.requests_of(tokens)
            gain = f"{requests / full:.2f}x" if full else "-"
            print(f"{tokens:>19}   {requests:>16}   {full:>7}   {gain:>5}")
        for line in quality_lines(plan, start, options):
            print(line)
        return
    names = ["slab_bytes", "num_slots", "max_total_tokens", "rows_bytes", "max_requests", "total_bytes", "full_tokens"]
    shown = {name: getattr(sizes, name) for name in names} | {"kept": plan.kept.tolist(), "slab_dtype": plan.form.name}
    shown |= {"open_page_tokens": sizes.open_pages.tokens, "stage_slab_bytes": slabs}
    loads = [(tokens, *sizes.requests_of(tokens)) for tokens in LOADS_TOKENS]
    shown |= {"loads": [dict(zip(("tokens", "requests", "full_requests"), load, strict=True)) for load in loads]}
    shown |= {"kept_ratio": sizes.layout.mean_kept_share, "kept_bytes_ratio": sizes.layout.byte_share(sizes.itemsize)}
    shown |= {"scorer": plan.scorer, "profile": plan.profile, "profile_source": plan.source, "fairkv": plan.fairkv}
    shown |= {"summary": "; ".join(summary(plan, sizes))}
    shown |= {"quality": [asdict(row) for row in measured_quality(plan)]}
    query_dtype = beside_cache(start.kv_dtype, start.model.dtype)
    rank = Rank(plan.stage(0), 0, start.kv_dtype.itemsize, query_dtype.itemsize)
    for feature in launch_features():
        shown |= feature.layout_info(plan.settings_of(feature.name), rank, sizes)
    print(json.dumps(shown))


def measured_quality(plan: ServingPlan) -> tuple[MeasuredQuality, ...]:
    """Return what was measured with a plan's profile, highest ratio first."""
    path = Path(plan.profile)
    return load_profile(path).quality if path.is_absolute() and path.is_file() else ()


def quality_lines(plan: ServingPlan, start: ModelStart, options: argparse.Namespace) -> Iterator[str]:
    """Yield a table of tokens and measured quality by ratio; nothing if nothing was measured."""
    rows = measured_quality(plan)
    if rows:
        yield "\nmeasured ratio   slabs   tokens in the pool        KL   delta NLL   same top-1"
    for row in rows:
        own = replace(start, options=replace(start.options, ratio=row.ratio, quality=None))
        choices = Choices("torch", choose_share(own), settle_features(own))
        tokens = pool_sizes(decide_without_calibrating(own, choices), own, options).max_total_tokens
        yield (
            f"{row.ratio:>14g}   {row.slab_dtype:>5}   {tokens:>18}   {row.kl:>7.5f}   {row.nll:>+9.4f}   "
            f"{row.same_top1:>10.3f}"
        )


def check_layout(options: argparse.Namespace, segment: int) -> None:
    """Raise RaggedConfigError for numbers out of range."""
    check_limits(segment, options.max_running_requests, options.max_total_tokens)
    if (options.kv_bytes is None) == (options.gpu is None):
        raise RaggedConfigError("give --kv-bytes, or --gpu with the memory of each GPU")
    for name in ("chunked_prefill_size", "pp_size", "tp_size"):
        if getattr(options, name) < 1:
            raise RaggedConfigError(f"{dashed(name)} {getattr(options, name)} must be at least 1")


def read_start(options: argparse.Namespace, asked: RaggedOptions) -> ModelStart:
    """Return the start that the flags describe; raises RaggedConfigError for what a server refuses."""
    model = load_model_config(config_folder(options.model_path, options.revision), dtype=options.dtype)
    refuse_model(model)
    refuse_kv_scheme(model, options.kv_cache_dtype)
    given = {name: getattr(options, name) for name in ("tp_size", "pp_size", "dtype", "revision", *DRAFT_FLAGS)}
    path = options.model_path
    given["model_path"] = str(Path(path).parent) if Path(path).is_file() else path
    server_args = SimpleNamespace(**NOTHING_ELSE | given, kv_cache_dtype=options.kv_cache_dtype)
    kv_dtype = expected_kv_dtype(model, options.kv_cache_dtype)
    start = ModelStart(asked, server_args, server_args, model, kv_dtype, served=False)
    refuse_flags_without_effect(start)
    refuse_conflicts(start)
    return start


def pool_sizes(plan: ServingPlan, start: ModelStart, options: argparse.Namespace) -> PoolSizes:
    """Return the sizes of the first rank of the first stage: all ranks have the pages and requests of the smallest."""
    schedule = SimpleNamespace(
        swa_full_tokens_ratio=options.swa_full_tokens_ratio,
        _swa_full_tokens_ratio_explicitly_set=options.swa_full_tokens_ratio is not None,
    )
    prefill = Prefill(options.chunked_prefill_size, schedule)
    assert start.options.kv_bytes is not None, "given, or estimated"
    queries, limits = (
        beside_cache(start.kv_dtype, start.model.dtype),
        (options.max_running_requests, options.max_total_tokens),
    )
    return fit_all_ranks(plan, prefill, start.kv_dtype, queries, start.options.kv_bytes, *limits)


def calibrate(options: argparse.Namespace) -> None:
    """Run the calibrator in a process of its own, with its own flags; ends with its status."""
    sys.exit(subprocess.call([*calibrator(), "run", *options.others]))


def show_conflicts(_: argparse.Namespace) -> None:
    """Print the table of docs/conflicts.md."""
    print(table())


if __name__ == "__main__":
    main()
