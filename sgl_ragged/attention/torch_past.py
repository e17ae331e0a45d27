"""Sealed segments for decode in torch, in numbers or codes: logits with their keys, sums of their values.

Codes are multiplied as they are: scales go into logits and weights, which are head_dim times fewer, queries are rotated
once, or once per segment where keys are centred, and the rotation of the values is undone once, in the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sgl_ragged.mem_pool.quantise import QuantisedRows, rotation_matrix


class Past(ABC):
    """Kept rows of `entries` segments of a band; each segment's heads are one row of a batched product.

    kept: rows of each head and segment.
    """

    entries: int
    kept: int

    @abstractmethod
    def asking(self, queries: torch.Tensor) -> torch.Tensor:
        """Prepare queries [..., d] for `logits`."""

    @abstractmethod
    def logits(self, queries: torch.Tensor) -> torch.Tensor:
        """Return logits [entries * heads, q_per_kv, kept] of queries [entries * heads, q_per_kv, d]."""

    @abstractmethod
    def sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Return values times weights, [entries * heads, q_per_kv, d]. May change the weights."""

    @abstractmethod
    def answer(self, sums: torch.Tensor) -> torch.Tensor:
        """Return outputs for sums [..., d] over segments."""


class WidePast(Past):
    """Rows in numbers: keys and values [entries, heads, kept, d]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.entries, _, self.kept, _ = keys.shape
        self._keys, self._values = (rows.float().flatten(0, 1) for rows in (keys, values))

    def asking(self, queries: torch.Tensor) -> torch.Tensor:
        return queries

    def logits(self, queries: torch.Tensor) -> torch.Tensor:
        return torch.bmm(queries, self._keys.transpose(1, 2))

    def sums(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights, self._values)

    def answer(self, sums: torch.Tensor) -> torch.Tensor:
        return sums


class QuantisedPast(Past):
    """Rows in codes."""

    def __init__(self, rows: QuantisedRows) -> None:
        self.entries, self.kept = rows.scales.shape[0], rows.scales.shape[2]
        (self._keys, self._key_scales), (self._values, self._value_scales) = (
            (codes.flatten(0, 1), scales.flatten(0, 1)[:, None])
            for codes, scales in (rows.rotated_keys(), rows.rotated_values())
        )

    def asking(self, queries: torch.Tensor) -> torch.Tensor:
        return queries @ rotation_matrix(queries.shape[-1], queries.device)

    def logits(self, queries: torch.Tensor) -> torch.Tensor:
        return torch.bmm(queries, self._keys.transpose(1, 2)).mul_(self._key_scales)

    def sums(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights.mul_(self._value_scales), self._values)

    def answer(self, sums: torch.Tensor) -> torch.Tensor:
        return sums @ rotation_matrix(sums.shape[-1], sums.device)


class CentredPast(QuantisedPast):
    """Rows in codes of keys in units of their segment's spread; where scales are positive, less its mean."""

    def __init__(self, rows: QuantisedRows) -> None:
        super().__init__(rows)
        assert rows.moments is not None, "the format's keys are centred"
        # [entries * heads, d, 1] and [entries * heads, 1, d]
        mean, spread = rows.moments.flatten(0, 1).float().unbind(1)
        self._mean, self._spread = mean[:, :, None], spread[:, None]
        self._centred = (self._key_scales > 0).float()
        self._key_scales = self._key_scales.abs()

    def asking(self, queries: torch.Tensor) -> torch.Tensor:
        return queries

    def logits(self, queries: torch.Tensor) -> torch.Tensor:
        of_mean = torch.bmm(queries, self._mean)
        return super().logits(super().asking(queries * self._spread)).addcmul_(of_mean, self._centred)


def past_of(rows: torch.Tensor | QuantisedRows) -> Past:
    """Make rows from the result of `SlabStore.gather`."""
    if not isinstance(rows, QuantisedRows):
        return WidePast(*rows.unbind(2))
    return QuantisedPast(rows) if rows.moments is None else CentredPast(rows)
