"""Verification of drafts on CPUs with SGLang's own pool, which SGLang's torch attention does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch.nn.functional import scaled_dot_product_attention

from sgl_ragged.serve.sglang_pools import KVWriteLoc


def with_verification(original: Callable) -> Callable:
    """Extend `TorchNativeAttnBackend.forward_extend` by batches of drafts."""

    def forward_extend(
        backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any, *args: Any, **more: Any
    ) -> torch.Tensor:
        if not batch.forward_mode.is_target_verify():
            return original(backend, q, k, v, layer, batch, *args, **more)
        assert layer.sliding_window_size is None or layer.sliding_window_size < 0, "windows are not verified"
        pool = backend.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
        width = batch.spec_info.draft_token_num
        queries = q.view(-1, width, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        table, masks = backend.req_to_token_pool.req_to_token, drafts_seen(batch.spec_info, len(queries), width)
        output = torch.empty_like(q)
        of_requests = output.view(-1, width, layer.tp_q_head_num, layer.v_head_dim)
        rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist()
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            tokens = table[row, : length + width]
            seen = torch.cat([masks.new_ones(width, length), masks[index]], dim=1)
            found = scaled_dot_product_attention(
                queries[index][None],
                keys[tokens].transpose(0, 1)[None].to(q.dtype),
                values[tokens].transpose(0, 1)[None].to(q.dtype),
                attn_mask=seen,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            of_requests[index] = found[0].transpose(0, 1)
        return output

    return forward_extend


def drafts_seen(verify_input: Any, requests: int, width: int) -> torch.Tensor:
    """Return masks among the drafts of each request, bool [requests, width, width]; a model's drafts are chains."""
    if isinstance(verify_input, NgramVerifyInput):
        return verify_input.custom_mask.view(requests, width, width).bool()
    return torch.ones(width, width, dtype=torch.bool).tril().expand(requests, -1, -1)
