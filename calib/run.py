"""Command `run`: calibrate head budgets of a model for one or several scorers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

from calib.codebook import codebook
from calib.coverage import derive_profile
from calib.disk import MAX_HIDDEN_STATES_BYTES, disk_need
from calib.engine import Engine, recording_kv_bytes
from calib.gate import train_gates
from calib.hidden_states import HiddenStates
from calib.inspect import print_stability
from calib.measure import (
    calibrated_statistics,
    make_engine,
    measure,
    measure_errors,
    num_passes,
    recorded_scorers,
    value_mean,
)
from calib.progress import Bars, PlainLines, show_progress
from calib.quality import ServedModel, add_model_flags, measure_quality
from calib.recordings_folder import Settings, claim
from calib.reference import Texts, held_out_texts, record_reference
from calib.roles import TAU_SIM, TAU_STABLE, head_statistics
from calib.samples import TokenizedSample, dataset_hash, read_samples, tokenize
from calib.stability import measure_stability
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.model_source import load_tokenizer, read_config
from sgl_ragged.launch.models import model_geometry
from sgl_ragged.launch.multimodal import refuse_positions
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.profiles.budgets import check_budgets, check_ratio
from sgl_ragged.profiles.built_in_samples import SAMPLES
from sgl_ragged.profiles.profile import SCOPES, VALUE_MEAN, Profile, profile_kept
from sgl_ragged.scorers import get_scorer, scorer_names

_RESERVED_TOKENS = 8
"""Tokens of the context that samples leave free: SGLang uses a few itself, and records nothing of longer requests."""

ERROR_SAMPLES = 8
"""Default number of samples on which output errors are measured. The first 8 built-in ones include each kind."""

_NO_ERRORS = "output errors cannot be measured for this model's residual stream, or its heads are on several ranks"


def add_parser(commands: Any) -> None:
    """Add the command to the front end."""
    parser = commands.add_parser(
        "run",
        help="calibrate a model",
        description="Runs sample contexts through SGLang and writes a profile of head budgets.",
    )
    add = parser.add_argument
    add_model_flags(parser)
    add("--scorer", nargs="+", default=["gate"], metavar="NAME", help=f"{', '.join(scorer_names())} [gate]")
    add("--scorer-weights", metavar="FILE", help="gate weights, for scorers that need them")
    add("--ratio", type=float, default=0.3, help="kept / full KV bytes, for the reported budgets [0.3]")
    add("--scope", choices=SCOPES, default="model", help="where heads compete for the ratio [model]")
    add(
        "--queries",
        choices=("answers", "all"),
        help="whose attention counts: tokens that answer, or all tokens [answers if the data has them]",
    )
    add(
        "--error-samples",
        type=int,
        metavar="N",
        help=f"weigh budgets by output errors of fitted heads, measured on N samples [{ERROR_SAMPLES}; 0 with --tp]",
    )
    add("--tau-stable", type=float, default=TAU_STABLE, metavar="TAU", help=f"stability of anchors [{TAU_STABLE}]")
    add("--tau-sim", type=float, default=TAU_SIM, metavar="TAU", help=f"overlap of similar heads [{TAU_SIM}]")
    add("--segment", type=int, default=256, help="tokens per segment; serve with the same [256]")
    add("--samples", type=int, default=SAMPLES, help=f"number of samples [{SAMPLES}]")
    add("--data", nargs="+", type=Path, default=[], metavar="FILE", help=".jsonl or text [built in]")
    add("--max-tokens", type=int, default=8192, help="samples are cut to this length [8192]")
    add("--trust-remote-code", action="store_true", help="as for the server")
    add("--tokenizer-path", metavar="PATH", help="as for the server [that of the model]")
    add("--revision", help="as for the server")
    add("--seed", type=int, default=0, help="seed of the built-in samples [0]")
    add("--work", type=Path, help="folder of recordings, to resume from [OUTPUT.recordings]")
    add(
        "--resume-from",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="folders of ended runs: recordings with the same settings move to --work, the folders are deleted",
    )
    add(
        "--hidden-states",
        metavar="BYTES",
        help=f"scorer gate: maximum of hidden states on disk at a time [{MAX_HIDDEN_STATES_BYTES >> 30}GiB, and at "
        f"most half of the free space]",
    )
    add(
        "--quality-ratios",
        nargs="+",
        type=float,
        default=[],
        metavar="R",
        help="measure the profile's loss at these ratios, as python -m calib quality does",
    )
    add("--ends-with-input", action="store_true", help="end when standard input ends, for programs that start this one")
    add("--json", action="store_true", help="print the result as JSON")
    add(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="profile.safetensors; with several scorers the name must contain {scorer}",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Calibrate, and write one profile per scorer.

    Raises:
        RaggedConfigError: bad input, or a disk that is full.
    """
    if options.ends_with_input:
        end_with_input()
    _check(options)
    server_flags = {name: getattr(options, name) for name in ("trust_remote_code", "tokenizer_path", "revision")}
    engine_args = {name: value for name, value in server_flags.items() if value} | options.engine_args
    config = read_config(options.model, engine_args)
    geometry = model_geometry(config)
    for scorer in options.scorer:
        refuse_positions(config.hf_text_config, scorer)
    if options.tp < 1 or geometry.num_heads % options.tp:
        raise RaggedConfigError(
            f"--tp {options.tp} does not divide the model's {geometry.num_heads} KV heads; use a divisor"
        )
    tokenizer = functools.cache(lambda: load_tokenizer(options.model, engine_args))
    max_tokens = min(options.max_tokens, config.context_len - _RESERVED_TOKENS)
    samples = tokenize(
        read_samples(options.data, options.samples, options.seed), tokenizer, max_tokens, options.segment + 1
    )
    texts = _reference_texts(tokenizer, options.segment, max_tokens)
    queries = _choose_queries(options, samples)
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
    error_samples = options.error_samples
    if error_samples is None:
        error_samples = ERROR_SAMPLES if options.tp == 1 else 0
    need = disk_need(
        work,
        geometry,
        config.hf_text_config.hidden_size,
        samples,
        options.segment,
        num_scorers=len(recorded_scorers(options.scorer)),
        trained=trained,
        max_hidden_states_bytes=parse_bytes(options.hidden_states) if options.hidden_states else None,
    )
    print(need, file=sys.stderr)
    longest = max(map(len, (*(sample.input_ids for sample in samples), *texts.values())))
    kv_bytes = recording_kv_bytes(geometry, options.segment, longest)
    with show_progress() as progress, make_engine(settings, work, kv_bytes) as engine:
        advance = progress.start("samples through SGLang", len(samples) * num_passes(options.scorer))
        recordings = measure(engine, samples, range(need.layers_at_once), advance)
        advance = progress.start("reference texts", len(texts))
        reference = record_reference(engine, texts, options.segment, config.vocab_size, advance)
        if need.layers_at_once == need.num_layers and not error_samples:
            engine.close()
        statistics, held_out = calibrated_statistics(settings, work), None
        book = codebook(recordings, config.context_len, options.segment)
        statistics |= {VALUE_MEAN: value_mean(recordings)} | book
        if trained:
            advance = progress.start("training gates, layers", geometry.num_layers)
            hidden = HiddenStates(engine, samples, work, need.layers_at_once, need.num_layers)
            gates, held_out = train_gates(
                recordings, hidden.layer, options.segment, work, queries, options.ratio, advance
            )
            statistics |= gates
        errors = _output_errors(options, engine, samples[:error_samples], recordings, book, queries, progress)
    tasks, reports = [sample.task for sample in samples], []
    for scorer in options.scorer:
        names = dict.fromkeys((VALUE_MEAN, *book, *get_scorer(scorer).statistics))
        roles = head_statistics(recordings, scorer, queries, options.tau_stable, options.tau_sim)
        profile = derive_profile(
            recordings,
            tasks,
            settings,
            scorer,
            ratio=options.ratio,
            scope=options.scope,
            queries=queries,
            head_dim=geometry.head_dim,
            statistics={name: statistics[name] for name in names if name in statistics} | roles,
            held_out=held_out if get_scorer(scorer).trained else None,
            errors=errors.get(scorer),
            reference=reference,
        )
        path = Path(options.output.replace("{scorer}", scorer))
        profile.save(path)
        if options.quality_ratios and profile.reference:
            model = ServedModel(options.model, options.dtype, options.tp, engine_args)
            with show_progress() as progress:
                advance = progress.start(f"quality of {scorer}, ratios", len(options.quality_ratios))
                profile = measure_quality(path, profile, model, options.quality_ratios, advance)
        reports.append(_report(profile, path, options))
    if options.json:
        print(json.dumps(reports, indent=2))
    else:
        print(f"recordings are kept in {work} for another --ratio, --scope, --queries, ..; delete them when done")


def _reference_texts(tokenizer: Callable[[], Any], segment: int, max_tokens: int) -> Texts:
    """Return the held-out texts; none, and a line that says so, for a model without a tokenizer."""
    try:
        return held_out_texts(tokenizer(), segment, max_tokens)
    except RaggedConfigError as error:
        print(f"the profile gets no reference for sgl-ragged verify: {error}", file=sys.stderr)
        return {}


def end_with_input() -> None:
    """End this process and its children when standard input ends, a pipe that the starting process holds."""
    threading.Thread(target=_watch, args=(sys.stdin.fileno(),), daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    # No cleanup is needed: files are written as a whole or not at all.
    os._exit(1)


def _output_errors(
    options: argparse.Namespace,
    engine: Engine,
    samples: Sequence[TokenizedSample],
    recordings: Sequence[Mapping[str, torch.Tensor]],
    book: Mapping[str, torch.Tensor],
    queries: str,
    progress: Bars | PlainLines,
) -> dict[str, np.ndarray]:
    """Measure output errors on some samples, by scorer; empty without samples, or where SGLang's model hides them."""
    errors: dict[str, np.ndarray] = {}
    for scorer in options.scorer if samples else ():
        advance = progress.start(f"output errors of {scorer}", len(samples))
        scores = [recording[f"{scorer}.scores"] for recording in recordings[: len(samples)]]
        measured = measure_errors(engine, samples, scores, book, f"{scorer}-{queries}-{len(samples)}", advance)
        if measured is not None:
            errors[scorer] = measured.numpy()
        elif options.error_samples is None:
            print(f"{_NO_ERRORS}: budgets are those of coverage alone", file=sys.stderr)
        else:
            raise RaggedConfigError(f"--error-samples {options.error_samples}: {_NO_ERRORS}; remove the flag")
    return errors


def _report(profile: Profile, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Print a profile's budgets and stability, unless JSON is wanted; return its entry in the JSON report."""
    kept = profile_kept(profile, options.ratio, options.segment)
    stability = measure_stability(profile)
    assert stability is not None, "a calibrated profile holds the shares of its samples"
    if not options.json:
        print(
            f"{path}: {profile.scorer}, coverage over the {profile.scope}, attention of {profile.queries}, "
            f"{profile.samples} samples; kept per {options.segment}-token segment min/max {kept.min()}/{kept.max()} "
            f"(mean share {kept.mean() / options.segment:.4f})"
        )
        print_stability(stability, Console())
    return {
        "profile": str(path),
        "scorer": profile.scorer,
        "digest": profile.digest(),
        "stability": asdict(stability),
    }


def _choose_queries(options: argparse.Namespace, samples: Sequence[TokenizedSample]) -> str:
    """Choose whose attention counts: answers, if every sample has one after its first segment, else all."""
    have_answers = all(any(stop - 1 > options.segment for _, stop in sample.answers) for sample in samples)
    if options.queries == "answers" and not have_answers:
        raise RaggedConfigError(
            "--queries answers: a sample has no answer after its first segment; give messages, or answers with "
            "input_ids, or use --queries all"
        )
    return options.queries or ("answers" if have_answers else "all")


def _check(options: argparse.Namespace) -> None:
    check_budgets(options.ratio, options.segment)
    for ratio in options.quality_ratios:
        check_ratio(ratio)
    if options.samples < 2:
        raise RaggedConfigError(f"--samples {options.samples}: a standard deviation needs at least 2")
    if (options.error_samples or 0) < 0:
        raise RaggedConfigError(f"--error-samples {options.error_samples}: at least 0")
    for flag, value in (("--tau-stable", options.tau_stable), ("--tau-sim", options.tau_sim)):
        if not 0 <= value <= 1:
            raise RaggedConfigError(f"{flag} {value} is outside [0, 1]: it is a share of the tokens attended to most")
    if len(set(options.scorer)) > 1 and "{scorer}" not in options.output:
        raise RaggedConfigError(
            "with several scorers the name in -o must contain {scorer}, such as {scorer}.safetensors"
        )
    for name in options.scorer:
        scorer = get_scorer(name)
        if scorer.reads_hidden_states and not scorer.trained and options.scorer_weights is None:
            raise RaggedConfigError(f"scorer {name!r} needs trained gates: pass --scorer-weights FILE")
    parent = Path(options.output).parent
    if not parent.is_dir():
        raise RaggedConfigError(f"the folder of the output, {parent}, does not exist; make it first")
    for name in options.scorer:
        path = Path(options.output.replace("{scorer}", name))
        if path.is_dir():
            raise RaggedConfigError(
                f"-o {path} is a directory; name a file in it, such as {path / 'profile.safetensors'}"
            )
