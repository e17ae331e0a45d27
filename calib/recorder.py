"""The recorder: observes every prefill in SGLang's workers at ratio 1, and writes recordings for calibration.

It is an observer of the attention backend (`sgl_ragged.serve.backend.Observer`). So every model that the server can
serve can be recorded, and scores are computed on the same keys, values and queries as in serving.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from calib.output_error import query_positions
from calib.query_moments import rope_of
from calib.recording import Recording
from calib.residual_stream import ResidualStream
from sgl_ragged.attention.view import ExtendView
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.slab_store import SlabStore

ANSWERS = "answers.json"
"""File in the folder of recordings: [[start, stop], ..], tokens of the current sample that the model would generate."""

WINDOWS = "windows.json"
"""File in the folder of recordings: [start, ..], first queries of the current sample's windows to record, ascending."""

CODEBOOK_QUERIES = "codebook.json"
"""File in the folder of recordings: [position, ..], tokens of the current sample for the codebook, ascending."""

LAYERS = "layers.json"
"""File in the folder of recordings: [start, stop, alone], the layers whose hidden states are recorded, and whether
nothing else is recorded. Without the file, hidden states of all layers are recorded in addition to everything else."""

ASKED_SCORES = "asked-scores.safetensors"
"""File in the folder of recordings: SCORES of the current sample, and the codebook if there is one. While the file
exists, only ERRORS are recorded."""


@dataclass(frozen=True)
class Recorder:
    """Writes `recording_file` after every chunk, for the sequence so far; one request at a time.

    The file holds, for the n finished segments of S tokens that later tokens follow:
        X.scores: float32 [n, layers, heads, S], for each X of `scorers`.
        peaks.all: float32 [layers, heads, n * S], the largest attention that a query of a later segment pays to the
            token, over the group's query heads.
        peaks.answers: the same for queries that predict a token of ANSWERS, if there are any.
        ATTENDED (`calib.attended`): the tokens that heads attend to most in the windows of WINDOWS.
        the tensors of `calib.codebook.recorded_queries` for the queries of CODEBOOK_QUERIES, [layers, ..], and ROPE, if
            all full-attention layers share one rotary embedding.
    With `reads_hidden_states` rank 0 also writes HIDDEN_STATES to `hidden_states_recording`: float16 [layers of LAYERS,
    n * S, hidden size], inputs of the attention layers.
    With `moments` the file holds instead sums over all queries before RoPE: query_mean [layers, heads, q_per_kv, d],
    query_covariance [.., d, d] (second moments, uncentred) and count; and ROPE [layers, 1, ..].

    If a file cannot be written, the reason is written to `failure_file`.

    Args:
        folder: folder of recordings.
        scorers: names of the scorers.
        statistics: safetensors file with the tensors that the scorers need, for the whole model, or None. It is read
            when a sample arrives.
        rank: tensor-parallel rank, whose heads are recorded.
        moments: record query moments only.
        reads_hidden_states: record hidden states.
    """

    folder: str
    scorers: tuple[str, ...]
    statistics: str | None = None
    rank: int = 0
    moments: bool = False
    reads_hidden_states: bool = False
    _recording: Recording = field(default_factory=Recording, compare=False, repr=False)

    @property
    def keeps_hidden_states(self) -> bool:
        """True for the rank that writes hidden states, which are equal on all ranks."""
        return self.reads_hidden_states and self.rank == 0

    def for_rank(self, rank: int) -> Recorder:
        """Return the recorder of one tensor-parallel rank."""
        return replace(self, rank=rank, _recording=Recording())

    def prepare(self, model: torch.nn.Module, store: SlabStore) -> None:
        """Read the model's rotary embedding and hook into its residual stream; call before anything is recorded."""
        try:
            self._recording.rope = rope_of(model, store.layout.head_dim)
        except RaggedConfigError:
            if self.moments:
                raise
        error_request = Path(self.folder) / ASKED_SCORES

        def positions(length: int) -> torch.Tensor | None:
            return query_positions(length, store.layout.segment) if error_request.is_file() else None

        self._recording.stream = ResidualStream.hook_into(model, positions)

    def extend(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendView,
        scorer_inputs: torch.Tensor | None,
        hidden_states: torch.Tensor | None,
    ) -> None:
        """Record one layer of a chunk; write the file after the last layer."""
        (prefix,), (length,) = batch.prefixes, batch.lengths
        recording = self._recording
        if prefix == 0 and layer == 0:
            self._start(store)
        if length == 0:
            return
        if recording.error_request is not None:
            if prefix == 0:
                recording.add_errors(store, layer, queries, keys, values, length)
        elif self.moments:
            recording.add_moments(layer, queries, prefix)
        else:
            if not recording.hidden_states_alone:
                recording.add_chunk(store, layer, queries, keys, values, batch, scorer_inputs)
            if self.keeps_hidden_states and layer in recording.layers:
                assert hidden_states is not None, "the backend passes hidden states to observers that read them"
                recording.hidden_states[layer].append(hidden_states[:length].half().cpu())
        if layer == store.layout.num_layers - 1:
            self._write(store.layout.num_layers, prefix + length)

    def _start(self, store: SlabStore) -> None:
        folder = Path(self.folder)
        self._recording.start(
            store,
            self.scorers,
            load_file(self.statistics) if self.statistics else {},
            self.rank * store.layout.num_heads,
            _answer_queries(folder / ANSWERS),
            _read_positions(folder / WINDOWS),
            _read_positions(folder / CODEBOOK_QUERIES),
        )
        self._recording.choose_layers(folder / LAYERS, store.layout.num_layers)
        self._recording.read_error_request(folder / ASKED_SCORES)

    def _write(self, num_layers: int, length: int) -> None:
        recording, target = self._recording, recording_file(self.folder, self.rank)
        if recording.error_request is not None:
            self._save(recording.error_tensors(num_layers), target)
            return
        if self.keeps_hidden_states and recording.layers:
            # Hidden states come first, because readers of the recording expect them to exist.
            self._save(recording.hidden_state_tensors(length), hidden_states_recording(self.folder))
        if not recording.hidden_states_alone:
            self._save(recording.moment_tensors() if self.moments else recording.attention_tensors(), target)

    def _save(self, tensors: dict[str, torch.Tensor], target: Path) -> None:
        partial = target.with_suffix(".partial")
        try:
            save_file(tensors, str(partial))
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            # An exception would end the worker with tracebacks of three processes and without the reason.
            target.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                failure_file(self.folder).write_text(str(error))


def recording_file(folder: str | Path, rank: int) -> Path:
    """Return the path of a tensor-parallel rank's recording."""
    return Path(folder) / f"recording-{rank}.safetensors"


def hidden_states_recording(folder: str | Path) -> Path:
    """Return the path of the hidden states that rank 0 writes."""
    return Path(folder) / "hidden-states-0.safetensors"


def failure_file(folder: str | Path) -> Path:
    """Return the path of the file with the reason why a recorder could not write."""
    return Path(folder) / "not-recorded.txt"


def _answer_queries(path: Path) -> torch.Tensor:
    """Return the positions whose queries predict a token of an answer: int64."""
    spans = json.loads(path.read_text()) if path.is_file() else []
    positions = [torch.arange(start - 1, stop - 1) for start, stop in spans]
    return torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)


def _read_positions(path: Path) -> list[int]:
    return json.loads(path.read_text()) if path.is_file() else []
