"""Passes over the samples: recordings, query moments and output errors, one file per result, resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from calib.codebook import queries_per_sample
from calib.engine import Engine
from calib.hidden_states import keep_hidden_states
from calib.query_moments import seen_from_the_end
from calib.recorder import ASKED_SCORES, Recorder
from calib.recording import ERRORS, MOMENTS, ROPE, SCORES, STATISTICS, VALUES
from calib.recordings_folder import Settings, readable, save
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers import get_scorer

BASELINE = "keydiff"
"""Untrained scorer with which reports compare trained ones."""

STATISTICS_FILE = "statistics.safetensors"


def make_engine(settings: Settings, folder: Path, kv_bytes: int) -> Engine:
    """Make the engine with a recorder for all scorers; it starts with its first sample.

    Args:
        kv_bytes: KV budget that holds the longest sample uncompressed.
    """
    statistics = any(_has_calibrated_statistics(name) for name in settings.scorers)
    recorder = Recorder(
        str(folder),
        recorded_scorers(settings.scorers),
        str(folder / STATISTICS_FILE) if statistics else None,
        reads_hidden_states=any(get_scorer(name).trained for name in settings.scorers),
    )
    return Engine(settings, recorder, kv_bytes)


def measure(
    engine: Engine, samples: Sequence[TokenizedSample], layers: range, advance: Callable[[], None]
) -> list[dict[str, torch.Tensor]]:
    """Record all samples that the engine's folder does not hold yet; return the recordings in sample order.

    Scorers that need statistics take a pass of their own over the samples first.

    Args:
        layers: layers whose hidden states are kept (`HiddenStates`), if a scorer is trained on them.
        advance: called once per sample and pass.

    Raises:
        RaggedConfigError: SGLang refuses the model, or the disk is full.
    """
    folder, settings = engine.folder, engine.settings
    if any(_has_calibrated_statistics(name) for name in settings.scorers):
        _measure_statistics(settings, samples, folder / STATISTICS_FILE, engine.kv_bytes, advance)
    paths = [folder / f"sample-{number:05d}.safetensors" for number in range(len(samples))]
    missing = [number for number, path in enumerate(paths) if not readable(path)]
    for _ in range(len(samples) - len(missing)):
        advance()
    trained = any(get_scorer(name).trained for name in settings.scorers)
    for number in missing:
        recording = engine.record(
            samples[number], layers if trained else range(0), codebook=queries_per_sample(len(samples))
        )
        if trained:
            keep_hidden_states(folder, number, layers)
        save(recording, paths[number])
        advance()
    return [load_file(path) for path in paths]


def measure_errors(
    engine: Engine,
    samples: Sequence[TokenizedSample],
    scores: Sequence[torch.Tensor],
    codebook: Mapping[str, torch.Tensor],
    name: str,
    advance: Callable[[], None],
) -> torch.Tensor | None:
    """Measure output errors of heads that keep few tokens (`output_error.left_over`), means over samples.

    Args:
        scores: float32 [segments, layers, heads, S] per sample, by which heads choose tokens.
        codebook: CODEBOOK and ROPE of the profile, by which kept tokens are fitted; empty for no fit.
        name: key of the result in the engine's folder; an existing result is returned as it is.
        advance: called once per sample.

    Returns:
        float32 [layers, heads, counts]; None if the model's residual stream cannot be observed.
    """
    request, result, errors = engine.folder / ASKED_SCORES, engine.folder / f"errors-{name}.safetensors", []
    if readable(result):
        return load_file(result)[ERRORS]
    try:
        for sample, sample_scores in zip(samples, scores, strict=True):
            save({SCORES: sample_scores.float().contiguous(), **codebook}, request)
            recording = engine.record(sample)
            if ERRORS not in recording:
                return None
            errors.append(recording[ERRORS])
            advance()
    finally:
        request.unlink(missing_ok=True)
    mean = torch.stack(errors).mean(dim=0)
    save({ERRORS: mean}, result)
    return mean


def calibrated_statistics(settings: Settings, folder: Path) -> dict[str, torch.Tensor]:
    """Load the statistics that `measure` wrote for scorers that need them; empty if no scorer does."""
    path = folder / STATISTICS_FILE
    return load_file(path) if any(_has_calibrated_statistics(name) for name in settings.scorers) else {}


def value_mean(recordings: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Average the values of all tokens of the samples: float32 [layers, heads, head_dim]."""
    return sum(r[VALUES].double() for r in recordings).div(sum(int(r["tokens"]) for r in recordings)).float()


def recorded_scorers(scorers: Sequence[str]) -> tuple[str, ...]:
    """List the scorers whose scores are recorded: untrained ones, and BASELINE if there are trained ones."""
    untrained = [name for name in scorers if not get_scorer(name).trained]
    return tuple(dict.fromkeys(untrained if len(untrained) == len(scorers) else [*untrained, BASELINE]))


def num_passes(scorers: Sequence[str]) -> int:
    """Return the number of times that `measure` sends each sample through the model."""
    return 2 if any(_has_calibrated_statistics(name) for name in scorers) else 1


def _has_calibrated_statistics(name: str) -> bool:
    """Return whether the scorer needs statistics that calibration measures.

    Raises:
        RaggedConfigError: it needs statistics that calibration does not measure.
    """
    scorer = get_scorer(name)
    if not scorer.statistics or scorer.reads_hidden_states or scorer.trained:
        return False
    unknown = set(scorer.statistics) - set(STATISTICS)
    if unknown:
        raise RaggedConfigError(
            f"scorer {name!r} needs {', '.join(sorted(unknown))}, which calibration does not measure; use another "
            f"scorer"
        )
    return True


def _measure_statistics(
    settings: Settings, samples: Sequence[TokenizedSample], target: Path, kv_bytes: int, advance: Callable[[], None]
) -> None:
    """Measure mean and covariance of the queries over all samples, seen from a segment's end.

    Partial sums are stored with the number of their samples, so that an interrupted pass resumes.
    """
    sums_path = target.with_name("query-moments.safetensors")
    sums = load_file(sums_path) if readable(sums_path) else {}
    done = int(sums["samples"]) if sums else 0
    for _ in range(done):
        advance()
    if done < len(samples):
        with Engine(settings, Recorder(str(target.parent), (), moments=True), kv_bytes) as engine:
            for sample in samples[done:]:
                moments = engine.record(sample) | {"samples": torch.tensor(1)}
                sums = {n: v if n in ROPE or not sums else v + sums[n] for n, v in moments.items()}
                save(sums, sums_path)
                advance()
    mean = sums["query_mean"] / sums["count"]
    covariance = sums["query_covariance"] / sums["count"] - mean[..., :, None] * mean[..., None, :]
    averaged = seen_from_the_end(mean, covariance, sums["rope_frequencies"][0, 0])
    statistics = {name: moment.float().contiguous() for name, moment in zip(MOMENTS, averaged, strict=True)}
    save(statistics | {name: sums[name] for name in ROPE}, target)
