"""`python -m calib run`: calibrate head budgets of a model for one or several scorers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from calib.attached import end_with_input
from calib.codebook import codebook
from calib.derive import derive_profile
from calib.disk import AT_A_TIME, disk_need
from calib.gate import train_gates
from calib.hidden_states import HiddenStates
from calib.inspect import print_stability
from calib.measure import (
    calibrated_statistics,
    make_engine,
    measure,
    measure_errors,
    passes,
    recorded_scorers,
    value_mean,
)
from calib.progress import show_progress
from calib.recordings_folder import Settings, claim
from calib.roles import TAU_SIM, TAU_STABLE, head_statistics
from calib.samples import TokenizedSample, dataset_hash, read_samples, tokenize
from calib.stability import measure_stability
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.model_source import load_tokenizer, read_config
from sgl_ragged.launch.models import model_geometry
from sgl_ragged.launch.multimodal import refuse_positions
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.profiles.budgets import check_budgets, profile_kept, uniform_kept
from sgl_ragged.profiles.built_in_samples import SAMPLES
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import FITS, METHODS, SCOPES, VALUE_MEAN
from sgl_ragged.profiles.profile_checks import MOST_ALPHA
from sgl_ragged.scorers import get_scorer, scorer_names

_RESERVED = 8
"""Tokens of the context that samples leave free: SGLang takes some for itself, and nothing of longer requests."""

ERROR_SAMPLES = 8
"""Samples on which output errors are measured: the first, among which is each kind of the built-in ones."""

_UNKNOWN = "attention's outputs cannot be followed into this model's residual stream, or its heads are on several ranks"

DEFAULT_SCOPE = {"coverage": "model", "implied": "layer", "roles": "model"}


def add_parser(commands: Any) -> None:
    """Add the command to the front end."""
    parser = commands.add_parser(
        "run",
        help="calibrate a model",
        description="Runs sample contexts through SGLang and writes a profile of head budgets.",
    )
    parser.add_argument("--model", required=True, help="model path, as for the server")
    parser.add_argument(
        "--scorer", nargs="+", default=["gate"], metavar="NAME", help=f"{', '.join(scorer_names())} [gate]"
    )
    parser.add_argument("--scorer-weights", metavar="FILE", help="gate weights of scorers that have them")
    parser.add_argument("--ratio", type=float, default=0.3, help="kept / full KV bytes to calibrate at [0.3]")
    parser.add_argument("--method", choices=METHODS, default="coverage", help="[coverage]")
    parser.add_argument("--scope", choices=SCOPES, help="where heads compete [implied: layer, others: model]")
    parser.add_argument(
        "--queries",
        choices=("answers", "all"),
        help="method coverage: whose attention counts, of the tokens that answer or of all [answers if data has them]",
    )
    parser.add_argument(
        "--error-samples",
        type=int,
        metavar="N",
        help=f"method coverage: weigh by what fitted heads leave of their outputs, on N samples [{ERROR_SAMPLES}]",
    )
    parser.add_argument("--alpha", type=float, help="safety margin of method implied, in standard deviations [2]")
    parser.add_argument("--fit", choices=FITS, default="exact", help="scale to the ratio, or Eq. 5 as written [exact]")
    parser.add_argument(
        "--tau-stable", type=float, default=TAU_STABLE, metavar="TAU", help=f"stability of anchors [{TAU_STABLE}]"
    )
    parser.add_argument(
        "--tau-sim", type=float, default=TAU_SIM, metavar="TAU", help=f"overlap of similar heads [{TAU_SIM}]"
    )
    parser.add_argument("--segment", type=int, default=256, help="tokens per segment; serve with the same [256]")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"how many samples [{SAMPLES}]")
    parser.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help=".jsonl or text [built in]")
    parser.add_argument("--max-tokens", type=int, default=8192, help="samples are cut to this length [8192]")
    parser.add_argument("--trust-remote-code", action="store_true", help="as for the server")
    parser.add_argument("--tokenizer-path", metavar="PATH", help="as for the server [that of the model]")
    parser.add_argument("--revision", help="as for the server")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments of SGLang's engine"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the built-in conversations [0]")
    parser.add_argument("--dtype", default="auto", help="as for the server [auto]")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, as for the server [1]")
    parser.add_argument("--work", type=Path, help="folder of recordings, to resume from [OUTPUT.recordings]")
    parser.add_argument(
        "--resume-from",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="recordings of runs that have ended: those of the same settings move to --work, the folders are deleted",
    )
    parser.add_argument(
        "--hidden-states",
        metavar="BYTES",
        help=f"scorer gate: hidden states on disk at a time [{AT_A_TIME >> 30}GiB, at most half of what is free]",
    )
    parser.add_argument(
        "--ends-with-input", action="store_true", help="end as soon as standard input ends, for programs that start it"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="profile.safetensors; with several scorers the name must contain {scorer}",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Calibrate; writes one profile per scorer. Raises RaggedConfigError on bad input."""
    if options.ends_with_input:
        end_with_input()
    _check(options)
    given = {name: getattr(options, name) for name in ("trust_remote_code", "tokenizer_path", "revision")}
    engine_args = {name: value for name, value in given.items() if value} | options.engine_args
    config = read_config(options.model, engine_args)
    geometry = model_geometry(config)
    for scorer in options.scorer:
        refuse_positions(config.hf_text_config, scorer)
    if options.tp < 1 or geometry.num_heads % options.tp:
        raise RaggedConfigError(f"--tp {options.tp} does not divide the model's {geometry.num_heads} KV heads")
    samples = tokenize(
        read_samples(options.data, options.samples, options.seed),
        lambda: load_tokenizer(options.model, engine_args),
        min(options.max_tokens, config.context_len - _RESERVED),
        options.segment + 1,
    )
    queries = _queries(options, samples)
    settings = Settings(
        model=options.model,
        model_fingerprint=geometry.fingerprint,
        scorers=tuple(options.scorer),
        segment=options.segment,
        dataset_hash=dataset_hash(samples),
        dtype=options.dtype,
        scorer_weights=options.scorer_weights,
        tp=options.tp,
        engine_args=engine_args,
    )
    work = options.work or Path(options.output.replace("{scorer}", "all") + ".recordings")
    claim(work, settings, options.resume_from)
    trained = any(get_scorer(scorer).trained for scorer in options.scorer)
    weighing = options.error_samples
    if weighing is None:
        weighing = ERROR_SAMPLES if options.method == "coverage" and options.tp == 1 else 0
    need = disk_need(
        work,
        geometry,
        config.hf_text_config.hidden_size,
        samples,
        options.segment,
        scores=len(recorded_scorers(options.scorer)),
        trained=trained,
        at_a_time=parse_bytes(options.hidden_states) if options.hidden_states else None,
    )
    print(need, file=sys.stderr)
    kv_bytes = _kv_bytes(geometry, options.segment, samples)
    with show_progress() as progress, make_engine(settings, work, kv_bytes) as engine:
        advance = progress.start("samples through SGLang", len(samples) * passes(options.scorer))
        recordings = measure(engine, samples, range(need.layers_at_once), advance)
        if need.layers_at_once == need.layers and not weighing:
            engine.close()
        statistics, held_out = calibrated_statistics(settings, work), None
        of_codebook = codebook(recordings, config.context_len, options.segment)
        statistics |= {VALUE_MEAN: value_mean(recordings)} | of_codebook
        if trained:
            advance = progress.start("training gates, layers", geometry.num_layers)
            hidden = HiddenStates(engine, samples, work, need.layers_at_once, need.layers)
            gates, held_out = train_gates(
                recordings,
                hidden.layer,
                options.segment,
                work,
                queries,
                options.ratio,
                advance,
            )
            statistics |= gates
        errors = {}
        for scorer in options.scorer if weighing else ():
            some = samples[:weighing]
            advance = progress.start(f"output errors of {scorer}", len(some))
            found = measure_errors(
                engine,
                some,
                [recording[f"{scorer}.scores"] for recording in recordings[: len(some)]],
                of_codebook,
                f"{scorer}-{queries}-{len(some)}",
                advance,
            )
            if found is not None:
                errors[scorer] = found.numpy()
            elif options.error_samples is None:
                print(f"{_UNKNOWN}: budgets are those of coverage alone", file=sys.stderr)
            else:
                raise RaggedConfigError(f"--error-samples {options.error_samples}: {_UNKNOWN}; leave it out")
    scope = options.scope or DEFAULT_SCOPE[options.method]
    reports = []
    for scorer in options.scorer:
        wanted = dict.fromkeys((VALUE_MEAN, *of_codebook, *get_scorer(scorer).statistics))
        of_heads = head_statistics(recordings, scorer, queries, options.tau_stable, options.tau_sim)
        profile = derive_profile(
            recordings,
            [sample.task for sample in samples],
            settings,
            scorer,
            ratio=options.ratio,
            method=options.method,
            scope=scope,
            queries=queries,
            alpha=_alpha(options),
            fit=options.fit,
            head_dim=geometry.head_dim,
            statistics={name: statistics[name] for name in wanted if name in statistics} | of_heads,
            held_out=held_out if get_scorer(scorer).trained else None,
            errors=errors.get(scorer),
        )
        path = Path(options.output.replace("{scorer}", scorer))
        profile.save(path)
        kept = profile_kept(profile, options.ratio, options.segment)
        stability = measure_stability(profile)
        assert stability is not None, "a calibrated profile holds the shares of its samples"
        reports.append(
            {"profile": str(path), "scorer": scorer, "digest": profile.digest(), "stability": asdict(stability)}
        )
        if not options.json:
            print(
                f"{path}: {scorer}, {options.method} over the {scope}"
                f"{f', attention of {queries}' if options.method == 'coverage' else ''}, "
                f"{profile.samples} samples; kept per "
                f"{options.segment}-token segment min/max {kept.min()}/{kept.max()} "
                f"(mean share {kept.mean() / options.segment:.4f})"
            )
            print_stability(stability, Console())
    if options.json:
        print(json.dumps(reports, indent=2))
    else:
        print(f"recordings are kept in {work} for another --method, --ratio, --scope, ..; delete them when done")


def _queries(options: argparse.Namespace, samples: list[TokenizedSample]) -> str:
    """Whose attention counts: of the answers if every sample has one behind its first segment."""
    have = all(any(stop - 1 > options.segment for _, stop in sample.answers) for sample in samples)
    if options.queries == "answers" and not have:
        raise RaggedConfigError(
            "--queries answers: not every sample has an answer behind its first segment; give messages, or answers "
            "beside input_ids, or use --queries all"
        )
    return options.queries or ("answers" if have else "all")


def _alpha(options: argparse.Namespace) -> float:
    """Safety margin; methods other than implied have none."""
    if options.method != "implied":
        return 0.0
    return 2.0 if options.alpha is None else options.alpha


def _check(options: argparse.Namespace) -> None:
    check_budgets(options.ratio, options.segment)
    if options.samples < 2:
        raise RaggedConfigError(f"--samples {options.samples}: at least 2 are needed for a standard deviation")
    if options.alpha is not None and not 0 <= options.alpha <= MOST_ALPHA:
        raise RaggedConfigError(
            f"--alpha {options.alpha} is outside [0, {MOST_ALPHA:g}]: it counts standard deviations"
        )
    if options.method != "implied" and (options.alpha is not None or options.fit == "paper"):
        raise RaggedConfigError(f"--alpha and --fit paper belong to --method implied: {options.method} has no Eq. 5")
    if (options.error_samples or 0) < 0:
        raise RaggedConfigError(f"--error-samples {options.error_samples}: at least 0")
    if options.method != "coverage" and options.error_samples:
        raise RaggedConfigError(f"--error-samples belongs to --method coverage: {options.method} does not use them")
    if options.method != "coverage" and options.queries is not None:
        raise RaggedConfigError(f"--queries belongs to --method coverage: budgets of {options.method} do not use them")
    if options.method == "roles" and options.scope == "layer":
        raise RaggedConfigError("--scope layer does not go with --method roles, whose Eq. 7 is over the model")
    for flag, value in (("--tau-stable", options.tau_stable), ("--tau-sim", options.tau_sim)):
        if not 0 <= value <= 1:
            raise RaggedConfigError(f"{flag} {value} is outside [0, 1]: it is a share of the tokens attended to most")
    if len(set(options.scorer)) > 1 and "{scorer}" not in options.output:
        raise RaggedConfigError(
            "with several scorers the name in -o must contain {scorer}, such as {scorer}.safetensors"
        )
    for scorer in options.scorer:
        found = get_scorer(scorer)
        if found.reads_hidden_states and not found.trained and options.scorer_weights is None:
            raise RaggedConfigError(f"scorer {scorer!r} needs trained gates: pass --scorer-weights FILE")
    parent = Path(options.output).parent
    if not parent.is_dir():
        raise RaggedConfigError(f"the folder of the output, {parent}, does not exist")
    for scorer in options.scorer:
        path = Path(options.output.replace("{scorer}", scorer))
        if path.is_dir():
            raise RaggedConfigError(
                f"-o {path} is a directory; name a file in it, such as {path / 'profile.safetensors'}"
            )


def _kv_bytes(geometry: ModelGeometry, segment: int, samples: list[TokenizedSample]) -> int:
    """A KV budget that holds the longest sample uncompressed, in float32, with room for padding and one more page."""
    kept = uniform_kept(geometry.num_layers, geometry.num_heads, 1.0, segment)
    full = SlabLayout(kept, geometry.head_dim, segment)
    segments = max(len(sample.input_ids) for sample in samples) // segment + 4
    # An open segment and its stage; what scorers keep of each token is no more than q_per_kv / 2 as much again.
    segments += 2 + geometry.q_per_kv
    # A page of the sliding-window layers for every slab: then the other pool is never the smaller one.
    windows = 4 * segment * geometry.windowed.elements_per_token if geometry.windowed else 0
    return segments * (full.slab_bytes(4) + windows) + 2**20
