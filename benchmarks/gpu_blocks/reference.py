"""What attention must give, in float64 on the device, and whether seals kept the right tokens.

Tokens that were kept are found by comparing slabs with what went in, so that a tie in the scores, broken one way in
float32 and the other in float64, is no error; whether they are the best-scored is checked for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_ragged.mem_pool.quantise import QuantisedRows, stored_rows
from sgl_ragged.mem_pool.slab_format import SlabFormat
from sgl_ragged.profiles.budgets import GUARD, SINKS

SCORE_TOLERANCE = 1e-4
"""How far float32 scores may be from float64 ones, in units of the largest score."""


@dataclass(frozen=True)
class Tokens:
    """One sequence in the dtype of the cache: q [T, layers, heads, q_per_kv, d]; k, v [T, layers, heads, d]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(
        cls, length: int, layers: int, heads: int, per_head: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> Tokens:
        shape = (length, layers, heads)
        q = torch.randn((*shape, per_head, dim), device=device)
        k, v = torch.randn((2, *shape, dim), device=device)
        return cls(q.to(dtype), k.to(dtype), v.to(dtype))


def scores(scorer: str, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float64 [S] of one head's segment; keys, values [S, d]."""
    keys, values = keys.double(), values.double()
    if scorer == "keydiff":
        unit = keys / keys.norm(dim=-1, keepdim=True)
        anchor = unit.mean(0)
        return -(unit @ anchor) / anchor.norm()
    if scorer == "key_norm":
        return -keys.norm(dim=-1)
    if scorer == "value_key_norm":
        return values.norm(dim=-1) / keys.norm(dim=-1)
    raise ValueError(scorer)


def rows_of(slab: torch.Tensor, kept: int, head_dim: int, form: SlabFormat) -> torch.Tensor:
    """int32 [n, words]: the bits of each of the rows in a head's part of a slab."""
    if form.quantised:
        rows = QuantisedRows.of(slab, kept, head_dim, form)
        return torch.cat([*rows.keys, *rows.values, rows.scales.view(torch.uint8)], dim=1).view(torch.int32)
    return _bits(*slab.view(2, kept, head_dim))


def rows_to_store(keys: torch.Tensor, values: torch.Tensor, form: SlabFormat) -> torch.Tensor:
    """What `rows_of` must find of tokens [S, d], as the cache holds them."""
    if form.quantised:
        return rows_of(stored_rows(keys, values, form), *keys.shape, form)
    return _bits(keys, values)


def _bits(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.contiguous().view(torch.uint8) for x in (keys, values)], dim=1).view(torch.int32)


def kept_positions(
    slab: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scorer: str, first: bool
) -> tuple[torch.Tensor | None, str]:
    """Positions that a head kept of a segment, int64 [n] ascending, and what is wrong with them, "" if nothing.

    Args:
        slab, rows: int32 [n, words], [S, words], `rows_of` the slab and `rows_to_store` of the segment.
        keys, values: [S, d], the segment in numbers.
        first: whether the segment starts its sequence.
    """
    segment, kept = len(keys), len(slab)
    same = (slab[:, None] == rows[None]).all(-1)
    if not (same.sum(1) == 1).all():
        return None, "a row of the slab is no token of the segment"
    positions = same.int().argmax(1)
    if not (positions[1:] > positions[:-1]).all():
        return None, "rows of the slab are not in order"
    sinks = list(range(SINKS)) if first else []
    forced = (sinks + list(range(segment - 1, segment - 1 - GUARD, -1)))[:kept]
    chosen = torch.zeros(segment, dtype=torch.bool, device=keys.device)
    chosen[positions] = True
    if not chosen[forced].all():
        return positions, "sinks or guard are missing"
    ranking = scores(scorer, keys, values)
    others = torch.ones_like(chosen)
    others[forced] = False
    worst_in, best_out = ranking[chosen & others], ranking[~chosen & others]
    if len(worst_in) and len(best_out):
        excess = float(best_out.max() - worst_in.min())
        if not excess <= SCORE_TOLERANCE * float(ranking.abs().max()):
            return positions, f"a token with a score {excess:.2g} better was dropped"
    return positions, ""


Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [T, d] of one head, in numbers."""


def past_rows(keys: torch.Tensor, values: torch.Tensor, form: SlabFormat) -> Rows:
    """Keys and values [T, d] as slabs give them back."""
    if not form.quantised:
        return keys, values
    return QuantisedRows.of(stored_rows(keys, values, form), *keys.shape, form).restored()


def attention(
    queries: torch.Tensor, own: Rows, past: Rows, mask: torch.Tensor, scale: float, segment: int
) -> torch.Tensor:
    """float64 [T, q_per_kv, d]: one head's attention under a mask, bool [T, T]: which token each position may see.

    Args:
        queries: [T, q_per_kv, d].
        own, past: rows of all tokens as queries of their segment see them, and as those of later ones do.
    """
    queries = queries.double()
    (own_keys, own_values), (past_keys, past_values) = ((k.double(), v.double()) for k, v in (own, past))
    same = _same_segment(len(mask), segment, mask.device)
    output = torch.empty_like(queries)
    for query_head in range(queries.shape[1]):
        query = queries[:, query_head]
        logits = torch.where(same, query @ own_keys.T, query @ past_keys.T) * scale
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        output[:, query_head] = (weights * same) @ own_values + (weights * ~same) @ past_values
    return output


def _same_segment(length: int, segment: int, device: torch.device) -> torch.Tensor:
    """bool [T, T]."""
    place = torch.arange(length, device=device) // segment
    return place[:, None] == place


def visible(kept: dict[int, torch.Tensor], length: int, segment: int, device: torch.device) -> torch.Tensor:
    """bool [T, T]: own segment causally, and what was kept of each earlier one; `kept` by segment number."""
    place = torch.arange(length, device=device)
    mask = _same_segment(length, segment, device) & (place[None, :] <= place[:, None])
    for number, positions in kept.items():
        mask[(number + 1) * segment :, number * segment + positions] = True
    return mask


@dataclass(frozen=True)
class Errors:
    """Distance of an output from its reference: Euclidean over that of the reference, and largest element's.

    `bound` is what both have to keep, the latter in units of the reference's largest element if that is above 1.
    """

    relative: float
    largest: float
    reference_largest: float
    bound: float

    @classmethod
    def between(cls, output: torch.Tensor, reference: torch.Tensor, bound: float) -> Errors:
        difference = output.double() - reference
        return cls(
            relative=float(difference.norm() / reference.norm()),
            largest=float(difference.abs().max()),
            reference_largest=float(reference.abs().max()),
            bound=bound,
        )

    @property
    def passed(self) -> bool:
        """False for NaN."""
        return self.relative <= self.bound and self.largest <= self.bound * max(1.0, self.reference_largest)
