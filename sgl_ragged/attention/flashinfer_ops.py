"""The FlashInfer operations: decode over the slabs by FlashInfer, everything else by Triton.

The heads of a band keep n tokens of every sealed segment, side by side in the slab, which is a paged KV cache as
FlashInfer knows it: slots are pages, n is the page size, the slab is the page stride. One call per band attends to the
sealed segments; our own decode kernel attends to the tail; the two are merged by their log-sum-exp. docs/kernels.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from sgl_ragged.attention.cta_map import build_cta_map
from sgl_ragged.attention.kernels.append import Newest
from sgl_ragged.attention.merge import merge_states
from sgl_ragged.attention.triton_ops import TritonDecodeBatch, TritonOps
from sgl_ragged.attention.view import DecodeView, seen_segments
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import Band
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.transfer import to_device

HEAD_DIMS = (64, 128, 256)
"""Head dimensions that both FlashInfer's decode kernels and the Triton kernels take."""

FLOAT_WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommendation. Shared by all plans: calls run one after the other."""

INT_WORKSPACE_BYTES = 1 << 20
"""A plan's tables, on the device and again in pinned memory: tens of bytes per request or CTA. FlashInfer's own 8 MiB
would add up over the plans."""

TENSOR_CORE_GROUP = 4
"""Query heads per head from which tensor cores pay off. They take any number; the other kernel takes all below."""


class DecodeWrapper(Protocol):
    """The used part of `flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None: ...

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kwargs: Any,
    ) -> None: ...

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, return_lse: bool) -> Any: ...


@dataclass(frozen=True)
class FlashInferDecodeBatch(TritonDecodeBatch):
    """Description for Triton with another view for the kernel, which attends to open segments alone.

    open_view: the view without sealed segments.
    sealed: int64 [requests with a sealed segment], their numbers in the batch, ascending.
    """

    open_view: DecodeView
    sealed: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """Properties by which bands of any layer share a plan and its wrapper."""

    kept: int
    heads: int
    scale: float


@dataclass(frozen=True)
class _LayerCalls:
    """Calls of one layer, in band order.

    order: int64 [heads], head numbers in band order. back: int64 [heads], its inverse.
    """

    order: torch.Tensor
    back: torch.Tensor
    bands: tuple[Band, ...]
    wrappers: tuple[DecodeWrapper, ...]


class FlashInferOps(TritonOps):
    """Operations (`operations.Operations`) that decode by FlashInfer.

    Plans are made on the host in every decode step, from the lengths that the host knows, and without waiting for what
    the device is computing.

    Args:
        max_batch, max_segments, in_view: as for `TritonOps`.
        make_wrapper: called as `flashinfer.BatchDecodeWithPagedKVCacheWrapper` is, which it defaults to.

    Raises:
        RaggedConfigError: no CUDA device, no FlashInfer, it cannot build its kernels, or it has none for these heads.
    """

    captures_graphs = False
    adds_sinks = False

    def __init__(
        self,
        store: SlabStore,
        max_batch: int,
        max_segments: int,
        make_wrapper: Callable[..., DecodeWrapper] | None = None,
        in_view: torch.Tensor | None = None,
    ) -> None:
        layout, device = store.layout, store.slabs.device
        _check_supported(layout.head_dim, store.slabs.dtype)
        if make_wrapper is None:
            make_wrapper = flashinfer_wrapper(device)
        # One CTA per head: of the kernel's rows only the tail is left.
        super().__init__(store, build_cta_map(layout.kept, 1, [1], "none"), max_batch, max_segments, in_view=in_view)
        workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Plan, DecodeWrapper] = {}
        for layer, bands in enumerate(layout.bands):
            for band in bands:
                plan = self._plan_of(layer, band)
                if plan not in self._wrappers:
                    wrapper = make_wrapper(
                        workspace,
                        kv_layout="HND",
                        use_tensor_cores=store.q_per_kv >= TENSOR_CORE_GROUP,
                        backend="fa2",
                    )
                    tables = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
                    wrapper.reset_workspace_buffer(workspace, tables)
                    self._wrappers[plan] = wrapper
        self._calls = [self._layer_calls(layer, bands) for layer, bands in enumerate(layout.bands)]
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None
        try:
            # Builds FlashInfer's kernels now, not while the first request waits.
            self._make_plans(self._view.slots[:1], np.zeros(1, np.int64), np.ones(1, np.int64))
        except Exception as error:
            raise RaggedConfigError(
                f"FlashInfer cannot build or plan its decode kernels ({_first_line(error)}); it needs nvcc and ninja, "
                f"or the package flashinfer-jit-cache; or use --ragged-kernel triton"
            ) from error

    def _plan_of(self, layer: int, band: Band) -> _Plan:
        return _Plan(band.kept, len(band.heads), self.store.softmax_scales[layer])

    def _layer_calls(self, layer: int, bands: Sequence[Band]) -> _LayerCalls:
        order = torch.cat([self.store.band_heads(layer, index) for index in range(len(bands))])
        wrappers = tuple(self._wrappers[self._plan_of(layer, band)] for band in bands)
        return _LayerCalls(order=order, back=order.argsort(), bands=tuple(bands), wrappers=wrappers)

    def describe_decode(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> FlashInferDecodeBatch:
        """Describe a decode batch as in `Operations`; replaces the plans of the previous description."""
        batch = super().describe_decode(req_to_token, rows, seq_lens, seq_lens_cpu)
        open_view = replace(batch.view, seen=torch.zeros_like(batch.view.seen))
        segments = seen_segments(seq_lens_cpu, self.store.layout.segment, self.in_view)
        # FlashInfer needs at least one entry per request: requests without a sealed segment are left out.
        sealed = np.flatnonzero(segments)
        planned = self._make_plans(batch.view.slots, sealed, segments[sealed])
        return FlashInferDecodeBatch(batch.view, batch.work, open_view, planned)

    def _make_plans(self, slots: torch.Tensor, sealed: np.ndarray, segments: np.ndarray) -> torch.Tensor:
        """Plan every kind of band for these requests, if any.

        Args:
            slots: int32 [batch, most segments], on the device.
            sealed: int64 [sealed], requests. segments: int64 [sealed], how many of their slots count, at least 1.

        Returns:
            `sealed` on the device, int64.
        """
        if len(sealed) == 0:
            return torch.empty(0, dtype=torch.int64, device=slots.device)
        device, layout = slots.device, self.store.layout
        if self._uploaded is not None:
            # The wrappers' pinned tables are overwritten. Their contents were sent before the last step began, so
            # this has long happened.
            self._uploaded.synchronize()
        ends = np.cumsum(segments)
        indptr = _pinned(torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)), device)
        first = sealed * slots.shape[1] - (ends - segments)
        entries, on_device = to_device([np.repeat(first, segments) + np.arange(ends[-1]), sealed], device)
        indices = slots.flatten().index_select(0, entries)
        dtype = self.store.slabs.dtype
        for plan, wrapper in self._wrappers.items():
            wrapper.plan(
                indptr,
                indices,
                _pinned(torch.full((len(sealed),), plan.kept, dtype=torch.int32), device),
                num_qo_heads=plan.heads * self.store.q_per_kv,
                num_kv_heads=plan.heads,
                head_dim=layout.head_dim,
                page_size=plan.kept,
                q_data_type=dtype,
                kv_data_type=dtype,
                sm_scale=plan.scale,
                non_blocking=True,
            )
        if self._uploaded is not None:
            self._uploaded.record()
        return on_device.long()

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        newest: Newest,
        batch: TritonDecodeBatch,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert lse is None, "split heads are refused with FlashInfer"
        assert sinks is None, "they are added to the output, where there are any"
        assert isinstance(batch, FlashInferDecodeBatch)
        self.attend_parts(layer, queries, newest, batch.open_view, batch.work[layer])
        # With one CTA per head, parts are heads.
        tails = self._partial[: queries.numel()].view(queries.shape)
        tail_lse = self._lse[: tails[..., 0].numel()].view(queries.shape[:-1])
        if len(batch.sealed) == len(queries):
            past, past_lse = self._attend_sealed(layer, queries)
        else:
            past, past_lse = torch.zeros_like(tails), torch.full_like(tail_lse, -torch.inf)
            if len(batch.sealed):
                outputs, lse = self._attend_sealed(layer, queries.index_select(0, batch.sealed))
                past.index_copy_(0, batch.sealed, outputs.float())
                past_lse.index_copy_(0, batch.sealed, lse)
        output, _ = merge_states(tails, tail_lse, past, past_lse)
        return output.to(queries.dtype)

    def _attend_sealed(self, layer: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention over the sealed segments of the planned requests.

        Args:
            queries: [sealed, heads, q_per_kv, d].

        Returns:
            Outputs, in the cache's dtype and the shape of the queries, and natural log-sum-exps, float32.
        """
        calls = self._calls[layer]
        per_head = self.store.q_per_kv
        queries = queries.index_select(1, calls.order).to(self.store.slabs.dtype)
        outputs, lses, first = [], [], 0
        for band, wrapper in zip(calls.bands, calls.wrappers, strict=True):
            last = first + len(band.heads)
            keys, values = self.store.band_view(layer, band).unbind(2)
            output, lse = wrapper.run(queries[:, first:last].flatten(1, 2), (keys, values), return_lse=True)
            outputs.append(output.unflatten(1, (-1, per_head)))
            lses.append(lse.unflatten(1, (-1, per_head)))
            first = last
        # FlashInfer's logarithms are to base 2.
        lse = torch.cat(lses, dim=1).index_select(1, calls.back) * math.log(2)
        return torch.cat(outputs, dim=1).index_select(1, calls.back), lse


def flashinfer_wrapper(device: torch.device) -> Callable[..., DecodeWrapper]:
    """Return FlashInfer's wrapper class for a device. Raises RaggedConfigError if it is missing."""
    if device.type != "cuda":
        raise RaggedConfigError(
            f"--ragged-kernel flashinfer needs a CUDA device, not {device.type}; use --ragged-kernel auto"
        )
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    # Packages of different versions make FlashInfer raise RuntimeError.
    except (ImportError, OSError, RuntimeError) as error:
        raise RaggedConfigError(
            f"--ragged-kernel flashinfer cannot import FlashInfer ({_first_line(error)}); install flashinfer-python, "
            f"or use --ragged-kernel triton"
        ) from error
    return BatchDecodeWithPagedKVCacheWrapper


def _check_supported(head_dim: int, dtype: torch.dtype) -> None:
    """Raise RaggedConfigError for heads that FlashInfer's decode kernels cannot take."""
    if head_dim not in HEAD_DIMS:
        raise RaggedConfigError(
            f"--ragged-kernel flashinfer takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {head_dim}; use "
            f"--ragged-kernel triton"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise RaggedConfigError(
            f"--ragged-kernel flashinfer takes a KV cache of float16 or bfloat16, not {dtype}; use --ragged-kernel "
            f"triton"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pin a tensor, so that the device copies it while the host goes on."""
    return host.pin_memory() if device.type == "cuda" else host
