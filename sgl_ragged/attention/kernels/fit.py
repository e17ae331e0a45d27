"""Fitting, in kernels: the steps of `fitting.attention_matching` that are many small operations in torch.

They satisfy its `Steps`. Numbers are those of torch but for the order of sums, as batched solvers have orders of their
own anyway.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels.primitives import columns
from sgl_ragged.fitting.references import References
from sgl_ragged.fitting.torch_steps import LEAST_WEIGHT, MOST_WEIGHT, STEPS

_LEAST, _MOST, _STEPS = tl.constexpr(LEAST_WEIGHT), tl.constexpr(MOST_WEIGHT), tl.constexpr(STEPS)

_PI, _TURNS = tl.constexpr(math.pi), tl.constexpr(0.5 / math.pi)
"""Radians of half a turn, and turns of a radian."""

_NUMBERS = tl.constexpr(16)
"""Numbers that `feed_back` rounds before it reads the errors of all of them together."""

ROUNDED_COLUMNS = 64
"""Columns that one CTA of `feed_back` rounds."""

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
def _shares(exps_at, whole_at, numbers, tokens, QUERIES: tl.constexpr, BLOCK: tl.constexpr):
    """Load shares of attention [BLOCK, queries of a tile], 0 beyond the tokens and the queries."""
    rows = tl.arange(0, BLOCK)
    real = numbers < QUERIES
    whole = tl.load(whole_at + numbers, mask=real, other=1.0)
    at = exps_at + rows[:, None] * QUERIES + numbers[None, :]
    return tl.load(at, mask=(rows < tokens)[:, None] & real[None, :], other=0.0) / whole[None, :]


@triton.jit
def weights_kernel(
    exps_ptr,
    whole_ptr,
    lost_ptr,
    weights_ptr,
    ridge,
    tokens,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    exps_at, whole_at = exps_ptr + own * tokens * QUERIES, whole_ptr + own * QUERIES
    rows, tile = tl.arange(0, BLOCK), tl.arange(0, TILE)
    # The matrix of products is too large for registers, so products with it go through the shares each time.
    diagonal, linear = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, QUERIES, TILE):
        numbers = start + tile
        shares = _shares(exps_at, whole_at, numbers, tokens, QUERIES, BLOCK)
        whole = tl.load(whole_at + numbers, mask=numbers < QUERIES, other=1.0)
        lost = tl.load(lost_ptr + own * QUERIES + numbers, mask=numbers < QUERIES, other=0.0)
        diagonal += tl.sum(shares * shares, axis=1)
        linear += tl.sum(shares * (lost / whole)[None, :], axis=1)
    # Rows beyond the tokens have but the ridge, and go nowhere.
    diagonal += ridge
    unit = tl.sqrt(diagonal)
    # No eigenvalue is larger than the largest sum of a row.
    sums = ridge / diagonal
    for start in range(0, QUERIES, TILE):
        shares = _shares(exps_at, whole_at, start + tile, tokens, QUERIES, BLOCK)
        sums += tl.sum(shares * tl.sum(shares / unit[:, None], axis=0)[None, :], axis=1) / unit
    step = 1.0 / tl.max(sums, axis=0)
    linear = linear / unit * step
    # How far weights are from 1, in units.
    now, ahead = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(_STEPS):
        product = ahead * (ridge / diagonal)
        if number > 0:
            for start in range(0, QUERIES, TILE):
                shares = _shares(exps_at, whole_at, start + tile, tokens, QUERIES, BLOCK)
                product += tl.sum(shares * tl.sum(shares * (ahead / unit)[:, None], axis=0)[None, :], axis=1) / unit
        moved = ahead - product * step + linear
        moved = tl.minimum(tl.maximum(moved, unit * (_LEAST - 1.0)), unit * (_MOST - 1.0))
        ahead = now + (moved - now) * _overshoot(number)
        now = moved
    tl.store(weights_ptr + own * tokens + rows, 1.0 + now / unit, mask=rows < tokens)


def weights_tile(tokens: int) -> tuple[int, int]:
    """Return tokens, a power of two, and queries that a CTA of `weights` holds at a time."""
    block = max(triton.next_power_of_2(tokens), 256)
    return block, max(min(4096 // block, 32), 1)


def weights(exps: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor, ridge: float) -> torch.Tensor:
    """Run `Steps.weights` in one launch."""
    found = torch.empty((*exps.shape[:-1], 1), dtype=torch.float32, device=exps.device)
    tokens, queries = exps.shape[-2:]
    block, tile = weights_tile(tokens)
    weights_kernel[(found[..., 0, 0].numel(),)](
        exps.contiguous(),
        whole,
        lost,
        found,
        ridge,
        tokens,
        QUERIES=queries,
        BLOCK=block,
        TILE=tile,
        num_warps=4,
    )
    return found


@triton.jit
def feed_back_kernel(
    units_ptr,
    factor_ptr,
    codes_ptr,
    errors_ptr,
    count,
    width,
    BITS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    HALF: tl.constexpr = 2 ** (BITS - 1)
    own = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (column < width)[None, :]
    rows = tl.arange(0, _NUMBERS)
    factor_at = factor_ptr + own * count * count
    errors_at = errors_ptr + own * count * width + column[None, :]
    for first in range(0, count, _NUMBERS):
        number = first + rows
        real = number < count
        mask = real[:, None] & inside
        at = (own * count + number)[:, None] * width + column[None, :]
        units = tl.load(units_ptr + at, mask=mask, other=0.0)
        targets = units
        for before in range(0, first, _NUMBERS):
            earlier = (before + rows)[:, None]
            factor = tl.load(factor_at + earlier * count + number[None, :], mask=real[None, :], other=0.0)
            errors = tl.load(errors_at + earlier * width, mask=inside, other=0.0)
            targets += tl.dot(tl.trans(factor), errors, input_precision="ieee")
        codes, errors = tl.zeros_like(units), tl.zeros_like(units)
        for step in range(_NUMBERS):
            this = (rows == step)[:, None]
            code = tl.floor(tl.sum(tl.where(this, targets, 0.0), axis=0))
            code = tl.minimum(tl.maximum(code, -HALF), HALF - 1)
            error = tl.sum(tl.where(this, units, 0.0), axis=0) - code - 0.5
            factor = tl.load(factor_at + (first + step) * count + number, mask=real & (first + step < count), other=0.0)
            targets += factor[:, None] * error[None, :]
            codes = tl.where(this, code[None, :], codes)
            errors = tl.where(this, error[None, :], errors)
        tl.store(codes_ptr + at, codes.to(tl.int8), mask=mask)
        tl.store(errors_at + number[:, None] * width, errors, mask=mask)
        # The next numbers read the errors of other threads.
        tl.debug_barrier()


def feed_back(units: torch.Tensor, factor: torch.Tensor, bits: int) -> torch.Tensor:
    """Run `Steps.feed_back` in one launch."""
    units = units.contiguous()
    numbers, width = units.shape[-2:]
    codes, errors = torch.empty_like(units, dtype=torch.int8), torch.empty_like(units)
    feed_back_kernel[(units[..., 0, 0].numel(), triton.cdiv(width, ROUNDED_COLUMNS))](
        units,
        factor.contiguous(),
        codes,
        errors,
        numbers,
        width,
        BITS=bits,
        BLOCK_W=ROUNDED_COLUMNS,
        num_warps=4,
    )
    return codes
