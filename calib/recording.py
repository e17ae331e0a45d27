"""Recording of one sequence: attention, scores, hidden states, query moments or output errors, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from calib.attended import ANSWERING, ATTENDED_WINDOW, STARTS, TOKENS, TOP, WEIGHTS, most_attended
from calib.codebook import join_queries, recorded_queries
from calib.output_error import left_over, query_positions
from calib.query_moments import Rope, before_rope
from calib.residual_stream import ResidualStream
from sgl_ragged.attention.view import ExtendView
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.profiles.codebook import CODEBOOK
from sgl_ragged.profiles.codebook import ROPE as ROPE
from sgl_ragged.scorers import Scorer, SegmentData, get_scorer, rank_positions

SCORES, ERRORS = "scores", "errors"
"""Tensors float32: [segments, layers, heads, S], scores by which heads choose tokens; [layers, heads, counts], results
of `output_error.left_over` for this choice."""

MOMENTS = ("query_mean", "query_covariance")
"""Tensors with sums over queries before RoPE."""

STATISTICS = (*MOMENTS, *ROPE)
"""Statistics that calibration can measure."""

VALUES = "values"
"""Tensor float32 [layers, heads, head_dim]: sum of values over all tokens."""

HIDDEN_STATES = "hidden_states"
"""Tensor float16 [layers, tokens, hidden size]: inputs of the attention layers."""


class Recording:
    """Tensors recorded of the current sequence so far, the model's rotary embedding, and its residual stream."""

    rope: Rope | None = None
    stream: ResidualStream | None = None

    def start(
        self,
        store: SlabStore,
        scorers: tuple[str, ...],
        statistics: dict[str, torch.Tensor],
        first_head: int,
        answer_queries: torch.Tensor,
        windows: list[int],
        codebook: list[int],
    ) -> None:
        """Begin a sequence and drop the tensors of the last one.

        Args:
            statistics: tensors that the scorers need, [layers, heads of the whole model, ...].
            first_head: number of this rank's first head.
            answer_queries: int64, positions whose queries predict a token of an answer.
            windows: positions of the first queries of the windows to record, ascending.
            codebook: positions of the tokens whose queries go to the codebook, ascending.
        """
        num_layers, device = store.layout.num_layers, store.slabs.device
        self.segment, self.length = store.layout.segment, 0
        self.scorers: dict[str, Scorer] = {name: get_scorer(name) for name in scorers}
        heads = slice(first_head, first_head + store.layout.num_heads)
        self.statistics = [
            {name: (t[layer] if name in ROPE else t[layer, heads]).to(device) for name, t in statistics.items()}
            for layer in range(num_layers)
        ]
        self.answer_queries = answer_queries.to(device)
        self.kinds = ("all", "answers") if len(answer_queries) else ("all",)
        self.windows = windows
        self.codebook = codebook if self.rope is not None else []
        # One list per layer, with an entry per chunk or block of queries.
        self.queries: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(num_layers)]
        # TOKENS and WEIGHTS [heads, windows, TOP] of the windows so far.
        empty = torch.empty((store.layout.num_heads, 0, TOP), device=device)
        self.attended: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [(empty.int(), empty.half())] for _ in range(num_layers)
        ]
        self.peaks: list[torch.Tensor] = [torch.empty(0)] * num_layers
        # By scorer, scores [segments, heads, S] of the finished segments.
        self.scores: dict[str, list[list[torch.Tensor]]] = {n: [[] for _ in range(num_layers)] for n in self.scorers}
        self.hidden_states: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.sums: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[torch.Tensor] = [torch.zeros(())] * num_layers

    def choose_layers(self, path: Path, num_layers: int) -> None:
        """Read whose hidden states are recorded; without the file, those of all layers."""
        start, stop, alone = json.loads(path.read_text()) if path.is_file() else (0, num_layers, False)
        self.layers, self.hidden_states_alone = range(start, stop), bool(alone)

    def read_error_request(self, path: Path) -> None:
        """Read SCORES and the codebook for output errors, if the file exists."""
        self.error_request = load_file(path) if path.is_file() else None
        self.errors: list[torch.Tensor] = []

    def add_errors(
        self, store: SlabStore, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> None:
        """Record output errors of a layer's heads in the first chunk, if the layer's residual stream is known."""
        assert self.error_request is not None, "callers check for the request"
        positions = query_positions(length, self.segment)
        if positions is None or self.stream is None or not self.stream.known:
            return
        device, scale = keys.device, store.softmax_scales[layer]
        scores = self.error_request[SCORES][: length // self.segment, layer].to(device)
        names = [name for name in (*CODEBOOK, *ROPE) if name in self.error_request]
        book = {name: self.error_request[name][layer].to(device) for name in names}
        keys, values = (x[:length].transpose(0, 1).float() for x in (keys, values))
        self.errors.append(
            left_over(
                queries[positions].float() * scale,
                keys,
                values,
                positions.to(device),
                rank_positions(scores, torch.arange(len(scores), device=device) == 0),
                References.from_statistics(book, scale) if book else None,
                self.stream.after_attention,
            )
        )

    def add_chunk(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        view: ExtendView,
        scorer_inputs: torch.Tensor | None,
    ) -> None:
        """Record attention and scores of one layer in a chunk.

        Args:
            queries, keys, values: [tokens, heads, q_per_kv, d] and [tokens, heads, d] after RoPE, of the chunk.
            scorer_inputs: [tokens, heads, 1], results of `Scorer.token_scores`; None unless the served scorer reads
                hidden states.
        """
        (prefix,), (length,) = view.prefixes, view.lengths
        if prefix % self.segment:
            raise RuntimeError(
                "the recorder needs chunks that start on a segment border; do not decode while recording"
            )
        self.length = prefix + length
        self._add_attention(store, layer, queries, keys, values, view)
        self.values[layer] = self.values[layer] + values[:length].double().sum(dim=0).cpu()
        num_finished = length // self.segment
        if num_finished == 0:
            return
        finished = slice(0, num_finished * self.segment)
        segment_indices = torch.arange(num_finished, device=keys.device) + prefix // self.segment

        def to_segments(x: torch.Tensor) -> torch.Tensor:
            # [tokens, heads, ..] -> [segments, heads, S, ..]
            return x[finished].unflatten(0, (num_finished, self.segment)).transpose(1, 2)

        for name, scorer in self.scorers.items():
            window = min(scorer.queries, self.segment)
            statistics = store.statistics[layer] if scorer.reads_hidden_states else self.statistics[layer]
            last_queries = to_segments(queries)[:, :, self.segment - window :].transpose(2, 3) if window else None
            token_scores = None
            if scorer.reads_hidden_states and scorer_inputs is not None:
                token_scores = to_segments(scorer_inputs)[..., 0]
            data = SegmentData(
                to_segments(keys),
                to_segments(values),
                last_queries,
                token_scores,
                store.softmax_scales[layer],
                statistics,
                segment_indices,
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

        Windows and the codebook's queries are recorded here, too, because they need the same attention.
        """
        (prefix,), (length,) = view.prefixes, view.lengths
        heads, device = keys.shape[1], keys.device
        all_keys, all_values = (
            self._with_prefix(store, layer, part, rows, view) for part, rows in enumerate((keys, values))
        )
        peaks = all_keys.new_zeros((len(self.kinds), heads, all_keys.shape[1]))
        if prefix:
            peaks[..., :prefix] = self.peaks[layer]
        for start in range(0, length, self.segment):
            stop = min(start + self.segment, length)
            past, seen = prefix + start, prefix + stop
            if past == 0:
                continue
            positions = torch.arange(past, seen, device=device)
            block = queries[start:stop].permute(1, 2, 0, 3).float() * store.softmax_scales[layer]
            logits = block @ all_keys[:, None, :seen].transpose(-1, -2)
            later = torch.arange(seen, device=device) > positions[:, None]
            logits = logits.masked_fill(later, -torch.inf)
            # [heads, queries, earlier tokens]: the largest among the group's query heads.
            weights = logits.softmax(dim=-1)[..., :past].amax(dim=1)
            peaks[0, :, :past] = torch.maximum(peaks[0, :, :past], weights.amax(dim=1))
            answering = torch.isin(positions, self.answer_queries)
            if answering.any():
                peaks[1, :, :past] = torch.maximum(peaks[1, :, :past], weights[:, answering].amax(dim=1))
            windows = [first - past for first in self.windows if past <= first < seen]
            if windows:
                self.attended[layer].append(most_attended(weights, windows))
            recorded = [position for position in self.codebook if past <= position < seen]
            if recorded:
                assert self.rope is not None, "`start` empties the codebook without a rotary embedding"
                rows = torch.tensor([position - past for position in recorded], device=device)
                self.queries[layer].append(
                    recorded_queries(
                        queries[start:stop][rows],
                        logits[:, :, rows],
                        all_values[:, :seen],
                        self.segment,
                        recorded,
                        self.rope,
                    )
                )
        self.peaks[layer] = peaks

    def _with_prefix(
        self, store: SlabStore, layer: int, part: int, rows: torch.Tensor, view: ExtendView
    ) -> torch.Tensor:
        """Append a chunk's keys (part 0) or values (part 1) to those of its prefix: float32 [heads, tokens, d]."""
        rows, (prefix,) = rows.transpose(0, 1), view.prefixes
        if prefix:
            (band,) = store.layout.bands[layer]
            slabs = store.band_view(layer, band)[view.pages[0, : prefix // self.segment].long(), :, part]
            slabs = store.from_cache(layer, part, slabs)
            rows = torch.cat([slabs.to(rows.dtype).transpose(0, 1).flatten(1, 2), rows], dim=1)
        return rows.float()

    def attention_tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that `add_chunk` recorded, by name."""
        # No later token looks back at a last segment that ends the sequence.
        count = (self.length - 1) // self.segment
        tensors = {"tokens": torch.tensor(self.length), VALUES: torch.stack(self.values).float()}
        for number, kind in enumerate(self.kinds):
            peaks = torch.stack([layer[number, :, : count * self.segment] for layer in self.peaks])
            tensors[f"peaks.{kind}"] = peaks.cpu().contiguous()
        for name, layers in self.scores.items():
            scores = torch.stack([torch.cat(chunks)[:count] for chunks in layers], dim=1)
            tensors[f"{name}.scores"] = scores.float().cpu().contiguous()
        starts = torch.tensor([first for first in self.windows if first < self.length], dtype=torch.int64)
        tensors[STARTS] = starts
        tensors[ANSWERING] = torch.isin(starts // ATTENDED_WINDOW, self.answer_queries.cpu() // ATTENDED_WINDOW)
        for index, name in enumerate((TOKENS, WEIGHTS)):
            attended = [torch.cat([block[index] for block in blocks], dim=1) for blocks in self.attended]
            tensors[name] = torch.stack(attended).cpu()
        if all(self.queries):
            books = [join_queries(blocks) for blocks in self.queries]
            tensors |= {name: torch.stack([book[name] for book in books]) for name in books[0]} | self._rope_tensors()
        return tensors

    def hidden_state_tensors(self, length: int) -> dict[str, torch.Tensor]:
        """Return HIDDEN_STATES for the chosen layers and for all tokens of segments that later tokens follow."""
        count = (length - 1) // self.segment * self.segment
        return {HIDDEN_STATES: torch.stack([torch.cat(self.hidden_states[n])[:count] for n in self.layers])}

    def error_tensors(self, num_layers: int) -> dict[str, torch.Tensor]:
        """Return ERRORS; empty unless the errors of all layers were recorded."""
        return {ERRORS: torch.stack(self.errors).cpu()} if len(self.errors) == num_layers else {}

    def add_moments(self, layer: int, queries: torch.Tensor, first: int) -> None:
        """Add the moments of a chunk's queries [tokens, heads, q_per_kv, d] at positions from `first` on."""
        assert self.rope is not None, "the recorder refuses models without a rotary embedding"
        rows = before_rope(queries, first, self.rope).permute(1, 2, 0, 3)
        moments = [rows.sum(dim=2), rows.transpose(2, 3) @ rows]
        sums = self.sums[layer] or [torch.zeros_like(m) for m in moments]
        self.sums[layer] = [a + b for a, b in zip(sums, moments, strict=True)]
        if layer == 0:
            self.length += len(queries)

    def moment_tensors(self) -> dict[str, torch.Tensor]:
        """Return MOMENTS, ROPE and the number of tokens."""
        sums = {name: torch.stack([layer[i] for layer in self.sums]).cpu() for i, name in enumerate(MOMENTS)}
        return sums | self._rope_tensors() | {"count": torch.tensor(self.length)}

    def _rope_tensors(self) -> dict[str, torch.Tensor]:
        """Return ROPE, equal for all layers."""
        assert self.rope is not None, "callers check for a rotary embedding"
        tensors = (
            tensor.float().expand(len(self.sums), 1, -1).contiguous()
            for tensor in (self.rope.frequencies, self.rope.order)
        )
        return dict(zip(ROPE, tensors, strict=True))
