"""Runs samples through SGLang at rho = 1 with the recorder in its worker, one file per sample; resumable."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from calib.attended import ANSWERING, STARTS, choose_windows
from calib.query_moments import seen_from_the_end
from calib.recorder import (
    ANSWERS,
    HIDDEN_STATES,
    MOMENTS,
    ROPE,
    STATISTICS,
    VALUES,
    WINDOWS,
    Recorder,
    recording_file,
)
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers import get_scorer

BASELINE = "keydiff"
"""The untrained scorer that trained ones are compared with in reports."""

STATISTICS_FILE = "statistics.safetensors"
_SETTINGS_FILE = "settings.json"


RECORDINGS = 4
"""Version of what a recording holds."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is recorded; recordings of other settings in the same folder are refused."""

    model: str
    model_fingerprint: str
    scorers: tuple[str, ...]
    segment: int
    dataset_hash: str
    dtype: str
    scorer_weights: str | None
    tp: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)
    recordings: int = RECORDINGS


def measure(
    settings: Settings,
    samples: Sequence[TokenizedSample],
    folder: Path,
    kv_bytes: int,
    advance: Callable[[], None],
) -> list[dict[str, torch.Tensor]]:
    """Record all samples that `folder` does not hold yet; returns the recordings in sample order.

    Scorers that need statistics take a pass of their own over the samples first.

    Args:
        kv_bytes: KV budget that holds the longest sample uncompressed.
        advance: called once per sample and pass.

    Raises:
        RaggedConfigError: the folder holds recordings of other settings, or SGLang refuses the model.
    """
    _claim(folder, settings)
    statistics = None
    if any(_calibrated_statistics(name) for name in settings.scorers):
        statistics = folder / STATISTICS_FILE
        _measure_statistics(settings, samples, statistics, kv_bytes, advance)
    names = [folder / f"sample-{number:05d}.safetensors" for number in range(len(samples))]
    missing = [number for number, name in enumerate(names) if not _readable(name)]
    for _ in range(len(samples) - len(missing)):
        advance()
    if missing:
        recorder = Recorder(
            str(folder),
            recorded_scorers(settings.scorers),
            str(statistics) if statistics else None,
            reads_hidden_states=any(get_scorer(name).trained for name in settings.scorers),
        )
        with _Engine(settings, recorder, kv_bytes) as engine:
            for number in missing:
                recording = engine.record(samples[number])
                if HIDDEN_STATES in recording:
                    _save({HIDDEN_STATES: recording.pop(HIDDEN_STATES)}, hidden_states_file(folder, number))
                _save(recording, names[number])
                advance()
    return [load_file(name) for name in names]


def hidden_states_file(folder: Path, number: int) -> Path:
    """Where `measure` leaves HIDDEN_STATES of a sample, if a scorer is trained on them."""
    return folder / f"sample-{number:05d}.hidden-states.safetensors"


def calibrated_statistics(settings: Settings, folder: Path) -> dict[str, torch.Tensor]:
    """What `measure` left in the folder for scorers that need statistics, empty if none does."""
    path = folder / STATISTICS_FILE
    return load_file(path) if any(_calibrated_statistics(name) for name in settings.scorers) else {}


def value_mean(recordings: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """float32 [layers, heads, head_dim]: mean value over all tokens of the samples."""
    return sum(r[VALUES].double() for r in recordings).div(sum(int(r["tokens"]) for r in recordings)).float()


def recorded_scorers(scorers: Sequence[str]) -> tuple[str, ...]:
    """Scorers whose scores are recorded: those that need no training, and one to compare trained ones with."""
    plain = [name for name in scorers if not get_scorer(name).trained]
    return tuple(dict.fromkeys(plain if len(plain) == len(scorers) else [*plain, BASELINE]))


def passes(scorers: Sequence[str]) -> int:
    """How often `measure` runs over the samples."""
    return 2 if any(_calibrated_statistics(name) for name in scorers) else 1


def _calibrated_statistics(scorer: str) -> bool:
    """Whether the scorer needs statistics that calibration makes; raises if it needs others."""
    found = get_scorer(scorer)
    if not found.statistics or found.reads_hidden_states or found.trained:
        return False
    unknown = set(found.statistics) - set(STATISTICS)
    if unknown:
        raise RaggedConfigError(
            f"scorer {scorer!r} needs {', '.join(sorted(unknown))}, which calibration does not measure"
        )
    return True


def _measure_statistics(
    settings: Settings, samples: Sequence[TokenizedSample], target: Path, kv_bytes: int, advance: Callable[[], None]
) -> None:
    """Mean and covariance of the queries over all samples, seen from a segment's end.

    Sums so far and how many samples they hold are kept.
    """
    sums_file = target.with_name("query-moments.safetensors")
    sums = load_file(sums_file) if _readable(sums_file) else {}
    done = int(sums["samples"]) if sums else 0
    for _ in range(done):
        advance()
    if done < len(samples):
        with _Engine(settings, Recorder(str(target.parent), (), moments=True), kv_bytes) as engine:
            for sample in samples[done:]:
                moments = engine.record(sample) | {"samples": torch.tensor(1)}
                sums = {n: v if n in ROPE or not sums else v + sums[n] for n, v in moments.items()}
                _save(sums, sums_file)
                advance()
    mean = sums["query_mean"] / sums["count"]
    covariance = sums["query_covariance"] / sums["count"] - mean[..., :, None] * mean[..., None, :]
    averaged = seen_from_the_end(mean, covariance, sums["rope_frequencies"][0, 0])
    found = {name: moment.float().contiguous() for name, moment in zip(MOMENTS, averaged, strict=True)}
    save_file(found | {name: sums[name] for name in ROPE}, str(target))


class _Engine:
    """SGLang's engine with the recorder: one request at a time, no radix cache, nothing compressed."""

    def __init__(self, settings: Settings, recorder: Recorder, kv_bytes: int) -> None:
        self.folder, self.tp, self.segment = Path(recorder.folder), settings.tp, settings.segment
        found = map(get_scorer, settings.scorers)
        gated = [scorer.name for scorer in found if scorer.reads_hidden_states and not scorer.trained]
        self.arguments: dict[str, Any] = dict(
            model_path=settings.model,
            dtype=settings.dtype,
            skip_tokenizer_init=True,
            log_level="error",
            kv_pool="ragged",
            kv_bytes=str(kv_bytes),
            ragged_ratio=1.0,
            ragged_segment=settings.segment,
            ragged_profile="uniform",
            # At rho = 1 nothing is scored; a scorer that reads hidden states must still see them.
            ragged_scorer=gated[0] if gated else "streaming",
            ragged_scorer_weights=settings.scorer_weights if gated else None,
            ragged_fairkv="none",
            ragged_observer=recorder,
            disable_radix_cache=True,
            max_running_requests=1,
            tp_size=settings.tp,
            **settings.engine_args,
        )

    def __enter__(self) -> _Engine:
        # SGLang's workers inherit these: silent about optional packages, and idle threads do not take the cores.
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import sglang

        logging.getLogger("sglang").setLevel(logging.ERROR)
        self.engine = sglang.Engine(**self.arguments)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    def record(self, sample: TokenizedSample) -> dict[str, torch.Tensor]:
        """Prefill one sample; returns what the recorders of all ranks wrote, heads side by side."""
        paths = [recording_file(self.folder, rank) for rank in range(self.tp)]
        for path in paths:
            path.unlink(missing_ok=True)
        (self.folder / ANSWERS).write_text(json.dumps(sample.answers))
        (self.folder / WINDOWS).write_text(
            json.dumps(choose_windows(len(sample.input_ids), self.segment, sample.answers))
        )
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        self.engine.generate(input_ids=list(sample.input_ids), sampling_params=sampling)
        if not all(path.is_file() for path in paths):
            raise RuntimeError("the engine answered but recorded nothing")
        return join_ranks([load_file(path) for path in paths])


def join_ranks(recordings: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One recording of all heads from those of the tensor-parallel ranks, in rank order."""
    if len(recordings) == 1:
        return recordings[0]
    whole = ("tokens", "count", STARTS, ANSWERING, HIDDEN_STATES, *ROPE)
    axis = {name: 2 if name.endswith(".scores") else 1 for name in recordings[0]}
    return {
        name: tensor if name in whole else torch.cat([r[name] for r in recordings], dim=axis[name])
        for name, tensor in recordings[0].items()
    }


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file so that it exists as a whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(tensors, str(partial))
    partial.replace(path)


def _claim(folder: Path, settings: Settings) -> None:
    """Mark the folder as that of this calibration; raise RaggedConfigError if it belongs to another."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _SETTINGS_FILE
    wanted = json.dumps(asdict(settings), indent=2)
    if path.is_file() and path.read_text() != wanted:
        raise RaggedConfigError(
            f"{folder} holds recordings made with other settings or data: delete it, or choose another --work folder"
        )
    path.write_text(wanted)


def _readable(path: Path) -> bool:
    try:
        load_file(path)
    except (OSError, SafetensorError):
        return False
    return True
