"""Attention of sliding-window layers, whose keys and values are in SGLang's pool for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_ragged.attention.kernel_choice import PREFILL_IN_TORCH
from sgl_ragged.attention.sinks import with_sinks
from sgl_ragged.mem_pool.kv_dtype import KvScales, is_fp8, to_fp8
from sgl_ragged.serve.sglang_pools import KVWriteLoc


def window_backend(model_runner: Any, kernel: str) -> AttentionBackend:
    """Return the backend of sliding-window layers: SGLang's Triton backend, or torch where prefill is in torch."""
    if kernel in PREFILL_IN_TORCH:
        return TorchWindowBackend(model_runner)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = TritonAttnBackend(model_runner)
    # In SGLang's prefill a query sees `sliding_window_size` tokens before it, in decode one fewer. Keys that decode
    # writes would then differ from those of the same tokens in a prompt, and a cache hit from a miss.
    backend.sliding_window_size += 1
    return backend


@dataclass(frozen=True)
class _Chunk:
    """New tokens of one request, and the tokens that they can see.

    tokens: positions of the new tokens in the batch.
    first: position in the sequence of the first token that is read.
    start: position in the sequence of the first new token.
    locations: int64 [tokens read], locations in the pool of windowed layers.
    """

    tokens: slice
    first: int
    start: int
    locations: torch.Tensor

    def mask(self, window: int) -> torch.Tensor:
        """Return the mask, bool [new tokens, tokens read]: each token and up to `window` tokens before it."""
        device = self.locations.device
        asking = torch.arange(self.start, self.start + self.tokens.stop - self.tokens.start, device=device)[:, None]
        seen = torch.arange(self.first, self.first + len(self.locations), device=device)
        return (seen <= asking) & (seen >= asking - window)


class TorchWindowBackend(AttentionBackend):
    """Backend in plain torch, one request at a time: for CPUs, and as an oracle.

    SGLang's own torch backend reads its pools by full locations and knows no sinks.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._pool = model_runner.token_to_kv_pool
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        every = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        layers = [layer for layer in every if layer.sliding_window_size > 0]
        self._longest = max(layer.sliding_window_size for layer in layers)
        self._scales: dict[int, KvScales] = {}
        self.windowed = layers if is_fp8(self._pool.dtype) else []

    def use_scales(self, scales: Sequence[KvScales]) -> None:
        """Set FP8 scales of the layers in `windowed`; called before the first token is stored."""
        self._scales = dict(zip((layer.layer_id for layer in self.windowed), scales, strict=True))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_idle():
            self._chunks: list[_Chunk] = []
            return
        ends = forward_batch.seq_lens_cpu.tolist()
        decoding = forward_batch.forward_mode.is_decode()
        lengths = [1] * len(ends) if decoding else list(forward_batch.extend_seq_lens_cpu)
        self._written = self._pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        self._chunks, at = [], 0
        for row, end, length in zip(forward_batch.req_pool_indices.tolist(), ends, lengths, strict=True):
            first = max(end - length - self._longest, 0)
            locations = self._pool.translate_loc_from_full_to_swa(self._req_to_token[row, first:end].long())
            self._chunks.append(_Chunk(slice(at, at + length), first, end - length, locations))
            at += length

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.init_forward_metadata(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new tokens and attend; q is [tokens, query heads * head_dim], k and v [tokens, heads, head_dim].

        sinks: [query heads], or None.
        """
        heads, dim = layer.tp_k_head_num, layer.head_dim
        queries = q.reshape(-1, heads, layer.tp_q_head_num // heads, dim)
        # Batches may be padded after their last token.
        new = slice(0, len(self._written))
        k, v = (part.reshape(-1, heads, dim)[new] for part in (k, v))
        scales = self._scales.get(layer.layer_id, KvScales())
        if self._scales:
            k, v = to_fp8(k, scales.keys, self._pool.dtype), to_fp8(v, scales.values, self._pool.dtype)
        self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self._written), k, v)
        cached = self._pool.get_kv_buffer(layer.layer_id)
        output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for chunk in self._chunks:
            keys, values = (part[chunk.locations].transpose(0, 1)[:, None].float() for part in cached)
            asking = queries[chunk.tokens].permute(1, 2, 0, 3).float()
            logits = asking @ keys.transpose(-1, -2) * (layer.scaling * scales.keys)
            logits.masked_fill_(~chunk.mask(layer.sliding_window_size), -torch.inf)
            attended = (logits.softmax(dim=-1) @ values).permute(2, 0, 1, 3) * scales.values
            if sinks is not None:
                attended = with_sinks(attended, logits.logsumexp(dim=-1).permute(2, 0, 1), sinks)
            output[chunk.tokens] = attended.to(output.dtype)
        return output.flatten(1)

    forward_decode = forward_extend
