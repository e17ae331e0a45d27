"""A store with operations on it, fed with made-up sequences; and what attention must give for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from sgl_ragged.attention.operations import Operations, commit
from sgl_ragged.attention.sinks import with_sinks
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.mem_pool.kv_dtype import KvScales
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat
from sgl_ragged.mem_pool.slab_store import Sealer, SlabStore, open_pages, seal_in_torch
from sgl_ragged.scorers import get_scorer
from tests.bounded_oracle import views
from tests.oracle import Tokens, visible
from tests.quantised_oracle import restored_past

SEGMENT = 64
# 16 is the guard alone and 64 all tokens; between them scores decide.
KEPT = np.array([[16, 48, 32, 64], [32, 32, 32, 32], [64, 64, 64, 64]])


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The dtypes of FP8 caches, and the largest number of each."""

SCALES = KvScales(keys=0.0625, values=0.03)


@dataclass(frozen=True)
class Kernel:
    """How a test's store seals and attends.

    operations: for a store, the most segments of a request, and the table of segments in view. sealer: for a layout.
    """

    operations: Callable[[SlabStore, int, torch.Tensor | None], Operations]
    sealer: Callable[[SlabLayout], Sealer]


TORCH = Kernel(lambda store, _, in_view: TorchOps(store, in_view), lambda _: seal_in_torch)

Seen = Callable[[int], list[int]]
"""Numbers, ascending, of the sealed segments that queries in the segment of a number see."""


class Sequence:
    """One sequence's queries, keys and values, and what attention over all of it must give."""

    def __init__(self, length: int, layers: int, heads: int, per_head: int, dim: int, scorer: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, layers, heads, per_head, dim, generator=generator)
        self.k = torch.randn(length, layers, heads, dim, generator=generator)
        self.v = torch.randn(length, layers, heads, dim, generator=generator)
        self.gates = torch.rand(length, layers, heads, 1, generator=generator)
        self.scorer = scorer

    def stored(self, dtype: torch.dtype, scales: KvScales) -> Sequence:
        """The sequence with keys and values as they come back from an FP8 cache; itself where it is wide."""
        if dtype not in LARGEST:
            return self
        other, most = copy.copy(self), LARGEST[dtype]
        other.k = (self.k.double() / scales.keys).clamp(-most, most).float().to(dtype).float() * scales.keys
        other.v = (self.v.double() / scales.values).clamp(-most, most).float().to(dtype).float() * scales.values
        return other

    def seen(self, bound: HistoryBound) -> Seen:
        """What queries see where a history is bounded."""
        scores = (self.v.norm(dim=-1) / self.k.norm(dim=-1)).double().mean(dim=(1, 2)).numpy()
        whole = len(scores) // SEGMENT
        means = scores[: whole * SEGMENT].reshape(whole, SEGMENT).mean(1)
        every = views(np.arange(whole) if bound.by_age else means, bound.limit, bound.latest)
        return lambda number: every[number]

    def expected(
        self,
        kept: np.ndarray,
        seen: Seen | None = None,
        sinks: torch.Tensor | None = None,
        fetched: Mapping[tuple[int, int], list[int]] = MappingProxyType({}),
        form: str = "wide",
        placement: Placement | None = None,
    ) -> torch.Tensor:
        """float64 like `q`: attention with what each head keeps, by a dense mask; of the segments `seen` alone.

        Tokens of earlier segments are as slabs of the format `form` give them back.

        sinks: [layers, heads, q_per_kv], a logit more in each softmax, which has no value.
        fetched: tokens that the last query of a layer and head sees, too.
        placement: where heads are, if any is in parts.
        """
        output = torch.zeros(self.q.shape, dtype=torch.float64)
        for layer, head in np.ndindex(*kept.shape):
            keys, values = self.k[:, layer, head].double(), self.v[:, layer, head].double()
            queries = self.q[:, layer, head].double()
            tokens = Tokens(
                keys=keys.numpy(),
                values=values.numpy(),
                queries=queries.transpose(0, 1).numpy(),
                scale=0.5,
                gates=self.gates[:, layer, head, 0].double().numpy(),
                statistics=statistics(kept.shape[1], queries.shape[1], keys.shape[1])[head],
            )
            mask = visible(self.scorer, tokens, int(kept[layer, head]), SEGMENT)
            parts = None if placement is None else placement.kept[layer][placement.heads[layer] == head].tolist()
            past_keys, past_values = restored_past(keys, values, form, SEGMENT, mask[-1].copy(), parts)
            for number in range(-(-len(mask) // SEGMENT)) if seen is not None else ():
                for other in set(range(number)) - set(seen(number)):
                    mask[number * SEGMENT : (number + 1) * SEGMENT, other * SEGMENT : (other + 1) * SEGMENT] = False
            mask[-1, fetched.get((layer, head), [])] = True
            places = torch.arange(len(mask)) // SEGMENT
            own = places[:, None] == places
            logits = torch.where(own, queries_by(queries, keys), queries_by(queries, past_keys)) * 0.5
            logits.masked_fill_(torch.from_numpy(~mask), -torch.inf)
            if sinks is not None:
                sink = sinks[layer, head].double()[:, None, None].expand(-1, len(mask), 1)
                logits = torch.cat([logits, sink], dim=-1)
            weights = logits.softmax(-1)[..., : len(mask)]
            for entries, part in ((values, own), (past_values, ~own)):
                output[:, layer, head] += torch.einsum("gts,sd->tgd", weights * part, entries)
        return output


def queries_by(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[q_per_kv, T, T] of queries [T, q_per_kv, d] and keys [T, d]."""
    return torch.einsum("tgd,sd->gts", queries, keys)


def statistics(heads: int, per_head: int, dim: int) -> list[tuple[np.ndarray, ...]]:
    """For each head, what `Tokens.statistics` holds; all but two dimensions are rotated."""
    rng = np.random.default_rng(11)
    roots = rng.normal(size=(heads, per_head, dim, dim)) / dim**0.5
    rope = (10.0 ** -np.arange(dim // 2 - 1), rng.permutation(dim))
    moments = zip(rng.normal(size=(heads, per_head, dim)), roots @ roots.swapaxes(-1, -2), strict=True)
    return [(*own, *rope) for own in moments]


class Harness:
    """A store with a request table that gives request i row i + 1 and slots of its own, in scattered order."""

    def __init__(
        self,
        kept: np.ndarray,
        dim: int,
        scorer: str,
        requests: int,
        segments: int,
        per_head: int = 2,
        *,
        kernel: Kernel = TORCH,
        softmax_scales: list[float] | None = None,
        dtype: torch.dtype = torch.float32,
        placement: Placement | None = None,
        rank: int = 0,
        sinks: torch.Tensor | None = None,
        scales: KvScales = SCALES,
        bound: HistoryBound | None = None,
        gives_lse: bool = False,
        form: SlabFormat = WIDE,
        page_tokens: int | None = None,
    ) -> None:
        """`form`: of the slabs. `page_tokens`: of open segments in a page, as many as there is room for by default.
        `scales` are those of FP8 caches, whose queries are float32. `sinks` as in
        `Sequence.expected`. With a `bound`, histories are bounded.

        With a placement, one rank's places. With it, where `gives_lse`, or with sinks that operations do not add, `lse`
        holds the last batch's log-sum-exps [layers, tokens, ..].
        """
        self.kept, self.placement, self.sinks = kept, placement, sinks
        heads = np.tile(np.arange(kept.shape[1]), (len(kept), 1)) if placement is None else placement.heads[:, rank]
        self.heads = torch.tensor(heads)
        layout = SlabLayout(kept=kept, head_dim=dim, segment=SEGMENT, form=form)
        if placement is not None:
            total = np.take_along_axis(kept, heads, axis=1)
            shares = dict(total=total, first=placement.first[:, rank])
            layout = SlabLayout(placement.kept[:, rank], dim, SEGMENT, **shares, form=form)
        mean, covariance, frequencies, order = (
            torch.tensor(np.stack(x)).float() for x in zip(*statistics(kept.shape[1], per_head, dim), strict=True)
        )
        rope = {"rope_frequencies": frequencies[:1], "rope_order": order[:1]}
        count = requests * segments
        dtypes = dtype, torch.float32 if dtype in LARGEST else dtype
        pages = open_pages(get_scorer(scorer), [layout], per_head, *dtypes)
        if page_tokens is not None:
            assert page_tokens <= pages.tokens, f"a page has room for {pages.tokens} tokens"
            pages = OpenPages(SEGMENT, page_tokens)
        most = pages.most
        self.store = SlabStore(
            layout,
            get_scorer(scorer),
            count + 1 + 2 * requests * most,
            requests + 1,
            dtype,
            "cpu",
            q_per_kv=per_head,
            statistics=[{"query_mean": mean[row], "query_covariance": covariance[row], **rope} for row in self.heads],
            pages=pages,
            query_dtype=dtypes[1],
            softmax_scales=softmax_scales or [0.5] * len(kept),
            kv_scales=[scales] * len(kept),
            sealer=kernel.sealer(layout),
        )
        slots = torch.randperm(count, generator=torch.Generator().manual_seed(0)).view(requests, segments) + 1
        locations = slots[:, :, None] * SEGMENT + torch.arange(SEGMENT)
        self.table = torch.zeros(requests + 1, segments * SEGMENT, dtype=torch.int32)
        self.table[1:] = locations.flatten(1)
        self.histories = None
        if bound is not None:
            scores = None if bound.by_age else SegmentScores(self.store, bound.score)
            self.histories = Histories(bound, self.table, SEGMENT, scores)
        in_view = None if self.histories is None else self.histories.table
        self.operations = kernel.operations(self.store, segments, in_view)
        self.gives_lse = gives_lse or placement is not None
        self.gives_lse |= sinks is not None and not self.operations.adds_sinks
        # Whatever is read by mistake shows: nothing may depend on memory that was not written.
        self.store.slabs[1:] = 0x7B if form.quantised else min(1e4, torch.finfo(dtype).max)
        # Extra pages and stages for each request: those of the open segment, and those of the one before.
        beside = torch.randperm(2 * requests * most, generator=torch.Generator().manual_seed(1)) + count + 1
        self.store.tails.table[1:] = beside.view(requests, 2, most)

    def extend(self, sequences: list[Sequence], starts: list[int], ends: list[int]) -> list[torch.Tensor]:
        """One batch with a chunk of each sequence: each output [chunk, layers, heads, q_per_kv, d]."""
        self.store.flush_pending_seals()
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        rows = torch.arange(1, len(sequences) + 1)
        seen = None if self.histories is None else self.histories.seen(rows.tolist(), starts, lengths)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
            if start // SEGMENT < end // SEGMENT:
                self._begin_segment(row)
        batch = self.operations.describe_extend(self.table, rows, starts, lengths, seen)
        layers, self.lse = [], self._no_lse(sum(lengths))
        for layer in range(len(self.kept)):
            rows, scorer_inputs = (
                self._rows(sequences, starts, ends, layer),
                self._scorer_inputs(sequences, starts, ends, layer),
            )
            lse, more = self.lse[layer] if self.gives_lse else None, self._sinks(layer)
            output = self.operations.extend(layer, *rows, batch, scorer_inputs, lse, *more)
            if self.sinks is not None and not more:
                output = with_sinks(output, self.lse[layer], self.sinks[layer])
            layers.append(output)
        return list(torch.stack(layers, dim=1).split(lengths))

    def decode(self, sequences: list[Sequence], positions: list[int], padding: int = 0) -> torch.Tensor:
        """One step with the token at a position of each sequence: output [batch, layers, heads, q_per_kv, d].

        Padded rows, alternately of length 0 and 1, are appended, and cut off again.
        """
        self.store.flush_pending_seals()
        size = len(sequences)
        rows = torch.cat([torch.arange(1, size + 1), torch.zeros(padding, dtype=torch.int64)])
        lengths = torch.tensor([position + 1 for position in positions] + [i % 2 for i in range(padding)])
        if self.histories is not None:
            for row, position in enumerate(positions, start=1):
                self.histories.advance(row, position // SEGMENT)
            self.histories.refresh()
        for row, position in enumerate(positions, start=1):
            if position and position % SEGMENT == 0:
                self._begin_segment(row)
        batch = self.operations.describe_decode(self.table, rows, lengths, lengths)
        commit(self.store, self.table, rows, lengths.tolist())
        ends = [position + 1 for position in positions]
        layers, self.lse = [], self._no_lse(size + padding)
        for layer in range(len(self.kept)):
            scorer_inputs = self._scorer_inputs(sequences, positions, ends, layer)
            tensors = [
                *self._rows(sequences, positions, ends, layer),
                *([] if scorer_inputs is None else [scorer_inputs]),
            ]
            padded = [torch.cat([t, t.new_full((padding, *t.shape[1:]), 7.0)]) for t in tensors]
            lse = self.lse[layer] if self.gives_lse else None
            padded_inputs = padded[3] if len(padded) > 3 else None
            more = self._sinks(layer)
            output = self.operations.decode(layer, *padded[:3], batch, padded_inputs, lse, *more)[:size]
            if self.sinks is not None and not more:
                output = with_sinks(output, self.lse[layer, :size], self.sinks[layer])
            layers.append(output)
        self.lse = self.lse[:, :size]
        return torch.stack(layers, dim=1)

    def verify(
        self, sequences: list[Sequence], positions: list[int], width: int, accepted: list[int]
    ) -> list[torch.Tensor]:
        """One step with a chain of `width` tokens behind a position of each sequence, `accepted` of which are its own
        and count; the others are anything. Each output of those [accepted, layers, heads, q_per_kv, d]."""
        self.store.flush_pending_seals()
        for row, position in enumerate(positions, start=1):
            if position and position % SEGMENT == 0:
                self._begin_segment(row)
        rows, ends = torch.arange(1, len(sequences) + 1), [p + n for p, n in zip(positions, accepted, strict=True)]
        batch = self.operations.describe_chains(self.table, rows, torch.tensor(positions), positions, width)
        generator = torch.Generator().manual_seed(sum(ends))
        layers = []
        for layer in range(len(self.kept)):
            own = [*self._rows(sequences, positions, ends, layer)]
            inputs = self._scorer_inputs(sequences, positions, ends, layer)
            padded = []
            for tensor in own if inputs is None else [*own, inputs]:
                chains = torch.randn(len(accepted), width, *tensor.shape[1:], generator=generator) * 3
                for chain, right in zip(chains, tensor.split(accepted), strict=True):
                    chain[: len(right)] = right
                padded.append(chains.flatten(0, 1).to(tensor.dtype))
            layers.append(self.operations.extend(layer, *padded[:3], batch, padded[3] if len(padded) > 3 else None))
        commit(self.store, self.table, rows, ends)
        outputs = torch.stack(layers, dim=1).unflatten(0, (len(accepted), width))
        return [output[:count] for output, count in zip(outputs, accepted, strict=True)]

    def _sinks(self, layer: int) -> list[torch.Tensor]:
        """Of a layer, as operations take them that add them."""
        return [self.sinks[layer].flatten()] if self.sinks is not None and self.operations.adds_sinks else []

    def _begin_segment(self, row: int) -> None:
        self.store.tails.table[row] = self.store.tails.table[row].flip(0)

    def _no_lse(self, tokens: int) -> torch.Tensor:
        layers, places = self.heads.shape
        return torch.full((layers, tokens, places, self.store.q_per_kv), -torch.inf)

    def _rows(self, sequences: list[Sequence], starts: list[int], ends: list[int], layer: int) -> list[torch.Tensor]:
        dtype = self.store.query_dtype
        return [
            torch.cat([getattr(s, name)[a:b, layer] for s, a, b in zip(sequences, starts, ends, strict=True)])
            .index_select(1, self.heads[layer])
            .to(dtype)
            for name in "qkv"
        ]

    def _scorer_inputs(
        self, sequences: list[Sequence], starts: list[int], ends: list[int], layer: int
    ) -> torch.Tensor | None:
        if not self.store.has_scorer_inputs:
            return None
        source = "gates" if self.store.scorer.reads_hidden_states else "q"
        parts = [getattr(s, source)[a:b, layer] for s, a, b in zip(sequences, starts, ends, strict=True)]
        return torch.cat(parts).index_select(1, self.heads[layer]).flatten(2)
