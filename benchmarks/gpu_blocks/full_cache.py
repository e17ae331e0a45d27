"""The baselines: attention over an uncompressed cache by torch and, where it can be imported, FlashInfer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_blocks.context import Context, Row, short_error

PAGE = 16
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Attend = Callable[[int], torch.Tensor]
"""Attention over the cache of one number, in the layout of the queries."""


class FullCache:
    """Keys and values of all tokens of a batch, `calls` times: [calls, 2 (K, V), batch, tokens, heads, d].

    Tokens are padded to whole pages, so that the same memory is a paged cache in FlashInfer's NHD layout. What torch
    is handed are views [batch, heads, length, d]: the layout that its kernels read without a copy.
    """

    def __init__(self, context: Context, calls: int, batch: int, length: int, heads: int, dim: int) -> None:
        padded = -(-length // PAGE) * PAGE
        self.calls, self.batch, self.length = calls, batch, length
        shape = (calls, 2, batch, padded, heads, dim)
        self.storage = torch.empty(shape, dtype=context.dtype, device=context.device).normal_()

    def views(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.storage[call, :, :, : self.length].transpose(2, 3)
        return keys, values

    def pages(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values [pages, PAGE, heads, d]; a request's pages follow each other."""
        keys, values = self.storage[call].flatten(1, 2).unflatten(1, (-1, PAGE))
        return keys, values


def decode_baselines(cache: FullCache, queries: torch.Tensor) -> dict[str, Attend]:
    """Ways to attend with queries [batch, heads, q_per_kv, d]; outputs like the queries.

    "packed" hands the query heads of a head over as so many query positions, which without a mask is the same.
    """
    flat = queries.flatten(1, 2)[:, :, None]

    def packed(backend: SDPBackend) -> Attend:
        def attend(call: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(queries, *cache.views(call))

        return attend

    def grouped(backend: SDPBackend) -> Attend:
        def attend(call: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                output = scaled_dot_product_attention(flat, *cache.views(call), enable_gqa=True)
            return output.view(queries.shape)

        return attend

    found: dict[str, Attend] = {}
    for name, backend in BACKENDS.items():
        found[f"torch {name} packed"] = packed(backend)
        found[f"torch {name} gqa"] = grouped(backend)
    return found


def extend_baselines(cache: FullCache, queries: torch.Tensor) -> dict[str, Attend]:
    """Ways to attend with queries [batch, query heads, chunk, d], the last tokens of the cache; outputs like them.

    "no mask" also computes the few pairs that a causal mask would leave out: torch's cuDNN call knows no mask that is
    aligned to the end, and the difference is half a chunk in the whole history.
    """
    mask = causal_lower_right(queries.shape[2], cache.length)

    def causal(call: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(queries, *cache.views(call), attn_mask=mask, enable_gqa=True)

    def unmasked(backend: SDPBackend) -> Attend:
        def attend(call: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(queries, *cache.views(call), enable_gqa=True)

        return attend

    found: dict[str, Attend] = {"torch flash causal": causal}
    for name, backend in BACKENDS.items():
        found[f"torch {name} no mask"] = unmasked(backend)
    return found


def distance(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Euclidean distance of two outputs over the norm of the second."""
    reference = reference.float()
    return float((output.float() - reference).norm() / reference.norm())


def working(
    found: dict[str, Attend], context: Context, tolerance: float | None = None
) -> tuple[dict[str, Attend], list[Row]]:
    """Those that run here, and for each how far its output is from the first one's: a baseline must be right, too.

    Args:
        tolerance: the largest such distance; beyond it a way to attend is out.

    Returns:
        The runnable ones and rows {"baseline", "difference" | "failed"}.
    """
    runs: dict[str, Attend] = {}
    rows: list[Row] = []
    first: torch.Tensor | None = None
    for name, attend in found.items():
        try:
            output = attend(0)
            if context.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # A baseline that this machine cannot run is a finding, not an end.
            rows.append({"baseline": name, "failed": short_error(error)})
            continue
        first = output if first is None else first
        difference = distance(output, first)
        if tolerance is not None and not difference <= tolerance:
            rows.append({"baseline": name, "failed": f"its output is {difference:.2g} away from that of the first"})
            continue
        rows.append({"baseline": name, "difference": difference})
        runs[name] = attend
    return runs, rows
