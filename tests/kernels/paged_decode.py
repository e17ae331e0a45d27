"""A stand-in for FlashInfer's decode wrapper: its documented contract in torch, and a check of what it is given."""

from __future__ import annotations

import math

import torch


class PagedDecode:
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper` as far as it is used, for HND caches on the CPU.

    plans: how often it was planned. runs: how often each of these was run.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_tensor_cores: bool, backend: str
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any(), "must be zero when first used"
        assert kv_layout == "HND"
        assert backend == "fa2"
        self.workspace = float_workspace_buffer
        self.use_tensor_cores = use_tensor_cores
        self.runs: list[int] = []

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer is self.workspace
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        non_blocking: bool,
    ) -> None:
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
            assert tensor.is_contiguous()
        assert indptr.device.type == last_page_len.device.type == "cpu", "anything else would wait for the device"
        counts = indptr.diff()
        assert indptr[0] == 0
        assert (counts > 0).all(), "a request without pages has no defined result"
        assert len(indices) == indptr[-1]
        assert len(last_page_len) == len(counts)
        assert (last_page_len == page_size).all(), "sealed segments are full pages"
        assert num_qo_heads % num_kv_heads == 0
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8, 16)
        assert head_dim in (64, 128, 256, 512)
        assert {q_data_type, kv_data_type} <= {torch.float16, torch.bfloat16}
        self.pages = indices.clone().long().split(counts.tolist())
        self.shape = (len(counts), num_qo_heads, head_dim)
        self.cache_shape = (num_kv_heads, page_size, head_dim)
        self.dtypes, self.scale = (q_data_type, kv_data_type), sm_scale
        self.runs.append(0)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype) == self.dtypes
        assert values.dtype == keys.dtype
        assert q.shape == self.shape
        assert q.stride()[1:] == (self.shape[2], 1)
        assert keys.shape == values.shape
        assert keys.shape[1:] == self.cache_shape
        assert keys.stride() == values.stride(), "one set of strides addresses both"
        assert keys.stride(3) == 1
        # Vector loads of 16 bytes.
        for tensor in (q, keys, values):
            assert tensor.storage_offset() * 2 % 16 == 0
            assert all(stride * 2 % 16 == 0 for stride in tensor.stride()[:-1])
        self.runs[-1] += 1
        group = self.shape[1] // self.cache_shape[0]
        outputs, lses = [], []
        for query, pages in zip(q.float(), self.pages, strict=True):
            # [pages, heads, n, d] to [heads, pages * n, d].
            own_keys, own_values = (cache[pages].transpose(0, 1).flatten(1, 2).float() for cache in (keys, values))
            logits = query.unflatten(0, (-1, group)) @ own_keys.transpose(1, 2) * self.scale
            outputs.append((logits.softmax(-1) @ own_values).flatten(0, 1))
            lses.append(logits.logsumexp(-1).flatten() / math.log(2))
        return torch.stack(outputs).to(q.dtype), torch.stack(lses)
