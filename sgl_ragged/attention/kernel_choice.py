"""Choose the attention operations by flag and device. Imports torch and Triton only where they are used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from sgl_ragged.errors import RaggedConfigError

if TYPE_CHECKING:
    import torch

    from sgl_ragged.attention.operations import Operations
    from sgl_ragged.mem_pool.layout import SlabLayout
    from sgl_ragged.mem_pool.slab_store import Sealer, SlabStore

KERNELS = ("auto", "torch", "numba", "triton", "flashinfer")

PREFILL_IN_TORCH = ("torch", "numba")
"""Operations that prefill and seal in torch, whatever decodes."""

INTERPRETED_CTAS = 16
"""CTAs that the CTA map hands out in Triton's interpreter, where there is no GPU to fill."""


def choose_kernel(asked: str, device: str) -> str:
    """Return one of KERNELS but auto, for one of them and a device type such as "cuda".

    Raises:
        RaggedConfigError: the device cannot run these kernels.
    """
    if asked == "auto":
        return {"cuda": "triton", "cpu": "numba"}.get(device, "torch")
    if asked == "numba" and device != "cpu":
        raise RaggedConfigError(f"--ragged-kernel numba needs a CPU, the device is {device}; use auto")
    if asked in PREFILL_IN_TORCH or device == "cuda":
        return asked
    # For tests: the interpreter runs Triton kernels on CPU tensors, a thousand times slower than a GPU.
    if asked == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return asked
    raise RaggedConfigError(f"--ragged-kernel {asked} needs an NVIDIA GPU, the device is {device}; use auto")


def check_cache(kernel: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Raise RaggedConfigError for an FP8 cache that a kernel cannot read.

    Args:
        kernel: from `choose_kernel`.
        dtype: of the cache.
        capability: compute capability of the device; None where it is no GPU.
    """
    import torch

    from sgl_ragged.mem_pool.kv_dtype import is_fp8

    if kernel == "flashinfer" and is_fp8(dtype):
        raise RaggedConfigError(
            "an FP8 KV cache is not supported with --ragged-kernel flashinfer; use --ragged-kernel triton"
        )
    if kernel == "triton" and dtype == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        raise RaggedConfigError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, and Triton converts fp8_e4m3 from 8.9 "
            f"on; use --kv-cache-dtype fp8_e5m2, or bfloat16"
        )


def device_capability(device: str) -> tuple[int, int] | None:
    """Return the compute capability of a device such as "cuda"; None if it is no GPU."""
    import torch

    return torch.cuda.get_device_capability(device) if device.startswith("cuda") else None


def make_sealer(kernel: str, layout: SlabLayout, device: str | torch.device) -> Sealer:
    """Make the sealer of a store: in torch or by Triton kernels.

    Args:
        kernel: from `choose_kernel`.
        layout: of the store.
        device: of the store.
    """
    if kernel in PREFILL_IN_TORCH:
        from sgl_ragged.mem_pool.slab_store import seal_in_torch

        return seal_in_torch
    import torch

    from sgl_ragged.attention.triton_seal import TritonSealer

    return TritonSealer(layout, torch.device(device))


def make_operations(
    kernel: str, store: SlabStore, max_segments: int, in_view: torch.Tensor | None = None
) -> Operations:
    """Make the operations for a store, as large as its rows allow.

    Args:
        kernel: from `choose_kernel`; the store's sealer must be of the same kernel (`make_sealer`).
        max_segments: most segments that a request sees.
        in_view: as in `Operations`.

    Raises:
        RaggedConfigError: the kernel cannot take heads of this shape or this cache, or FlashInfer is missing.
    """
    max_batch = store.tails.num_rows
    if store.fp8:
        check_cache(kernel, store.dtype, device_capability(str(store.slabs.device)))
    if kernel == "torch":
        from sgl_ragged.attention.torch_ops import TorchOps

        return TorchOps(store, in_view)
    if kernel == "numba":
        from sgl_ragged.attention.numba_ops import NumbaOps

        return NumbaOps(store, in_view)
    if kernel == "flashinfer":
        from sgl_ragged.attention.flashinfer_ops import FlashInferOps

        with_flashinfer = FlashInferOps(store, max_batch, max_segments, in_view=in_view)
        with_flashinfer.warm_up()
        return with_flashinfer
    from sgl_ragged.attention.cta_map import batch_buckets, build_cta_map
    from sgl_ragged.attention.triton_ops import TritonOps

    resident, chunk_ctas = _resident_ctas(store)
    # Heads that only other ranks store have a CTA, too: it finds no rows.
    cta_map = build_cta_map(np.maximum(store.layout.kept, 1), resident, batch_buckets(max_batch))
    operations = TritonOps(store, cta_map, max_batch, max_segments, chunk_ctas, in_view)
    operations.warm_up()
    return operations


def _resident_ctas(store: SlabStore) -> tuple[int, int]:
    """Return the CTAs of the decode and extend kernels that the store's device holds at once; compiles both."""
    device = store.slabs.device
    if device.type != "cuda":
        return INTERPRETED_CTAS, INTERPRETED_CTAS
    import torch

    from sgl_ragged.attention.cta_map import build_cta_map
    from sgl_ragged.attention.occupancy import resident_ctas
    from sgl_ragged.attention.triton_ops import TritonOps

    layout = store.layout
    trial = TritonOps(store, build_cta_map(np.maximum(layout.kept, 1), 1, [1], "none"), 1, 1)
    table = torch.zeros((1, layout.segment), dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    shape = (1, layout.num_heads, store.q_per_kv, layout.head_dim)
    queries = torch.zeros(shape, dtype=store.query_dtype, device=device)
    # A padded row of length 0, and a chunk of one token: there is nothing to read from slabs and tails.
    batch = trial.describe_decode(table, row, row, row.cpu())
    made_up = trial.made_up_inputs(1)
    newest = trial.newest(0, queries[:, :, 0], queries[:, :, 0], made_up)
    decode = trial.attend_parts(0, queries, newest, batch.view, batch.work[0])
    keys = queries[:, :, 0].to(store.dtype).contiguous()
    chunk = trial.describe_extend(table, row, [0], [1])
    extend = trial.attend_chunks(0, queries, keys, keys, chunk, torch.empty_like(queries))
    return resident_ctas(decode, device), resident_ctas(extend, device)
