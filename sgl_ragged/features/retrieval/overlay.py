"""Overlays: rows fetched for a running request, which its satellite heads attend to in addition to slabs and tail."""

from __future__ import annotations

import torch

from sgl_ragged.attention.merge import merge_states
from sgl_ragged.mem_pool.kv_dtype import movable
from sgl_ragged.mem_pool.transfer import sent


class Overlays:
    """One overlay per row of SGLang's request table and satellite head, at fixed addresses.

    `kv_rows`: [num_rows, satellites, most, 2 * head_dim], keys then values as the cache holds them. `counts`: int32
    [num_rows, satellites], number of valid rows; row 0, SGLang's padding row, has none.
    """

    def __init__(
        self, num_rows: int, satellites: int, most: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, because masked rows must be finite.
        self.kv_rows = torch.zeros((num_rows, satellites, most, 2 * head_dim), dtype=dtype, device=device)
        self.counts = torch.zeros((num_rows, satellites), dtype=torch.int32, device=device)

    def of(self, req_pool_indices: torch.Tensor, satellites: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows and counts of satellites for a batch, int64 [batch]."""
        fetched = movable(self.kv_rows)[:, satellites].index_select(0, req_pool_indices).view(self.kv_rows.dtype)
        return fetched, self.counts[:, satellites].index_select(0, req_pool_indices)

    @property
    def most(self) -> int:
        return self.kv_rows.shape[2]

    @property
    def nbytes(self) -> int:
        return self.kv_rows.nbytes + self.counts.nbytes

    def install(self, row: int, satellites: torch.Tensor | slice, kv_rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Replace overlays of satellites of a row; tensors on the host, as `Reservoir.gather` returns them."""
        device = self.kv_rows.device
        if isinstance(satellites, torch.Tensor):
            satellites = sent(satellites, device)
        movable(self.kv_rows)[row, satellites] = sent(movable(kv_rows), device)
        self.counts[row, satellites] = sent(counts, device)

    def clear(self, row: int) -> None:
        """Empty the overlays of a row's request."""
        self.counts[row] = 0


def attend_overlay(
    queries: torch.Tensor, kv_rows: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to overlays alone, in float32.

    Args:
        queries: [batch, heads, queries, head_dim].
        kv_rows: [batch, heads, most, 2 * head_dim]. counts: integers [batch, heads], number of valid rows.
        scale: what products of queries and keys are multiplied by.

    Returns:
        Outputs like `queries`, 0 where no row is valid, and their log-sum-exps [batch, heads, queries].
    """
    keys, values = kv_rows.float().chunk(2, dim=-1)
    logits = queries.float() @ keys.transpose(2, 3) * scale
    beyond = torch.arange(kv_rows.shape[2], device=kv_rows.device) >= counts[:, :, None]
    logits = logits.masked_fill(beyond[:, :, None], -torch.inf)
    lse = logits.logsumexp(dim=-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights @ values, lse


def add_overlay(
    output: torch.Tensor,
    lse: torch.Tensor,
    heads: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    value_scale: float | None,
) -> None:
    """Merge attention to overlays into attention to everything else, in place.

    Args:
        output: [tokens, heads, q_per_kv, head_dim]. lse: float32 [tokens, heads, q_per_kv].
        heads: int64 [satellites], which of the heads.
        attended, log_sums: [tokens, satellites, q_per_kv, head_dim], [tokens, satellites, q_per_kv].
        value_scale: what means of stored values are multiplied by; None where values are stored as they are.
    """
    if value_scale is not None:
        attended = attended * value_scale
    merged, sums = merge_states(output[:, heads], lse[:, heads], attended, log_sums)
    output[:, heads] = merged.to(output.dtype)
    lse[:, heads] = sums
