"""SGLang's engine with the recorder in its workers: one request at a time, nothing compressed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from calib.attended import ANSWERING, STARTS, choose_windows
from calib.codebook import choose_queries
from calib.recorder import (
    ANSWERS,
    CODEBOOK_QUERIES,
    LAYERS,
    WINDOWS,
    Recorder,
    failure_file,
    hidden_states_recording,
    recording_file,
)
from calib.recording import ROPE
from calib.recordings_folder import Settings
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.profiles.budgets import uniform_kept
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.scorers import get_scorer

RESUME_ADVICE = (
    "make room on that disk, or name a folder on another one (with --work, or SGLANG_RAGGED_CACHE where a server "
    "calibrates); recordings are kept, and the same command resumes from them"
)
"""Advice in errors about a full disk."""


class Engine:
    """SGLang's engine with a recorder, at ratio 1 and without a radix cache. Context manager.

    It starts with the first sample. After `close` it starts again with the next one.

    Args:
        kv_bytes: KV budget that holds the longest sample uncompressed (`recording_kv_bytes`).
    """

    def __init__(self, settings: Settings, recorder: Recorder, kv_bytes: int) -> None:
        self.settings, self.kv_bytes = settings, kv_bytes
        self.folder, self.tp, self.segment = Path(recorder.folder), settings.tp, settings.segment
        self._engine: Any = None
        scorers = map(get_scorer, settings.scorers)
        gated = [scorer.name for scorer in scorers if scorer.reads_hidden_states and not scorer.trained]
        self.arguments: dict[str, Any] = dict(
            model_path=settings.model,
            dtype=settings.dtype,
            kv_bytes=str(kv_bytes),
            ragged_ratio=1.0,
            ragged_segment=settings.segment,
            ragged_profile="uniform",
            # At ratio 1 nothing is scored; scorers that read hidden states still need them.
            ragged_scorer=gated[0] if gated else "streaming",
            ragged_scorer_weights=settings.scorer_weights if gated else None,
            ragged_fairkv="none",
            ragged_observer=recorder,
            # The engine idles while gates are trained.
            sleep_on_idle=True,
            tp_size=settings.tp,
            **settings.engine_args,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End SGLang's processes, if they were started."""
        if self._engine is None:
            return
        _end(self._engine)
        self._engine = None

    def _start(self) -> None:
        self._engine = _begin(self.arguments)

    def record(
        self, sample: TokenizedSample, layers: range = range(0), *, alone: bool = False, codebook: int = 0
    ) -> dict[str, torch.Tensor]:
        """Prefill one sample and return its recording, the heads of all ranks side by side.

        Args:
            layers: layers whose hidden states are written to `hidden_states_recording`.
            alone: record hidden states only, and return nothing.
            codebook: number of tokens whose queries are recorded for the codebook.

        Raises:
            RaggedConfigError: a recorder could not write.
        """
        if self._engine is None:
            self._start()
        paths = [] if alone else [recording_file(self.folder, rank) for rank in range(self.tp)]
        expected = [*paths, *([hidden_states_recording(self.folder)] if layers else [])]
        for path in (*expected, failure_file(self.folder)):
            path.unlink(missing_ok=True)
        length = len(sample.input_ids)
        for name, content in (
            (ANSWERS, sample.answers),
            (WINDOWS, choose_windows(length, self.segment, sample.answers)),
            (CODEBOOK_QUERIES, choose_queries(length, self.segment, codebook)),
            (LAYERS, [layers.start, layers.stop, alone]),
        ):
            (self.folder / name).write_text(json.dumps(content))
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        self._engine.generate(input_ids=list(sample.input_ids), sampling_params=sampling)
        if failure_file(self.folder).is_file():
            reason = failure_file(self.folder).read_text().strip() or "no space left"
            raise RaggedConfigError(f"the recorder cannot write to {self.folder} ({reason}): {RESUME_ADVICE}")
        if not all(path.is_file() for path in expected):
            raise RuntimeError("the engine answered but recorded nothing")
        return join_ranks([load_file(path) for path in paths]) if paths else {}

    def predict(self, input_ids: Sequence[int], start: int, likeliest: int) -> tuple[list[Any], list[Any]]:
        """Prefill a text without recording it; return what the model predicts for its tokens after position `start`.

        Returns:
            SGLang's `input_token_logprobs` and `input_top_logprobs` with `likeliest` tokens, from `start` + 1 on.
        """
        if self._engine is None:
            self._start()
        (self.folder / LAYERS).write_text(json.dumps([0, 0, True]))
        answer = self._engine.generate(
            input_ids=list(input_ids),
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=likeliest,
        )
        meta = answer["meta_info"]
        return meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]


@contextlib.contextmanager
def running_engine(arguments: dict[str, Any]) -> Iterator[Any]:
    """Yield SGLang's engine with the ragged pool, for one request of token ids at a time; it ends with the context."""
    engine = _begin(arguments)
    try:
        yield engine
    finally:
        _end(engine)


def _begin(arguments: dict[str, Any]) -> Any:
    # SGLang's workers inherit these: no warnings about optional packages, and idle threads leave the cores free.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import sglang

    logging.getLogger("sglang").setLevel(logging.ERROR)
    fixed: dict[str, Any] = dict(
        log_level="error", kv_pool="ragged", skip_tokenizer_init=True, disable_radix_cache=True, max_running_requests=1
    )
    if not torch.cuda.is_available():
        # Next to nothing is decoded: compiling for it would take longer.
        fixed["ragged_kernel"] = "torch"
    return sglang.Engine(**fixed | arguments)


def _end(engine: Any) -> None:
    workers = psutil.Process().children(recursive=True)
    engine.shutdown()
    # Without this they stay as zombies until this process ends.
    psutil.wait_procs(workers, timeout=30)


def join_ranks(recordings: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the recordings of the tensor-parallel ranks, in rank order, to one recording of all heads."""
    if len(recordings) == 1:
        return recordings[0]
    shared = ("tokens", "count", STARTS, ANSWERING, *ROPE)
    axis = {name: 2 if name.endswith(".scores") else 1 for name in recordings[0]}
    return {
        name: tensor if name in shared else torch.cat([r[name] for r in recordings], dim=axis[name])
        for name, tensor in recordings[0].items()
    }


def recording_kv_bytes(geometry: ModelGeometry, segment: int, longest: int) -> int:
    """Compute a KV budget in bytes that holds a sample of `longest` tokens uncompressed, in float32, with padding."""
    kept = uniform_kept(geometry.num_layers, geometry.num_heads, 1.0, segment)
    layout = SlabLayout(kept, geometry.head_dim, segment)
    segments = longest // segment + 4
    # An open segment and its stage; scorer inputs of each token add at most q_per_kv / 2 times their size.
    segments += 2 + geometry.q_per_kv
    # A page of the sliding-window layers for every slab: then the other pool is never the smaller one.
    window_bytes = 4 * segment * geometry.windowed.elements_per_token if geometry.windowed else 0
    return segments * (layout.slab_bytes(4) + window_bytes) + 2**20
