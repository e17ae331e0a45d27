"""The recorder: runs inside SGLang's workers, sees every prefill at rho = 1, and writes what calibration needs.

It is an observer of the attention backend (`sgl_ragged.serve.backend.Observer`), so whatever model the server
can serve can be recorded, and scores are computed on the keys, values and queries that serving will score.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from calib.attended import ANSWERING, ATTENDED_WINDOW, STARTS, TOKENS, TOP, WEIGHTS, most_attended
from calib.codebook import join_queries, recorded_queries
from calib.output_error import left_over, query_positions
from calib.query_moments import Rope, before_rope, rope_of
from calib.residual_stream import ResidualStream
from sgl_ragged.attention.view import ExtendView
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.profiles.codebook import CODEBOOK
from sgl_ragged.profiles.codebook import ROPE as ROPE
from sgl_ragged.scorers import Scorer, SegmentData, get_scorer, rank_positions

ANSWERS = "answers.json"
"""Beside the recording: [[start, stop], ..], the tokens of the current sample that the model would generate."""

WINDOWS = "windows.json"
"""Beside the recording: [start, ..], first queries of the windows of the current sample to record, ascending."""

CODEBOOK_QUERIES = "codebook.json"
"""Beside the recording: [position, ..], ascending, tokens of the current sample whose queries go to the codebook."""

LAYERS = "layers.json"
"""Beside the recording: [start, stop, alone], the layers whose hidden states are recorded, of the current sample, and
whether nothing else is; without the file, those of all layers beside everything else."""

ASKED_SCORES = "asked-scores.safetensors"
"""Beside the recording: SCORES of the current sample, and the codebook if there is one. While it is there, nothing but
ERRORS is recorded."""

SCORES, ERRORS = "scores", "errors"
"""float32 [segments, layers, heads, S], by which heads choose; and [layers, heads, counts], what
`output_error.left_over` finds of their choice."""

MOMENTS = ("query_mean", "query_covariance")
"""Sums over queries before RoPE."""

STATISTICS = (*MOMENTS, *ROPE)
"""Statistics that can be calibrated."""

VALUES = "values"
"""Name of the tensor of sums of values over all tokens, [layers, heads, head_dim]."""

HIDDEN_STATES = "hidden_states"
"""Name of the tensor of hidden states, which is far larger than the others."""


@dataclass(frozen=True)
class Recorder:
    """Writes `recording_file` after every chunk, for the sequence so far; one request at a time.

    It holds, of the n finished segments of S tokens that later tokens follow,
        X.scores: float32 [n, layers, heads, S], for each X of `scorers`;
        peaks.all: float32 [layers, heads, n * S], the largest attention that a query of a later segment pays to the
            token, over the group's query heads;
        peaks.answers: the same for those queries that predict a token of ANSWERS; only if there are any;
        what heads attend to in the windows of WINDOWS: ATTENDED of `calib.attended`;
        the queries of CODEBOOK_QUERIES, as `calib.codebook.recorded_queries` gives them, [layers, ..], and ROPE; unless
            the model has no rotary embedding that all layers share.
    With `reads_hidden_states` rank 0 also writes `hidden_states_recording`, which holds HIDDEN_STATES: float16 [layers
    of LAYERS, n * S, hidden size], what entered the attention layers.
    With `moments` it holds, instead of all that, sums over all queries before RoPE: query_mean [layers, heads,
    q_per_kv, d], query_covariance [.., d, d] (second moments, uncentred) and count; and ROPE [layers, 1, ..].

    What cannot be written leaves `failure_file` behind, with the reason.

    Heads are those of one tensor-parallel rank. `statistics`: safetensors file with what the scorers need, of the
    whole model, or None; it is read when a sample comes.
    """

    folder: str
    scorers: tuple[str, ...]
    statistics: str | None = None
    rank: int = 0
    moments: bool = False
    reads_hidden_states: bool = False
    _state: _Sequence = field(default_factory=lambda: _Sequence(), compare=False, repr=False)

    @property
    def keeps_hidden_states(self) -> bool:
        """They are the same on all ranks: the first keeps them."""
        return self.reads_hidden_states and self.rank == 0

    def for_rank(self, rank: int) -> Recorder:
        """The recorder of one tensor-parallel rank."""
        return replace(self, rank=rank, _state=_Sequence())

    def prepare(self, model: torch.nn.Module, store: SlabStore) -> None:
        """Call before anything is recorded: reads the model's rotary embedding."""
        try:
            self._state.rope = rope_of(model, store.layout.head_dim)
        except RaggedConfigError:
            if self.moments:
                raise
        asked = Path(self.folder) / ASKED_SCORES

        def positions(length: int) -> torch.Tensor | None:
            return query_positions(length, store.layout.segment) if asked.is_file() else None

        self._state.stream = ResidualStream.hook_into(model, positions)

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
        """Record one layer of a chunk; writes the file after the last layer."""
        (prefix,), (length,) = batch.prefixes, batch.lengths
        if prefix == 0 and layer == 0:
            folder = Path(self.folder)
            asked = [_positions(folder / name) for name in (WINDOWS, CODEBOOK_QUERIES)]
            self._state.reset(store, self, _answer_queries(folder / ANSWERS), *asked)
            self._state.choose_layers(folder / LAYERS, store.layout.num_layers)
            self._state.ask_errors(folder / ASKED_SCORES)
        if length == 0:
            return
        if self._state.asked is not None:
            if prefix == 0:
                self._state.add_errors(store, layer, queries, keys, values, length)
        elif self.moments:
            self._state.add_moments(layer, queries, prefix)
        else:
            if not self._state.alone:
                self._state.observe(store, layer, queries, keys, values, batch, scorer_inputs)
            if self.keeps_hidden_states and layer in self._state.layers:
                assert hidden_states is not None, "the backend hands them to observers that read them"
                self._state.hidden_states[layer].append(hidden_states[:length].half().cpu())
        if layer == store.layout.num_layers - 1:
            self._write(store, prefix + length)

    def _write(self, store: SlabStore, length: int) -> None:
        if self._state.asked is not None:
            errors = (
                {ERRORS: torch.stack(self._state.errors).cpu()}
                if len(self._state.errors) == store.layout.num_layers
                else {}
            )
            self._save(errors, recording_file(self.folder, self.rank))
            return
        if self.keeps_hidden_states and self._state.layers:
            # First: whoever sees the recording may count on them.
            self._save(self._state.recorded_hidden_states(length), hidden_states_recording(self.folder))
        if not self._state.alone:
            tensors = self._state.moments() if self.moments else self._state.results()
            self._save(tensors, recording_file(self.folder, self.rank))

    def _save(self, tensors: dict[str, torch.Tensor], target: Path) -> None:
        partial = target.with_suffix(".partial")
        try:
            save_file(tensors, str(partial))
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            # An exception would take the worker down, with tracebacks of three processes and without the reason.
            target.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                failure_file(self.folder).write_text(str(error))


def recording_file(folder: str | Path, rank: int) -> Path:
    """Where the recorder of a tensor-parallel rank writes."""
    return Path(folder) / f"recording-{rank}.safetensors"


def hidden_states_recording(folder: str | Path) -> Path:
    """Where the recorder of the first rank writes hidden states."""
    return Path(folder) / "hidden-states-0.safetensors"


def failure_file(folder: str | Path) -> Path:
    """Where a recorder says why it could not write."""
    return Path(folder) / "not-recorded.txt"


def _answer_queries(path: Path) -> torch.Tensor:
    """int64: positions whose queries predict a token of an answer, those before its tokens."""
    spans = json.loads(path.read_text()) if path.is_file() else []
    positions = [torch.arange(start - 1, stop - 1) for start, stop in spans]
    return torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)


def _positions(path: Path) -> list[int]:
    return json.loads(path.read_text()) if path.is_file() else []


class _Sequence:
    """The state of the current sequence, the model's rotary embedding, and its residual stream."""

    rope: Rope | None = None
    stream: ResidualStream | None = None

    def reset(
        self,
        store: SlabStore,
        recorder: Recorder,
        answer_queries: torch.Tensor,
        windows: list[int],
        codebook: list[int],
    ) -> None:
        layers = store.layout.num_layers
        self.segment, self.length = store.layout.segment, 0
        self.scorers: dict[str, Scorer] = {name: get_scorer(name) for name in recorder.scorers}
        given = load_file(recorder.statistics) if recorder.statistics else {}
        first = recorder.rank * store.layout.num_heads
        heads = slice(first, first + store.layout.num_heads)
        device = store.slabs.device
        self.statistics = [
            {name: (t[i] if name in ROPE else t[i, heads]).to(device) for name, t in given.items()}
            for i in range(layers)
        ]
        self.answer_queries = answer_queries.to(device)
        self.kinds = ("all", "answers") if len(answer_queries) else ("all",)
        self.windows = windows
        self.codebook = codebook if self.rope is not None else []
        self.queries: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(layers)]
        # Per layer, TOKENS and WEIGHTS [heads, windows, TOP] of the windows so far, segment by segment.
        none = torch.empty((store.layout.num_heads, 0, TOP), device=device)
        self.attended: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [(none.int(), none.half())] for _ in range(layers)
        ]
        self.peaks: list[torch.Tensor] = [torch.empty(0)] * layers
        # Per scorer and layer, scores [segments, heads, S] of the finished segments, chunk by chunk.
        self.scores: dict[str, list[list[torch.Tensor]]] = {n: [[] for _ in range(layers)] for n in self.scorers}
        self.hidden_states: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.sums: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.values: list[torch.Tensor] = [torch.zeros(())] * layers

    def ask_errors(self, path: Path) -> None:
        """Read what errors are asked for, if any."""
        self.asked = load_file(path) if path.is_file() else None
        self.errors: list[torch.Tensor] = []

    def add_errors(
        self, store: SlabStore, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> None:
        """Record output errors of a layer's heads in the first chunk, none where the model's parts are not known."""
        assert self.asked is not None, "they are asked for"
        positions = query_positions(length, self.segment)
        if positions is None or self.stream is None or not self.stream.known:
            return
        device, scale = keys.device, store.scales[layer]
        scores = self.asked[SCORES][: length // self.segment, layer].to(device)
        book = {name: self.asked[name][layer].to(device) for name in (*CODEBOOK, *ROPE) if name in self.asked}
        keys, values = (x[:length].transpose(0, 1).float() for x in (keys, values))
        self.errors.append(
            left_over(
                queries[positions].float() * scale,
                keys,
                values,
                positions.to(device),
                rank_positions(scores, torch.arange(len(scores), device=device) == 0),
                References.of(book, scale) if book else None,
                self.stream.after_attention,
            )
        )

    def observe(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        view: ExtendView,
        scorer_inputs: torch.Tensor | None,
    ) -> None:
        (prefix,), (length,) = view.prefixes, view.lengths
        if prefix % self.segment:
            raise RuntimeError(
                "the recorder needs chunks that start on a segment border; do not decode while recording"
            )
        self.length = prefix + length
        self._add_attention(store, layer, queries, keys, values, view)
        self.values[layer] = self.values[layer] + values[:length].double().sum(dim=0).cpu()
        finished = length // self.segment
        if finished == 0:
            return
        tokens = slice(0, finished * self.segment)
        segment_indices = torch.arange(finished, device=keys.device) + prefix // self.segment

        def segments(x: torch.Tensor) -> torch.Tensor:
            # [tokens, heads, ..] -> [segments, heads, S, ..]
            return x[tokens].unflatten(0, (finished, self.segment)).transpose(1, 2)

        for name, scorer in self.scorers.items():
            window = min(scorer.queries, self.segment)
            statistics = store.statistics[layer] if scorer.reads_hidden_states else self.statistics[layer]
            asked = segments(queries)[:, :, self.segment - window :].transpose(2, 3) if window else None
            gates = (
                segments(scorer_inputs)[..., 0] if scorer.reads_hidden_states and scorer_inputs is not None else None
            )
            data = SegmentData(
                segments(keys), segments(values), asked, gates, store.scales[layer], statistics, segment_indices
            )
            self.scores[name][layer].append(scorer.score(data))

    def _add_attention(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        view: ExtendView,
    ) -> None:
        """Raise the peak attention [kinds, heads, tokens] of every earlier segment's tokens by this chunk's queries.

        And what this chunk's windows attend to and the codebook's queries see, which needs the same attention.
        """
        (prefix,), (length,) = view.prefixes, view.lengths
        heads, device = keys.shape[1], keys.device
        everything, every_value = (
            self._with_prefix(store, layer, part, own, view) for part, own in enumerate((keys, values))
        )
        peaks = everything.new_zeros((len(self.kinds), heads, everything.shape[1]))
        if prefix:
            peaks[..., :prefix] = self.peaks[layer]
        for start in range(0, length, self.segment):
            stop = min(start + self.segment, length)
            past, seen = prefix + start, prefix + stop
            if past == 0:
                continue
            positions = torch.arange(past, seen, device=device)
            block = queries[start:stop].permute(1, 2, 0, 3).float() * store.scales[layer]
            logits = block @ everything[:, None, :seen].transpose(-1, -2)
            later = torch.arange(seen, device=device) > positions[:, None]
            # [heads, queries, earlier tokens]: the largest of the group's query heads.
            logits = logits.masked_fill(later, -torch.inf)
            weights = logits.softmax(dim=-1)[..., :past].amax(dim=1)
            peaks[0, :, :past] = torch.maximum(peaks[0, :, :past], weights.amax(dim=1))
            answering = torch.isin(positions, self.answer_queries)
            if answering.any():
                peaks[1, :, :past] = torch.maximum(peaks[1, :, :past], weights[:, answering].amax(dim=1))
            windows = [first - past for first in self.windows if past <= first < seen]
            if windows:
                self.attended[layer].append(most_attended(weights, windows))
            asked = [place for place in self.codebook if past <= place < seen]
            if asked:
                assert self.rope is not None, "without it nothing is asked for"
                rows = torch.tensor([place - past for place in asked], device=device)
                own, seen_values = queries[start:stop][rows], every_value[:, :seen]
                self.queries[layer].append(
                    recorded_queries(own, logits[:, :, rows], seen_values, self.segment, asked, self.rope)
                )
        self.peaks[layer] = peaks

    def _with_prefix(
        self, store: SlabStore, layer: int, part: int, own: torch.Tensor, view: ExtendView
    ) -> torch.Tensor:
        """float32 [heads, tokens, d]: keys (part 0) or values (1) of a chunk behind those of its prefix."""
        own, (prefix,) = own.transpose(0, 1), view.prefixes
        if prefix:
            (band,) = store.layout.bands[layer]
            slabs = store.band_view(layer, band)[view.pages[0, : prefix // self.segment].long(), :, part]
            slabs = store.from_cache(layer, part, slabs)
            own = torch.cat([slabs.to(own.dtype).transpose(0, 1).flatten(1, 2), own], dim=1)
        return own.float()

    def results(self) -> dict[str, torch.Tensor]:
        # Nothing looks back at a segment that no token follows.
        count = (self.length - 1) // self.segment
        tensors = {"tokens": torch.tensor(self.length), VALUES: torch.stack(self.values).float()}
        for number, kind in enumerate(self.kinds):
            peaks = torch.stack([layer[number, :, : count * self.segment] for layer in self.peaks])
            tensors[f"peaks.{kind}"] = peaks.cpu().contiguous()
        for name, layers in self.scores.items():
            scores = torch.stack([torch.cat(parts)[:count] for parts in layers], dim=1)
            tensors[f"{name}.scores"] = scores.float().cpu().contiguous()
        starts = torch.tensor([first for first in self.windows if first < self.length], dtype=torch.int64)
        tensors[STARTS] = starts
        tensors[ANSWERING] = torch.isin(starts // ATTENDED_WINDOW, self.answer_queries.cpu() // ATTENDED_WINDOW)
        for place, name in enumerate((TOKENS, WEIGHTS)):
            layers = [torch.cat([part[place] for part in parts], dim=1) for parts in self.attended]
            tensors[name] = torch.stack(layers).cpu()
        if all(self.queries):
            of_layers = [join_queries(parts) for parts in self.queries]
            tensors |= {name: torch.stack([one[name] for one in of_layers]) for name in of_layers[0]} | self.of_rope()
        return tensors

    def choose_layers(self, path: Path, layers: int) -> None:
        """Read which layers' hidden states are wanted."""
        start, stop, alone = json.loads(path.read_text()) if path.is_file() else (0, layers, False)
        self.layers, self.alone = range(start, stop), bool(alone)

    def recorded_hidden_states(self, length: int) -> dict[str, torch.Tensor]:
        finished = (length - 1) // self.segment * self.segment
        return {HIDDEN_STATES: torch.stack([torch.cat(self.hidden_states[n])[:finished] for n in self.layers])}

    def add_moments(self, layer: int, queries: torch.Tensor, first: int) -> None:
        assert self.rope is not None, "the recorder refuses models without it"
        sample = before_rope(queries, first, self.rope).permute(1, 2, 0, 3)
        moments = [sample.sum(dim=2), sample.transpose(2, 3) @ sample]
        before = self.sums[layer] or [torch.zeros_like(m) for m in moments]
        self.sums[layer] = [a + b for a, b in zip(before, moments, strict=True)]
        if layer == 0:
            self.length += len(queries)

    def moments(self) -> dict[str, torch.Tensor]:
        total = {name: torch.stack([s[i] for s in self.sums]).cpu() for i, name in enumerate(MOMENTS)}
        return total | self.of_rope() | {"count": torch.tensor(self.length)}

    def of_rope(self) -> dict[str, torch.Tensor]:
        """ROPE, the same for every layer."""
        assert self.rope is not None, "it is asked for where it is known"
        of_layers = (
            tensor.float().expand(len(self.sums), 1, -1).contiguous()
            for tensor in (self.rope.frequencies, self.rope.order)
        )
        return dict(zip(ROPE, of_layers, strict=True))
