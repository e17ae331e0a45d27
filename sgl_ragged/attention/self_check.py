"""Compare the attention operations of a server with dense attention, on its device, before it serves.

A small store of the same layout takes three made-up requests through prefill and decode, before and after segments are
sealed. Memory that was not written holds large numbers, so that reading a wrong place shows. Outputs are compared with
attention to all rows that a query sees, and slabs with those that `slab_store.seal_in_torch` writes. With
`--ragged-kernel torch` these slabs are its own: then attention alone is compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_ragged.attention.kernel_choice import make_operations
from sgl_ragged.attention.operations import commit
from sgl_ragged.attention.sinks import with_sinks
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.segments import InChunk, Sealed
from sgl_ragged.mem_pool.slab_store import SlabStore, seal_in_torch

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Largest differences of outputs by the queries' dtype. Made-up values have a standard deviation of 1."""

SEAL_TOLERANCE = 0.02
"""Largest difference of fitted rows, as a share of a head's largest number; rows without a fit must be equal."""

MOVED_SHARE = 0.03
"""Largest share of a head's fitted numbers that may differ by more: codes at a border between two."""

SWAPPED_TOKENS = 2
"""Most tokens that a head may choose otherwise, as it does where scores are equal up to rounding."""

SWAPPED_HEADS_SHARE = 0.05
"""Largest share of heads that may choose otherwise."""

LAYERS = 4
"""Number of layers, spread evenly, that run."""

REQUESTS = 3
SEGMENTS = 4
"""Most segments of a made-up request."""

WITH_SLABS = " after sealed segments"
"""Ending of the names of operations that see sealed segments."""

POISON = 1e4
"""Value of memory that no operation has written."""

POISON_BYTE = 0x7B


@dataclass(frozen=True)
class SelfCheck:
    """Result of a comparison that found no fault.

    device: its name. differences: largest difference of outputs by operation. tolerance: what it may be. layers: those
    that ran. segments: number of compared segments. seconds: duration.
    """

    device: str
    differences: dict[str, float]
    tolerance: float
    layers: list[int]
    segments: int
    seconds: float

    def __str__(self) -> str:
        largest = max(self.differences.values())
        return (
            f"attention and sealing checked against dense attention on {self.device} in {self.seconds:.1f} s: largest "
            f"difference {largest:.1e} of {self.tolerance:.0e} allowed, over {len(self.differences)} operations, "
            f"{self.segments} segments and {len(self.layers)} layers"
        )


class Chunk(NamedTuple):
    """Tokens of one made-up request that an operation takes; `start` and `end` are positions."""

    row: int
    start: int
    end: int


MakeStore = Callable[[Sequence[int], int, int], SlabStore]
"""Makes a store like a server's: of some layers, with pages for a number of requests of a number of segments each."""


def check_operations(make_store: MakeStore, layout: SlabLayout, kernel: str, chain_tokens: int = 0) -> SelfCheck:
    """Run a server's operations for some of its layers on made-up requests, and compare them with dense attention.

    Args:
        make_store: makes a store with the server's device, dtypes, scorer and sealer, and two more rows than requests.
        layout: of the server's store.
        kernel: as in `make_operations`.
        chain_tokens: tokens of a chain of drafts; 0 if the server verifies none.

    Raises:
        RaggedConfigError: an output or a slab differs by more than rounding.
    """
    started = time.perf_counter()
    spread = np.linspace(0, layout.num_layers - 1, min(LAYERS, layout.num_layers)).round().astype(int).tolist()
    # Layers with partial heads have kernels of their own.
    kinds = {any(band.partial for band in bands): layer for layer, bands in enumerate(layout.bands)}
    layers = sorted({*spread, *kinds.values()})
    with _one_thread():
        requests = _MadeUpRequests(make_store(layers, REQUESTS, SEGMENTS), layers, kernel)
        requests.run(chain_tokens)
    device, seconds = requests.device_name, time.perf_counter() - started
    return SelfCheck(device, requests.differences, requests.tolerance, layers, requests.compared, seconds)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread of the CPU: tensors are small, and threads would wait for each other on shared cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _MadeUpRequests:
    """Made-up requests on a small store, with the largest differences so far.

    Args:
        store: new; the class fills it.
        layers: the server's number of each of its layers.
        kernel: as in `make_operations`.
    """

    def __init__(self, store: SlabStore, layers: Sequence[int], kernel: str) -> None:
        self.store, self.layers = store, layers
        self.operations: Any = make_operations(kernel, store, SEGMENTS)
        layout, most = store.layout, store.tails.open_pages.most
        self.segment, self.device = layout.segment, store.slabs.device
        on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if on_gpu else "this CPU"
        self.where = f"--ragged-kernel {kernel} on {self.device_name}"
        self.instead = "use --kv-pool token" if kernel == "torch" else "use --ragged-kernel torch"
        store.add_seal_listener(self._sealed)
        own = REQUESTS * SEGMENTS
        generator = torch.Generator().manual_seed(7)
        slots = torch.randperm(own, generator=generator).view(REQUESTS, SEGMENTS) + 1
        places = torch.arange(self.segment)
        table = torch.zeros((REQUESTS + 1, SEGMENTS * self.segment), dtype=torch.int32)
        table[1:] = (slots[:, :, None] * self.segment + places).flatten(1).to(torch.int32)
        self.table, self.slots = table.to(self.device), slots.to(self.device)
        movable(store.slabs)[1:] = POISON_BYTE if layout.form.quantised or store.fp8 else POISON
        beside = torch.randperm(2 * REQUESTS * most, generator=generator) + own + 1
        store.tails.table[1 : REQUESTS + 1] = beside.view(REQUESTS, 2, most).to(store.tails.table)
        # Layers take tokens from different places on: reading another layer's keys shows.
        shape = (REQUESTS, SEGMENTS * self.segment + layout.num_layers, layout.num_heads)

        def normal(*more: int) -> torch.Tensor:
            made = torch.randn((*shape, *more), generator=generator)
            return made.to(self.device, store.query_dtype)

        self.queries = normal(store.q_per_kv, layout.head_dim)
        self.keys, self.values = normal(layout.head_dim), normal(layout.head_dim)
        inputs = self.operations.made_up_inputs(REQUESTS * shape[1], generator)
        self.inputs = None if inputs is None else inputs.unflatten(0, (REQUESTS, shape[1]))
        self.precise = torch.float64 if store.query_dtype == torch.float32 else torch.float32
        self.tolerance = TOLERANCES[store.query_dtype]
        self.lengths = [0] * REQUESTS
        self.differences: dict[str, float] = {}
        self.compared = 0
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._swapped = self._chose = 0

    def run(self, chain_tokens: int) -> None:
        """Run and compare every operation."""
        segment = self.segment
        self.extend("prefill", [segment + 7, segment - 1, 3])
        for step in range(2):
            self.decode("decode", padding=step)
        self.extend("prefill" + WITH_SLABS, [2 * segment, 5, segment])
        self.decode("decode" + WITH_SLABS, padding=2)
        self.extend("short prefill" + WITH_SLABS, [1, 3, 2])
        if chain_tokens:
            self.verify("drafts" + WITH_SLABS, min(chain_tokens, segment // 2))

    def extend(self, what: str, lengths: Sequence[int]) -> None:
        """Prefill chunks of all requests."""
        chunks = self._chunks(lengths)
        self.store.flush_pending_seals()
        for chunk in chunks:
            if chunk.start // self.segment < chunk.end // self.segment:
                self._begin_segment(chunk.row)
        batch = self.operations.describe_extend(self.table, self._rows(), [one.start for one in chunks], list(lengths))
        for layer in range(self.store.layout.num_layers):
            self._extend_layer(what, layer, chunks, batch)
        self.lengths = [one.end for one in chunks]
        self._compare_slabs(chunks)

    def verify(self, what: str, width: int) -> None:
        """Verify a chain of drafts of every request; none of them is accepted."""
        width = min(width, *(self.segment - length % self.segment for length in self.lengths))
        self.store.flush_pending_seals()
        starts = torch.tensor(self.lengths, device=self.device)
        batch = self.operations.describe_chains(self.table, self._rows(), starts, self.lengths, width)
        for layer in range(self.store.layout.num_layers):
            self._extend_layer(what, layer, self._chunks([width] * REQUESTS), batch)

    def _extend_layer(self, what: str, layer: int, chunks: Sequence[Chunk], batch: object) -> None:
        queries, keys, values = (self._tokens(one, layer, chunks) for one in (self.queries, self.keys, self.values))
        lse = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
        output = self.operations.extend(layer, queries, keys, values, batch, self._inputs(layer, chunks), lse)
        self._compare(what, layer, chunks, output, lse)
        if not what.endswith(WITH_SLABS):
            return
        keys, values = self.operations.to_cache(layer, keys, values)
        for name, variant in {"": batch, **self.operations.variants(batch)}.items():
            for extra, given, sinks in self._kinds(what, layer, lse):
                again = torch.zeros_like(output)
                more = [] if sinks is None else [sinks]
                self.operations.attend_chunks(layer, queries, keys, values, variant, again, given, *more)
                self._compare(what + name + extra, layer, chunks, again, given, sinks)

    def _kinds(
        self, what: str, layer: int, lse: torch.Tensor
    ) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
        """Return kinds of attention that a layer may need: ending of a name, log-sum-exps to fill, and learned sinks.

        All kinds are compared where there are sealed segments.
        """
        kinds: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [("", lse, None)]
        if what.endswith(WITH_SLABS) and self.operations.is_whole(layer):
            kinds.append((", without log-sum-exps", None, None))
            if self.operations.adds_sinks:
                kinds.append((", learned sinks", None, self.queries[0, 0, :, :, 0].flatten().contiguous()))
        return kinds

    def decode(self, what: str, padding: int) -> None:
        """Decode a token of every request; padded rows, alternately of length 0 and 1, are appended."""
        chunks = self._chunks([1] * REQUESTS)
        self.store.flush_pending_seals()
        self._compare_slabs([Chunk(one.row, 0, one.start) for one in chunks])
        for chunk in chunks:
            if chunk.start and chunk.start % self.segment == 0:
                self._begin_segment(chunk.row)
        rows = torch.cat([self._rows(), torch.zeros(padding, dtype=torch.int64, device=self.device)])
        lengths = torch.tensor([one.end for one in chunks] + [number % 2 for number in range(padding)])
        batch = self.operations.describe_decode(self.table, rows, lengths.to(self.device), lengths)
        commit(self.store, self.table, rows, lengths.tolist())
        for layer in range(self.store.layout.num_layers):
            inputs = self._inputs(layer, chunks)
            tensors = [self._tokens(one, layer, chunks) for one in (self.queries, self.keys, self.values)]
            padded = [torch.cat([one, one[:1].expand(padding, *one.shape[1:])]) for one in tensors]
            if inputs is not None:
                inputs = torch.cat([inputs, inputs[:1].expand(padding, *inputs.shape[1:])])
            given = padded[0].new_full(padded[0].shape[:3], -torch.inf, dtype=torch.float32)
            for extra, lse, sinks in self._kinds(what, layer, given):
                more = [lse] if sinks is None else [lse, sinks]
                output = self.operations.decode(layer, *padded, batch, inputs, *more)[:REQUESTS]
                self._compare(what + extra, layer, chunks, output, None if lse is None else lse[:REQUESTS], sinks)
        self.lengths = [one.end for one in chunks]

    def _chunks(self, lengths: Sequence[int]) -> list[Chunk]:
        """Return the next tokens of the requests, in their order."""
        starts = self.lengths
        return [Chunk(i, start, start + n) for i, (start, n) in enumerate(zip(starts, lengths, strict=True))]

    def _rows(self) -> torch.Tensor:
        return torch.arange(1, REQUESTS + 1, device=self.device)

    def _begin_segment(self, row: int) -> None:
        pages = self.store.tails.table
        pages[row + 1] = pages[row + 1].flip(0)

    def _tokens(self, of: torch.Tensor, layer: int, chunks: Sequence[Chunk]) -> torch.Tensor:
        return torch.cat([of[one.row, layer + one.start : layer + one.end] for one in chunks])

    def _inputs(self, layer: int, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        if self.inputs is None:
            return None
        return torch.cat([self.inputs[one.row][layer + one.start : layer + one.end] for one in chunks])

    def _compare(
        self,
        what: str,
        layer: int,
        chunks: Sequence[Chunk],
        output: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Compare outputs of chunks with dense attention. Raises RaggedConfigError beyond the tolerance."""
        begin = 0
        for chunk in chunks:
            some = self._sampled(chunk)
            wanted, wanted_lse = self._dense(layer, chunk.row, some)
            if sinks is not None:
                wanted = with_sinks(wanted, wanted_lse, sinks.to(wanted.dtype))
            places = some - chunk.start + begin
            found = {"": (output[places], wanted)}
            if lse is not None:
                found[", log-sum-exps"] = (lse[places], wanted_lse)
            for name, (have, want) in found.items():
                # Parts of heads that see nothing here have -inf on both sides.
                difference = torch.where(have == want, 0.0, (have.to(want.dtype) - want).abs()).max().item()
                # A comparison with NaN is false.
                if not difference <= self.tolerance:
                    raise RaggedConfigError(
                        f"{self.where}: {what}{name} differs from dense attention by {difference:.2g} in layer "
                        f"{self.layers[layer]} of request {chunk.row}, {self.tolerance:g} allowed; {self.instead}"
                    )
                self.differences[what] = max(self.differences.get(what, 0.0), difference)
            begin += chunk.end - chunk.start

    def _sampled(self, chunk: Chunk) -> torch.Tensor:
        """Return positions of a chunk that are compared: all around borders and ends, and every 16th."""
        positions = torch.arange(chunk.start, chunk.end, device=self.device)
        ends = torch.minimum(positions - chunk.start, chunk.end - 1 - positions)
        borders = torch.minimum(positions % self.segment, self.segment - 1 - positions % self.segment)
        return positions[(torch.minimum(ends, borders) < 3) | (positions % 16 == 0)]

    def _dense(self, layer: int, row: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of tokens of one request to all rows that they see, from the slabs that are there.

        Returns:
            Outputs [tokens, heads, q_per_kv, head_dim] and log-sum-exps [tokens, heads, q_per_kv].
        """
        store, length = self.store, int(positions.max()) + 1
        scale, value_scale = store.logit_scale(layer), store.value_scale(layer) or 1.0
        keys, values = (one[row, layer : layer + length] for one in (self.keys, self.values))
        own = torch.stack([part.to(self.precise) for part in store.to_cache(layer, keys, values)])
        queries = self.queries[row, layer + positions].to(self.precise)
        outputs = torch.zeros_like(queries)
        lses = torch.full(queries.shape[:3], -torch.inf, dtype=self.precise, device=self.device)
        numbers = positions // self.segment
        for number in numbers.unique().tolist():
            some = (numbers == number).nonzero()[:, 0]
            begin = number * self.segment
            seen = torch.arange(begin, length, device=self.device)[None] <= positions[some, None]
            for index, band in enumerate(store.layout.bands[layer]):
                heads = store.band_heads(layer, index)
                asked = queries[some][:, heads]
                rows, masks = [], []
                if number and band.kept:
                    past = store.kept_rows(layer, band, self.slots[row, :number], self.precise)
                    # [segments, heads, 2, kept, d] -> [2, heads, rows, d]
                    rows.append(past.permute(2, 1, 0, 3, 4).flatten(2, 3))
                    masks.append(seen.new_ones((len(some), number * band.kept)))
                if band.attends_open:
                    rows.append(own[:, begin:length, heads].transpose(1, 2))
                    masks.append(seen)
                if not rows:
                    continue
                band_keys, band_values = torch.cat(rows, dim=2)
                logits = torch.einsum("thgd,hrd->thgr", asked, band_keys) * scale
                logits.masked_fill_(~torch.cat(masks, dim=1)[:, None, None], -torch.inf)
                found = torch.einsum("thgr,hrd->thgd", logits.softmax(-1), band_values) * value_scale
                outputs[some[:, None], heads] = found
                lses[some[:, None], heads] = logits.logsumexp(-1)
        return outputs, lses

    def _sealed(self, _store: SlabStore, sealed: Sealed) -> None:
        for layer in sealed.layers:
            for slot, kept in zip(sealed.segments.slots.tolist(), sealed.kept(layer, self.segment), strict=True):
                self._kept[layer, slot] = kept

    def _compare_slabs(self, chunks: Sequence[Chunk]) -> None:
        """Compare segments that were sealed since the last call; see `_compare_slab`."""
        slots = {int(self.slots[one.row, n]): (one.row, n) for one in chunks for n in range(one.end // self.segment)}
        new = sorted({slot for _, slot in self._kept})
        for slot in new:
            for layer in range(self.store.layout.num_layers):
                self._compare_slab(layer, slot, *slots[slot])
        self._kept.clear()
        self.compared += len(new)

    def _compare_slab(self, layer: int, slot: int, row: int, number: int) -> None:
        """Seal a segment again, by `seal_in_torch` to slab 0, and compare what heads keep of it.

        Raises:
            RaggedConfigError: heads keep other tokens, or other numbers of the same tokens.
        """
        store, length = self.store, (number + 1) * self.segment
        keys, values = store.to_cache(layer, *(one[row, layer : layer + length] for one in (self.keys, self.values)))
        inputs = self._inputs(layer, [Chunk(row, 0, length)])
        if inputs is not None:
            inputs = self.operations.stored_inputs(layer, inputs)
        first, slots = (torch.tensor([n], device=self.device) for n in (number * self.segment, 0))
        numbers = torch.tensor([number], device=self.device)
        again = InChunk(first, slots, numbers, keys, values, inputs, run=number * self.segment)
        (order,) = seal_in_torch(store, [layer], again)
        wanted = Sealed([layer], again, [order], torch.tensor(store.layout.totals, device=self.device))
        swapped = (wanted.kept(layer, self.segment)[0] & ~self._kept[layer, slot]).sum(1)
        self._chose += len(swapped)
        self._swapped += int((swapped > 0).sum())
        where = f"{self.where}: sealing segment {number} of request {row} in layer {self.layers[layer]}"
        few = self._swapped <= max(1, SWAPPED_HEADS_SHARE * self._chose)
        if int(swapped.max()) > SWAPPED_TOKENS or not few:
            raise RaggedConfigError(
                f"{where} keeps {int(swapped.max())} tokens other than the reference does; {self.instead}"
            )
        for index, band in enumerate(store.layout.bands[layer]):
            if band.kept == 0:
                continue
            same = swapped[store.band_heads(layer, index)] == 0
            both = torch.tensor([slot, 0], device=self.device)
            if store.corrector is None:
                found, other = movable(store.band_elems(layer, band))[both][:, same]
                wrong = float((found != other).any())
            else:
                found, other = store.kept_rows(layer, band, both, torch.float32)[:, same].flatten(2)
                beyond = (found - other).abs() > SEAL_TOLERANCE * other.abs().amax(1, keepdim=True)
                shares = beyond.float().mean(1)
                wrong = float(shares.max()) if len(shares) else 0.0
                wrong = wrong if wrong > MOVED_SHARE else 0.0
            if wrong:
                raise RaggedConfigError(f"{where} stores other numbers than the reference does; {self.instead}")
