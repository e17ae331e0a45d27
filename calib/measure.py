"""Runs samples through SGLang at rho = 1 with the recorder in its worker, one file per sample; resumable."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from calib.attended import ANSWERING, STARTS, choose_windows
from calib.codebook import choose_queries, queries_per_sample
from calib.hidden_states import keep_hidden_states
from calib.query_moments import seen_from_the_end
from calib.recorder import (
    ANSWERS,
    ASKED_SCORES,
    CODEBOOK_QUERIES,
    ERRORS,
    LAYERS,
    MOMENTS,
    ROPE,
    SCORES,
    STATISTICS,
    VALUES,
    WINDOWS,
    Recorder,
    failure_file,
    hidden_states_recording,
    recording_file,
)
from calib.recordings_folder import Settings, readable, save
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers import get_scorer

BASELINE = "keydiff"
"""The untrained scorer that trained ones are compared with in reports."""

STATISTICS_FILE = "statistics.safetensors"

KEPT = (
    "make room on that disk, or name a folder on another one (with --work, or SGLANG_RAGGED_CACHE where a server "
    "calibrates); what was recorded is kept, and the same command goes on from there"
)
"""What a full disk asks for."""


def make_engine(settings: Settings, folder: Path, kv_bytes: int) -> Engine:
    """The engine with a recorder for all scorers, which starts with its first sample.

    Args:
        kv_bytes: KV budget that holds the longest sample uncompressed.
    """
    statistics = any(_calibrated_statistics(name) for name in settings.scorers)
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
    """Record all samples that the engine's folder does not hold yet; returns the recordings in sample order.

    Scorers that need statistics take a pass of their own over the samples first.

    Args:
        layers: whose hidden states are kept beside the recordings (`HiddenStates`), if a scorer is trained on them.
        advance: called once per sample and pass.

    Raises:
        RaggedConfigError: SGLang refuses the model, or the disk is full.
    """
    folder, settings = engine.folder, engine.settings
    if any(_calibrated_statistics(name) for name in settings.scorers):
        _measure_statistics(settings, samples, folder / STATISTICS_FILE, engine.kv_bytes, advance)
    names = [folder / f"sample-{number:05d}.safetensors" for number in range(len(samples))]
    missing = [number for number, name in enumerate(names) if not readable(name)]
    for _ in range(len(samples) - len(missing)):
        advance()
    trained = any(get_scorer(name).trained for name in settings.scorers)
    for number in missing:
        recording = engine.record(
            samples[number], layers if trained else range(0), codebook=queries_per_sample(len(samples))
        )
        if trained:
            keep_hidden_states(folder, number, layers)
        save(recording, names[number])
        advance()
    return [load_file(name) for name in names]


def measure_errors(
    engine: Engine,
    samples: Sequence[TokenizedSample],
    scores: Sequence[torch.Tensor],
    codebook: Mapping[str, torch.Tensor],
    name: str,
    advance: Callable[[], None],
) -> torch.Tensor | None:
    """float32 [layers, heads, counts], as `output_error.left_over` says, means over samples; None if the engine's model
    is not one whose residual stream can be looked at.

    Args:
        scores: float32 [segments, layers, heads, S] of each sample, by which heads choose.
        codebook: CODEBOOK and ROPE of the profile, by which what they keep is fitted, or nothing.
        name: of what is asked, in the engine's folder: what was found there before is not measured again.
    """
    asked, target, found = engine.folder / ASKED_SCORES, engine.folder / f"errors-{name}.safetensors", []
    if readable(target):
        return load_file(target)[ERRORS]
    try:
        for sample, own in zip(samples, scores, strict=True):
            save({SCORES: own.float().contiguous(), **codebook}, asked)
            recording = engine.record(sample)
            if ERRORS not in recording:
                return None
            found.append(recording[ERRORS])
            advance()
    finally:
        asked.unlink(missing_ok=True)
    errors = torch.stack(found).mean(dim=0)
    save({ERRORS: errors}, target)
    return errors


def calibrated_statistics(settings: Settings, folder: Path) -> dict[str, torch.Tensor]:
    """Statistics that `measure` left in the folder for scorers that need them, empty if none does."""
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
    """True if the scorer needs statistics that calibration makes; raises if it needs others."""
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
    sums = load_file(sums_file) if readable(sums_file) else {}
    done = int(sums["samples"]) if sums else 0
    for _ in range(done):
        advance()
    if done < len(samples):
        with Engine(settings, Recorder(str(target.parent), (), moments=True), kv_bytes) as engine:
            for sample in samples[done:]:
                moments = engine.record(sample) | {"samples": torch.tensor(1)}
                sums = {n: v if n in ROPE or not sums else v + sums[n] for n, v in moments.items()}
                save(sums, sums_file)
                advance()
    mean = sums["query_mean"] / sums["count"]
    covariance = sums["query_covariance"] / sums["count"] - mean[..., :, None] * mean[..., None, :]
    averaged = seen_from_the_end(mean, covariance, sums["rope_frequencies"][0, 0])
    found = {name: moment.float().contiguous() for name, moment in zip(MOMENTS, averaged, strict=True)}
    save(found | {name: sums[name] for name in ROPE}, target)


class Engine:
    """SGLang's engine with the recorder: one request at a time, no radix cache, nothing compressed.

    Context manager. It starts with the first sample and may be closed and used again.
    """

    def __init__(self, settings: Settings, recorder: Recorder, kv_bytes: int) -> None:
        self.settings, self.kv_bytes = settings, kv_bytes
        self.folder, self.tp, self.segment = Path(recorder.folder), settings.tp, settings.segment
        self._engine: Any = None
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
            # It waits while gates are trained.
            sleep_on_idle=True,
            tp_size=settings.tp,
            **settings.engine_args,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End SGLang's processes, if there are any."""
        if self._engine is None:
            return
        workers = psutil.Process().children(recursive=True)
        self._engine.shutdown()
        self._engine = None
        # Else they stay as zombies for as long as this process computes.
        psutil.wait_procs(workers, timeout=30)

    def _start(self) -> None:
        # SGLang's workers inherit these: silent about optional packages, and idle threads do not take the cores.
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import sglang

        logging.getLogger("sglang").setLevel(logging.ERROR)
        self._engine = sglang.Engine(**self.arguments)

    def record(
        self, sample: TokenizedSample, layers: range = range(0), *, alone: bool = False, codebook: int = 0
    ) -> dict[str, torch.Tensor]:
        """Prefill one sample; returns what the recorders of all ranks wrote, heads side by side.

        Args:
            layers: whose hidden states `hidden_states_recording` is to hold.
            alone: nothing else is recorded, and nothing returned.
            codebook: of how many tokens queries are recorded for the codebook.

        Raises:
            RaggedConfigError: a recorder could not write.
        """
        if self._engine is None:
            self._start()
        paths = [] if alone else [recording_file(self.folder, rank) for rank in range(self.tp)]
        wanted = [*paths, *([hidden_states_recording(self.folder)] if layers else [])]
        for path in (*wanted, failure_file(self.folder)):
            path.unlink(missing_ok=True)
        (self.folder / ANSWERS).write_text(json.dumps(sample.answers))
        (self.folder / WINDOWS).write_text(
            json.dumps(choose_windows(len(sample.input_ids), self.segment, sample.answers))
        )
        asked = choose_queries(len(sample.input_ids), self.segment, codebook)
        (self.folder / CODEBOOK_QUERIES).write_text(json.dumps(asked))
        (self.folder / LAYERS).write_text(json.dumps([layers.start, layers.stop, alone]))
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        self._engine.generate(input_ids=list(sample.input_ids), sampling_params=sampling)
        if failure_file(self.folder).is_file():
            reason = failure_file(self.folder).read_text().strip() or "no space left"
            raise RaggedConfigError(f"the recorder cannot write to {self.folder} ({reason}): {KEPT}")
        if not all(path.is_file() for path in wanted):
            raise RuntimeError("the engine answered but recorded nothing")
        return join_ranks([load_file(path) for path in paths]) if paths else {}


def join_ranks(recordings: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One recording of all heads from those of the tensor-parallel ranks, in rank order."""
    if len(recordings) == 1:
        return recordings[0]
    whole = ("tokens", "count", STARTS, ANSWERING, *ROPE)
    axis = {name: 2 if name.endswith(".scores") else 1 for name in recordings[0]}
    return {
        name: tensor if name in whole else torch.cat([r[name] for r in recordings], dim=axis[name])
        for name, tensor in recordings[0].items()
    }
