"""The recorder: runs inside SGLang's worker, sees every prefill at rho = 1, and writes what calibration needs.

It is an observer of the attention backend (`sgl_ragged.attention.backend.Observer`), so whatever model the server
can serve can be recorded, and scores are computed on the keys, values and queries that serving will score.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from calib.implied import implied_counts
from sgl_ragged.attention.batch import ExtendBatch, ExtendRequest
from sgl_ragged.budgets import UNIT
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import Scorer, SegmentData, get_scorer, rank_positions

RECORDING = "recording.safetensors"
ANSWERS = "answers.json"
"""Beside the recording: [[start, stop], ..], the tokens of the current sample that the model would generate."""

STATISTICS = ("query_mean", "query_covariance")
"""Statistics that can be calibrated: moments of the queries after RoPE."""


@dataclass(frozen=True)
class Recorder:
    """Writes RECORDING into `folder` after every chunk, for the sequence so far; one request at a time.

    With `scorers` it holds, for each scorer X and every finished segment that later tokens follow (n of them),
        X.implied.layer, X.implied.model: int32 [n, layers, heads], tokens that the head gets from the non-uniform
            top-k (TANGRAM Eq. 3) at `ratio`, over the heads of its layer or over the model;
        X.coverage.all: float32 [n, layers, heads, S / 16], peak attention of later segments' queries (and of the
            group's query heads), summed over the head's best 16, 32, .. S tokens;
        X.coverage.answers: the same for those queries that predict a token of ANSWERS; only if there are any.
    Without scorers it holds sums over all queries for `statistics`: query_mean [layers, heads, q_per_kv, d],
    query_covariance [.., d, d] (second moments, uncentred) and count.

    `statistics`: safetensors file with the statistics that the scorers need, or None.
    """

    folder: str
    scorers: tuple[str, ...]
    ratio: float
    statistics: str | None = None
    _state: _Sequence = field(default_factory=lambda: _Sequence(), compare=False, repr=False)

    def extend(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendBatch,
        sides: torch.Tensor | None,
    ) -> None:
        """Record one layer of a chunk; writes the file after the last layer."""
        (request,) = batch.requests
        if request.prefix == 0 and layer == 0:
            self._state.reset(store, self, _answer_queries(Path(self.folder) / ANSWERS))
        if request.length == 0:
            return
        if self.scorers:
            self._state.observe(store, layer, queries, keys, values, request, sides)
        else:
            self._state.add_moments(layer, queries)
        if layer == store.layout.num_layers - 1:
            self._write()

    def _write(self) -> None:
        tensors = self._state.results(self.ratio) if self.scorers else self._state.moments()
        target = Path(self.folder) / RECORDING
        partial = target.with_suffix(".partial")
        save_file(tensors, str(partial))
        partial.replace(target)


def _answer_queries(path: Path) -> torch.Tensor:
    """int64: positions whose queries predict a token of an answer, those before its tokens."""
    spans = json.loads(path.read_text()) if path.is_file() else []
    positions = [torch.arange(start - 1, stop - 1) for start, stop in spans]
    return torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)


class _Sequence:
    """What is known of the current sequence. Scores and ranks are kept until every layer has them."""

    def reset(self, store: SlabStore, recorder: Recorder, answer_queries: torch.Tensor) -> None:
        layers = store.layout.num_layers
        self.segment, self.length = store.layout.segment, 0
        self.scorers: dict[str, Scorer] = {name: get_scorer(name) for name in recorder.scorers}
        given = load_file(recorder.statistics) if recorder.statistics else {}
        self.statistics = [{name: t[i].to(store.slabs.device) for name, t in given.items()} for i in range(layers)]
        self.answer_queries = answer_queries.to(store.slabs.device)
        self.kinds = ("all", "answers") if len(answer_queries) else ("all",)
        self.peaks: list[torch.Tensor] = [torch.empty(0)] * layers
        # Per scorer and layer, ranked scores and orders [segments, heads, S] of the finished segments.
        self.scores: dict[str, list[list[torch.Tensor]]] = {n: [[] for _ in range(layers)] for n in self.scorers}
        self.orders: dict[str, list[list[torch.Tensor]]] = {n: [[] for _ in range(layers)] for n in self.scorers}
        self.sums: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def observe(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        request: ExtendRequest,
        sides: torch.Tensor | None,
    ) -> None:
        if request.prefix % self.segment:
            raise RuntimeError(
                "the recorder needs chunks that start on a segment border; do not decode while recording"
            )
        self.length = request.prefix + request.length
        self._add_peaks(store, layer, queries, keys, request)
        first, finished = request.prefix // self.segment, request.length // self.segment
        if finished == 0:
            return
        tokens = slice(0, finished * self.segment)

        def segments(x: torch.Tensor) -> torch.Tensor:
            # [tokens, heads, ..] -> [segments, heads, S, ..]
            return x[tokens].unflatten(0, (finished, self.segment)).transpose(1, 2)

        first_segment = torch.arange(first, first + finished, device=keys.device) == 0
        for name, scorer in self.scorers.items():
            window = min(scorer.queries, self.segment)
            statistics = store.statistics[layer] if scorer.reads_hidden_states else self.statistics[layer]
            asked = segments(queries)[:, :, self.segment - window :].transpose(2, 3) if window else None
            gates = segments(sides)[..., 0] if scorer.reads_hidden_states and sides is not None else None
            data = SegmentData(segments(keys), segments(values), asked, gates, store.scales[layer], statistics)
            scores = scorer.score(data)
            self.scores[name][layer].append(scores)
            self.orders[name][layer].append(rank_positions(scores, first_segment))

    def _add_peaks(
        self, store: SlabStore, layer: int, queries: torch.Tensor, keys: torch.Tensor, request: ExtendRequest
    ) -> None:
        """Raise the peak attention [kinds, heads, tokens] of every earlier segment's tokens by this chunk's queries."""
        heads, device = keys.shape[1], keys.device
        everything = keys.transpose(0, 1)
        if request.prefix:
            (band,) = store.layout.bands[layer]
            slabs = store.band_view(layer, band)[request.slots[: request.prefix // self.segment], :, 0]
            everything = torch.cat([slabs.to(keys.dtype).transpose(0, 1).flatten(1, 2), everything], dim=1)
        everything = everything.float()
        peaks = everything.new_zeros((len(self.kinds), heads, everything.shape[1]))
        if request.prefix:
            peaks[..., : request.prefix] = self.peaks[layer]
        for start in range(0, request.length, self.segment):
            stop = min(start + self.segment, request.length)
            past, seen = request.prefix + start, request.prefix + stop
            if past == 0:
                continue
            positions = torch.arange(past, seen, device=device)
            block = queries[start:stop].permute(1, 2, 0, 3).float() * store.scales[layer]
            logits = block @ everything[:, None, :seen].transpose(-1, -2)
            later = torch.arange(seen, device=device) > positions[:, None]
            # [heads, queries, earlier tokens]: the largest of the group's query heads.
            weights = logits.masked_fill(later, -torch.inf).softmax(dim=-1)[..., :past].amax(dim=1)
            peaks[0, :, :past] = torch.maximum(peaks[0, :, :past], weights.amax(dim=1))
            answering = torch.isin(positions, self.answer_queries)
            if answering.any():
                peaks[1, :, :past] = torch.maximum(peaks[1, :, :past], weights[:, answering].amax(dim=1))
        self.peaks[layer] = peaks

    def results(self, ratio: float) -> dict[str, torch.Tensor]:
        # Nothing looks back at a segment that no token follows.
        count = (self.length - 1) // self.segment
        tensors = {"tokens": torch.tensor(self.length)}
        for name in self.scorers:
            scores = torch.stack([torch.cat(parts) for parts in self.scores[name]], dim=1)[:count].cpu()
            order = torch.stack([torch.cat(parts) for parts in self.orders[name]], dim=1)[:count].cpu()
            for number, kind in enumerate(self.kinds):
                tensors[f"{name}.coverage.{kind}"] = self._coverage(order, number)
            tensors[f"{name}.implied.layer"] = implied_counts(scores, ratio, "layer")
            tensors[f"{name}.implied.model"] = implied_counts(scores, ratio, "model")
        return tensors

    def _coverage(self, order: torch.Tensor, kind: int) -> torch.Tensor:
        """Peak attention covered by the first 16, 32, .. of `order` [segments, layers, heads, S]."""
        count = order.shape[0]
        peaks = torch.stack([layer[kind] for layer in self.peaks])[..., : count * self.segment].cpu()
        peaks = peaks.unflatten(-1, (count, self.segment)).permute(2, 0, 1, 3)
        covered = peaks.gather(-1, order).unflatten(-1, (self.segment // UNIT, UNIT)).sum(dim=-1)
        return covered.cumsum(dim=-1).contiguous()

    def add_moments(self, layer: int, queries: torch.Tensor) -> None:
        sample = queries.double().permute(1, 2, 0, 3)
        moments = [sample.sum(dim=2), sample.transpose(2, 3) @ sample]
        before = self.sums[layer] or [torch.zeros_like(m) for m in moments]
        self.sums[layer] = [a + b for a, b in zip(before, moments, strict=True)]
        if layer == 0:
            self.length += len(queries)

    def moments(self) -> dict[str, torch.Tensor]:
        total = {name: torch.stack([s[i] for s in self.sums]).cpu() for i, name in enumerate(STATISTICS)}
        return total | {"count": torch.tensor(self.length)}
