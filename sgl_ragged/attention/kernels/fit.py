"""Fitting, in kernels: the steps of `fitting.attention_matching` that are many small operations in torch.

They satisfy its `Steps`. Numbers are those of torch but for the order of sums, as batched solvers have orders of their
own anyway.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.codes import quantised, rotated
from sgl_ragged.attention.kernels.primitives import cells, columns
from sgl_ragged.fitting.attention_matching import Kept
from sgl_ragged.fitting.references import References
from sgl_ragged.fitting.torch_steps import LEAST_WEIGHT, MOST_WEIGHT, STEPS

_LEAST, _MOST, _STEPS = tl.constexpr(LEAST_WEIGHT), tl.constexpr(MOST_WEIGHT), tl.constexpr(STEPS)

_PI, _TURNS = tl.constexpr(math.pi), tl.constexpr(0.5 / math.pi)
"""Radians of half a turn, and turns of a radian."""

_ROWS = tl.constexpr(16)
"""Rows of a tile of keys."""

_QUERIES = tl.constexpr(32)
"""Rows of a tile of the codebook's queries."""


@triton.jit
def _of_turns(turns):
    """Cosines and sines of parts of a turn in [-1/2, 1/2], to 1e-7. CUDA's functions keep a table on the stack, for
    arguments of any size."""
    half = turns * _PI
    square = half * half
    sine = 1.0 - square / 110.0 * (1.0 - square / 156.0)
    sine = 1.0 - square / 20.0 * (1.0 - square / 42.0 * (1.0 - square / 72.0 * sine))
    sine = half * (1.0 - square / 6.0 * sine)
    cosine = 1.0 - square / 90.0 * (1.0 - square / 132.0 * (1.0 - square / 182.0))
    cosine = 1.0 - square / 12.0 * (1.0 - square / 30.0 * (1.0 - square / 56.0 * cosine))
    cosine = 1.0 - square / 2.0 * cosine
    return 1.0 - 2.0 * sine * sine, 2.0 * sine * cosine


@triton.jit(do_not_specialize_on_alignment=["numbers_ptr"])
def seen_from_kernel(
    queries_ptr,
    across_ptr,
    masses_ptr,
    outputs_ptr,
    bias_ptr,
    bias_across_ptr,
    frequencies_ptr,
    numbers_ptr,
    turned_ptr,
    turned_bias_ptr,
    seen_masses_ptr,
    seen_outputs_ptr,
    head_steps,
    mass_step,
    output_step,
    frequency_step,
    SEGMENT: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    segment, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    number = tl.load(numbers_ptr + segment)
    version = (number == 0).to(tl.int64)
    dims = tl.arange(0, columns(HEAD_DIM))
    inside = dims < HEAD_DIM
    position = (number.to(tl.int64) + 1) * SEGMENT - 1
    # Angles of far positions in float32 would be off by more than the fastest frequencies bear: what is left of a turn
    # is found in float64.
    turns = tl.load(frequencies_ptr + head * frequency_step + dims, mask=inside, other=0.0) * _TURNS
    turns *= position.to(tl.float64)
    cosine, sine = _of_turns((turns - tl.floor(turns + 0.5)).to(tl.float32))
    at = head * HEAD_DIM + dims
    bias = tl.load(bias_ptr + at, mask=inside) * cosine + tl.load(bias_across_ptr + at, mask=inside) * sine
    result = (segment * heads + head).to(tl.int64)
    tl.store(turned_bias_ptr + result * HEAD_DIM + dims, bias, mask=inside)
    for start in range(0, QUERIES, _QUERIES):
        numbers = start + tl.arange(0, _QUERIES)
        real = numbers < QUERIES
        mask = inside[:, None] & real[None, :]
        cell = dims[:, None] * QUERIES + numbers[None, :]
        own = head.to(tl.int64) * head_steps + cell
        query = tl.load(queries_ptr + own, mask=mask).to(tl.float32) * cosine[:, None]
        query += tl.load(across_ptr + own, mask=mask).to(tl.float32) * sine[:, None]
        target = result * head_steps + cell
        tl.store(turned_ptr + target, query, mask=mask)
        output = tl.load(outputs_ptr + version * output_step + own, mask=mask).to(tl.float32)
        tl.store(seen_outputs_ptr + target, output, mask=mask)
        mass = tl.load(masses_ptr + version * mass_step + head * QUERIES + numbers, mask=real)
        tl.store(seen_masses_ptr + result * QUERIES + numbers, mass, mask=real)


def seen_from_warps(head_dim: int) -> int:
    return 8 if head_dim > 128 else 4


def seen_from(references: References, numbers: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Run `Steps.seen_from` in one launch."""
    heads, dim, queries = references.queries.shape
    made = {"dtype": torch.float32, "device": numbers.device}
    turned, outputs = (torch.empty((len(numbers), heads, dim, queries), **made) for _ in range(2))
    bias = torch.empty((len(numbers), heads, 1, dim), **made)
    masses = torch.empty((len(numbers), heads, 1, queries), **made)
    seen_from_kernel[(len(numbers), heads)](
        references.queries,
        references.across,
        references.masses,
        references.outputs,
        references.bias,
        references.bias_across,
        references.frequencies,
        numbers.int(),
        turned,
        bias,
        masses,
        outputs,
        dim * queries,
        references.masses.stride(0),
        references.outputs.stride(0),
        references.frequencies.stride(0),
        SEGMENT=length,
        QUERIES=queries,
        HEAD_DIM=dim,
        num_warps=seen_from_warps(dim),
    )
    return turned, bias, masses, outputs


@triton.constexpr_function
def _overshoot(step: int) -> float:
    """Return the factor of Nesterov's step beyond the new point, relative to the last step; 1 at first."""
    momentum, last = 1.0, 1.0
    for _ in range(step + 1):
        momentum, last = (1 + math.sqrt(1 + 4 * momentum**2)) / 2, momentum
    return 1 + (last - 1) / momentum


@triton.jit
def weights_kernel(
    exps_ptr,
    whole_ptr,
    lost_ptr,
    weights_ptr,
    ridge,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BLOCK)
    gram = tl.zeros([BLOCK, BLOCK], tl.float32)
    linear = tl.zeros([BLOCK], tl.float32)
    for start in range(0, QUERIES, _QUERIES):
        numbers = start + tl.arange(0, _QUERIES)
        real = numbers < QUERIES
        whole = tl.load(whole_ptr + own * QUERIES + numbers, mask=real, other=1.0)
        missing = tl.load(lost_ptr + own * QUERIES + numbers, mask=real, other=0.0) / whole
        at = exps_ptr + (own * TOKENS + rows)[:, None] * QUERIES + numbers[None, :]
        shares = tl.load(at, mask=(rows < TOKENS)[:, None] & real[None, :], other=0.0) / whole[None, :]
        gram += tl.dot(shares, tl.trans(shares), input_precision="ieee")
        linear += tl.sum(shares * missing[None, :], axis=1)
    same = rows[:, None] == rows[None, :]
    gram += tl.where(same, ridge, 0.0)
    # Rows beyond the tokens have but the ridge, and go nowhere.
    diagonal = tl.where(same, gram, 0.0)
    unit, across = tl.sqrt(tl.sum(diagonal, axis=1)), tl.sqrt(tl.sum(diagonal, axis=0))
    gram /= unit[:, None] * across[None, :]
    # No eigenvalue is larger than the largest sum of a row.
    step = 1.0 / tl.max(tl.sum(gram, axis=1), axis=0)
    gram = tl.where(same, 1.0, 0.0) - gram * step
    linear = linear / unit * step
    # How far weights are from 1, in units.
    now, ahead = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(_STEPS):
        moved = tl.sum(gram * ahead[None, :], axis=1) + linear
        moved = tl.minimum(tl.maximum(moved, unit * (_LEAST - 1.0)), unit * (_MOST - 1.0))
        ahead = now + (moved - now) * _overshoot(number)
        now = moved
    tl.store(weights_ptr + own * TOKENS + rows, 1.0 + now / unit, mask=rows < TOKENS)


def weights(exps: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor, ridge: float) -> torch.Tensor:
    """Run `Steps.weights` in one launch."""
    found = torch.empty((*exps.shape[:-1], 1), dtype=torch.float32, device=exps.device)
    tokens, queries = exps.shape[-2:]
    weights_kernel[(found[..., 0, 0].numel(),)](
        exps.contiguous(),
        whole,
        lost,
        found,
        ridge,
        TOKENS=tokens,
        QUERIES=queries,
        BLOCK=max(triton.next_power_of_2(tokens), 16),
        num_warps=4,
    )
    return found


@triton.jit
def _loaded(rows_at, numbers, real, HEAD_DIM: tl.constexpr):
    """Load the rows of a tile, zeros beyond the last one."""
    at = rows_at + numbers[:, None].to(tl.int64) * HEAD_DIM + tl.arange(0, columns(HEAD_DIM))[None, :]
    return tl.load(at, mask=cells(real, HEAD_DIM), other=0.0).to(tl.float32)


@triton.jit
def stored_kernel(
    rows_ptr,
    ranks_ptr,
    keys_ptr,
    totals_ptr,
    stored_ptr,
    key_segment_step,
    key_head_step,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    COLUMNS: tl.constexpr = columns(HEAD_DIM)
    segment, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own = (segment * heads + head).to(tl.int64)
    rows_at, tile = rows_ptr + own * TOKENS * HEAD_DIM, tl.arange(0, _ROWS)
    mean, spread = tl.zeros([COLUMNS], tl.float32), tl.full([COLUMNS], 1.0, tl.float32)
    if CENTRED:
        # Moments are those of all that a head keeps.
        total = tl.load(totals_ptr + head)
        keys_at = keys_ptr + segment.to(tl.int64) * key_segment_step + head * key_head_step
        for moment in tl.static_range(2):
            added = tl.zeros([_ROWS, COLUMNS], tl.float32)
            if ranks_ptr is not None:
                for start in range(0, total, _ROWS):
                    real = start + tile < total
                    keys = _loaded(keys_at, start + tile, real, HEAD_DIM)
                    added += (
                        keys
                        if moment == 0
                        else tl.where(real[:, None], (keys - mean[None, :]) * (keys - mean[None, :]), 0.0)
                    )
            for start in range(0, TOKENS, _ROWS):
                numbers = start + tile
                real = numbers < TOKENS
                new = _loaded(rows_at, numbers, real, HEAD_DIM)
                if ranks_ptr is not None:
                    ranks = tl.load(ranks_ptr + own * TOKENS + numbers, mask=real, other=0)
                    real = real & (ranks < total)
                    old = _loaded(keys_at, ranks, real, HEAD_DIM)
                    change = new - old if moment == 0 else (new - old) * (new + old - 2.0 * mean[None, :])
                else:
                    real = real & (numbers < total)
                    change = new if moment == 0 else (new - mean[None, :]) * (new - mean[None, :])
                added += tl.where(real[:, None], change, 0.0)
            averaged = tl.sum(added, axis=0) / total
            if moment == 0:
                mean = averaged.to(tl.float16).to(tl.float32)
            else:
                spread = tl.sqrt(tl.sqrt(tl.maximum(averaged, 0.0)))
                spread = tl.maximum(spread, 2.0**-24).to(tl.float16).to(tl.float32)
    for start in range(0, TOKENS, _ROWS):
        numbers = start + tile
        real = numbers < TOKENS
        new = (_loaded(rows_at, numbers, real, HEAD_DIM) - mean[None, :]) / spread[None, :]
        codes, scale = quantised(new, BITS, _ROWS, HEAD_DIM)
        back = rotated(codes * scale.to(tl.float32)[:, None], _ROWS, HEAD_DIM) * spread[None, :] + mean[None, :]
        at = stored_ptr + (own * TOKENS + numbers)[:, None] * HEAD_DIM + tl.arange(0, COLUMNS)[None, :]
        tl.store(at, back, mask=cells(real, HEAD_DIM))


def nearly_stored(
    rows: torch.Tensor, ranks: torch.Tensor | None, keys: torch.Tensor, kept: Kept, bits: int, centred: bool
) -> torch.Tensor:
    """Run `Steps.nearly_stored` in one launch."""
    segments, heads, tokens, dim = rows.shape
    stored = torch.empty_like(rows, memory_format=torch.contiguous_format)
    stored_kernel[(segments, heads)](
        rows.contiguous(),
        ranks,
        keys,
        kept.totals,
        stored,
        keys.stride(0),
        keys.stride(1),
        TOKENS=tokens,
        HEAD_DIM=dim,
        BITS=bits,
        CENTRED=centred,
        num_warps=4,
    )
    return stored
