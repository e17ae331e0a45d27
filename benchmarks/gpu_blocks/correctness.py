"""Block `correctness`: append, seal, extend and decode on poisoned memory against float64, at ragged ends.

Prompts of 1, S-1, S, S+1 and 10S+7 tokens go in as two chunks each, cut inside a segment; then some tokens are decoded
beside padded rows, over segment borders; then a graph captured for some requests is replayed for others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu_blocks.cases import CorrectnessCase
from benchmarks.gpu_blocks.context import Row
from benchmarks.gpu_blocks.reference import (
    Errors,
    Rows,
    Tokens,
    attention,
    kept_positions,
    past_rows,
    rows_of,
    rows_to_store,
    visible,
)
from benchmarks.gpu_blocks.stage import Stage, begin_segment, make_stage, measured_residents
from benchmarks.gpu_blocks.timing import Timer
from sgl_ragged.attention.kernel_choice import check_cache, device_capability
from sgl_ragged.attention.operations import commit
from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.mem_pool.kv_dtype import KvScales, movable
from sgl_ragged.mem_pool.tails import NOW

TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
STEPS = 3
PADDING = 3
FP8_SCALES = KvScales(keys=0.01, values=0.03)
"""With these, the largest of the random keys are too large for E4M3."""


class Trial:
    """One case: a stage full of NaN, the sequences, and what the operations gave.

    outputs: of each sequence, parts [tokens, layers, heads, q_per_kv, d] in order: prefill, then decoded tokens.
    eager, replayed: [sequences, layers, heads, q_per_kv, d], the token after those, decoded twice.
    """

    def __init__(self, case: CorrectnessCase, device: torch.device) -> None:
        torch.manual_seed(len(case.name))
        self.case, self.device = case, device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        cache: torch.dtype = getattr(torch, case.cache or case.dtype)
        check_cache("triton", cache, device_capability(str(device)))
        self.kept = np.array(case.kept)
        self.lengths = list(case.lengths)
        shape = (*self.kept.shape, case.q_per_kv, case.head_dim)
        # One token more than is decoded: the graph is captured with it.
        self.sequences = [Tokens.random(n + STEPS + 1, *shape, self.dtype, device) for n in self.lengths]
        most = max(self.lengths) + STEPS + 1
        self.stage: Stage = make_stage(
            self.kept,
            case.head_dim,
            case.q_per_kv,
            case.segment,
            len(self.lengths),
            most,
            self.dtype,
            device,
            case.scorer,
            poisoned=True,
            form=case.form,
            cache=cache,
            kv_scales=FP8_SCALES,
        )
        batch = len(self.lengths) + PADDING
        resident, _ = measured_residents(self.stage, batch)
        self.operations: TritonOps = self.stage.operations(case.method, resident, batch)
        self.outputs: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        self.eager = torch.empty(0)
        self.replayed = torch.empty((len(self.lengths), *shape), dtype=self.dtype, device=device)

    def poison(self) -> None:
        self.operations._partial.fill_(float("nan"))
        self.operations._lse.fill_(float("nan"))

    def extend(self, starts: list[int], ends: list[int]) -> None:
        """A chunk of every sequence that has one; outputs are kept."""
        chosen = [i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]
        prefixes, chunks = [starts[i] for i in chosen], [ends[i] - starts[i] for i in chosen]
        rows = torch.tensor(chosen, device=self.device) + 1
        for i in chosen:
            if starts[i] // self.case.segment < ends[i] // self.case.segment:
                begin_segment(self.stage.store, i + 1)
        batch = self.operations.describe_extend(self.stage.table, rows, prefixes, chunks)
        layers = []
        for layer in range(len(self.kept)):
            q, k, v = (
                torch.cat([getattr(self.sequences[i], name)[starts[i] : ends[i], layer] for i in chosen])
                for name in "qkv"
            )
            layers.append(self.operations.extend(layer, q, k, v, batch))
        for i, output in zip(chosen, torch.stack(layers, dim=1).split(chunks), strict=True):
            self.outputs[i].append(output)

    def decode_inputs(self, positions: list[int], order: list[int]) -> dict[str, torch.Tensor]:
        """Rows, lengths and per layer q, k, v of one token of each sequence in `order`, padding included."""
        rows = torch.tensor([i + 1 for i in order] + [0] * PADDING, device=self.device)
        lengths = torch.tensor([positions[i] + 1 for i in order] + [i % 2 for i in range(PADDING)], device=self.device)
        tensors = {}
        for name in "qkv":
            tokens = torch.stack([getattr(self.sequences[i], name)[positions[i]] for i in order])
            # Padded rows are whatever a server's buffers hold.
            padding = torch.full((PADDING, *tokens.shape[1:]), 7.0, dtype=self.dtype, device=self.device)
            tensors[name] = torch.cat([tokens, padding])
        return {"rows": rows, "lengths": lengths, **tensors}

    def describe(self, inputs: dict[str, torch.Tensor]) -> Any:
        return self.operations.describe_decode(
            self.stage.table, inputs["rows"], inputs["lengths"], inputs["lengths"].cpu()
        )

    def attend(self, inputs: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """[batch, layers, heads, q_per_kv, d] without the padded rows."""
        layers = [
            self.operations.decode(layer, *(inputs[name][:, layer] for name in "qkv"), batch)
            for layer in range(len(self.kept))
        ]
        return torch.stack(layers, dim=1)[: len(self.lengths)]

    def decode(self, step: int) -> None:
        positions = [length + step for length in self.lengths]
        self.begin(positions)
        inputs = self.decode_inputs(positions, list(range(len(positions))))
        batch = self.describe(inputs)
        rows = torch.arange(1, len(positions) + 1, device=self.device)
        commit(self.stage.store, self.stage.table, rows, [position + 1 for position in positions])
        self.poison()
        for i, output in enumerate(self.attend(inputs, batch)):
            self.outputs[i].append(output[None])

    def begin(self, positions: list[int]) -> None:
        """Before the tokens at these positions are decoded."""
        self.stage.store.flush_pending_seals()
        for i, position in enumerate(positions):
            if position and position % self.case.segment == 0:
                begin_segment(self.stage.store, i + 1)

    def replay(self, timer: Timer) -> None:
        """Decode the last token eagerly, and by a graph captured for the requests in another order."""
        positions = [length + STEPS for length in self.lengths]
        self.begin(positions)
        order = list(range(len(positions)))
        inputs = self.decode_inputs(positions, order)
        self.poison()
        self.eager = self.attend(inputs, self.describe(inputs))
        # Captured with the requests turned round, so that lengths, rows and slots are others in the replay.
        static = self.decode_inputs(positions, order[::-1])
        batch = self.describe(static)
        replay = timer.prepare(lambda: self.replayed.copy_(self.attend(static, batch)))
        for name in "qkv":
            static[name].copy_(inputs[name])
        self.describe(inputs)
        self.poison()
        self.replayed.fill_(float("nan"))
        replay()


def run_case(case: CorrectnessCase, device: torch.device, timer: Timer) -> list[Row]:
    """Rows {"case", "check", "passed", ...}. `timer` captures the graph; without a GPU it calls anew instead.

    Raises:
        RaggedConfigError: this GPU cannot read the case's cache.
    """
    return check(run_trial(case, device, timer))


def run_trial(case: CorrectnessCase, device: torch.device, timer: Timer) -> Trial:
    # Fresh memory is filled with NaN, so that outputs which no kernel wrote show.
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trial = Trial(case, device)
        cuts = [min(length, 2 * case.segment + case.segment // 3) // 2 * 2 for length in trial.lengths]
        trial.extend([0] * len(cuts), cuts)
        trial.extend(cuts, trial.lengths)
        for step in range(STEPS):
            trial.decode(step)
        trial.replay(timer)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return trial


def check(trial: Trial) -> list[Row]:
    """Set what a trial has left in memory and given out against float64."""
    case, bound = trial.case, TOLERANCES[trial.case.dtype]
    wrong_seals: list[str] = []
    wanted: dict[str, list[torch.Tensor]] = {"extend": [], "decode": [], "replay": []}
    given: dict[str, list[torch.Tensor]] = {"extend": [], "decode": [], "replay": []}
    store = trial.stage.store
    for i, (tokens, length) in enumerate(zip(trial.sequences, trial.lengths, strict=True)):
        outputs = torch.cat([*trial.outputs[i], trial.replayed[i : i + 1]])
        parts = {
            "extend": slice(0, length),
            "decode": slice(length, length + STEPS),
            "replay": slice(length + STEPS, length + STEPS + 1),
        }
        for layer, head in np.ndindex(*trial.kept.shape):
            stored = store.to_cache(layer, tokens.k[:, layer, head], tokens.v[:, layer, head])
            own = store.from_cache(layer, 0, stored[0]), store.from_cache(layer, 1, stored[1])
            kept, wrong = _kept(trial, i, layer, head, stored, own)
            wrong_seals += wrong
            mask = visible(kept, length + STEPS + 1, case.segment, trial.device)
            past = past_rows(*own, case.form)
            reference = attention(tokens.q[:, layer, head], own, past, mask, store.softmax_scales[layer], case.segment)
            for name, part in parts.items():
                wanted[name].append(reference[part])
                given[name].append(outputs[part, layer, head])
    rows: list[Row] = [
        {"check": "seal", "passed": not wrong_seals, "wrong": wrong_seals[:5]},
        {"check": "append", "passed": _tails_hold_tokens(trial)},
    ]
    for name in wanted:
        errors = Errors.between(torch.cat(given[name]), torch.cat(wanted[name]), bound)
        figures = {"relative": errors.relative, "largest": errors.largest, "bound": bound}
        rows.append({"check": name, "passed": errors.passed, **figures})
    rows.append({"check": "replay equals eager", "passed": bool(torch.equal(trial.eager, trial.replayed))})
    return [{"case": case.name, **row} for row in rows]


def _kept(
    trial: Trial, request: int, layer: int, head: int, stored: Rows, numbers: Rows
) -> tuple[dict[int, torch.Tensor], list[str]]:
    """What a head kept of each finished segment of a request, by segment number; and what is wrong with it.

    Args:
        stored, numbers: keys and values of all tokens, as the cache holds them and what they stand for.
    """
    store, segment, form = trial.stage.store, trial.case.segment, trial.case.form
    layout = store.layout
    count, start = int(layout.kept[layer, head]), int(layout.key_offset[layer, head])
    kept, wrong, width = {}, [], form.row_elems(layout.head_dim)
    for number in range((trial.lengths[request] + STEPS) // segment):
        slot = int(trial.stage.table[request + 1, number * segment]) // segment
        slab = rows_of(store.slabs[slot, start : start + count * width], count, layout.head_dim, form)
        own = slice(number * segment, (number + 1) * segment)
        rows = rows_to_store(*(part[own] for part in stored), form)
        positions, message = kept_positions(
            slab, rows, *(part[own] for part in numbers), trial.case.scorer, number == 0
        )
        if message:
            wrong.append(f"request {request}, layer {layer}, head {head}, segment {number}: {message}")
        kept[number] = torch.arange(count, device=trial.device) if positions is None else positions
    return kept, wrong


def _tails_hold_tokens(trial: Trial) -> bool:
    """Whether the pages of each open segment hold exactly its tokens, bit by bit."""
    segment, store = trial.case.segment, trial.stage.store
    data, each = movable(store.tails.data), store.tails.open_pages.tokens
    for i, tokens in enumerate(trial.sequences):
        stored = trial.lengths[i] + STEPS + 1
        first = (stored - 1) // segment * segment
        row = torch.tensor([i + 1], device=trial.device)
        (pages,) = store.tails.pages(row, trial.stage.table[row, first] // segment, NOW)
        place = torch.arange(stored - first, device=trial.device)
        for index, source in enumerate(store.to_cache(0, tokens.k, tokens.v)):
            # [tokens, layers, heads, d]
            tail = data[pages[place // each].long(), :, index, :, place % each]
            if not torch.equal(tail, movable(source[first:stored])):
                return False
    return True
