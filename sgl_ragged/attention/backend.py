"""The SGLang attention backend: one class, operations behind it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_ragged.attention import torch_ops
from sgl_ragged.attention.batch import DecodeBatch, ExtendBatch, decode_batch, extend_batch
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.pool import RaggedTokenToKVPool
from sgl_ragged.mem_pool.slab_store import PendingSeal


class RaggedAttnBackend(AttentionBackend):
    """Attention over slabs and tails (design section 3).

    Owns no memory: the pool's store holds slabs and tails, SGLang's request table says which are whose.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, RaggedTokenToKVPool):
            raise RaggedConfigError(f"the ragged attention backend needs the ragged pool, got {type(pool).__name__}")
        _refuse_layers(model_runner.model, pool.plan.layout.num_layers)
        self.store = pool.store
        self.segment = pool.page_size
        self.first_layer = pool.start_layer
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.forward_metadata: DecodeBatch | ExtendBatch | None = None

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        # Slots are read from the request table before the forward pass, but tails are read in every layer.
        return SharedReadEnds.POST_REPLAY

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Seal what the last decode step filled, then describe this batch."""
        self.store.flush_seals()
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
        elif mode.is_decode():
            self.forward_metadata = decode_batch(
                self.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.seq_lens_cpu,
                self.segment,
            )
            self._defer_full_segments(forward_batch)
        else:
            self.forward_metadata = extend_batch(
                self.req_to_token,
                forward_batch.req_pool_indices.tolist(),
                list(forward_batch.extend_prefix_lens_cpu),
                list(forward_batch.extend_seq_lens_cpu),
                self.segment,
            )

    def _defer_full_segments(self, forward_batch: ForwardBatch) -> None:
        """Note the segments that this decode step completes."""
        lengths = forward_batch.seq_lens_cpu.tolist()
        full = [index for index, length in enumerate(lengths) if length % self.segment == 0]
        if not full:
            return
        rows = forward_batch.req_pool_indices[full].tolist()
        for row, index in zip(rows, full, strict=True):
            first_token = lengths[index] - self.segment
            slot = int(self.req_to_token[row, first_token]) // self.segment
            self.store.defer_seal(PendingSeal(row=row, slot=slot, segment_index=first_token // self.segment))

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attention of a chunk; q is [tokens, query heads * head_dim], k and v [tokens, heads, head_dim]."""
        return self._forward(torch_ops.extend, q, k, v, layer)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Attention of one token per request; shapes as in `forward_extend`."""
        return self._forward(torch_ops.decode, q, k, v, layer)

    def _forward(
        self, operation: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention
    ) -> torch.Tensor:
        heads, dim = layer.tp_k_head_num, layer.head_dim
        output = operation(
            self.store,
            layer.layer_id - self.first_layer,
            q.reshape(-1, heads, layer.tp_q_head_num // heads, dim),
            k.reshape(-1, heads, dim),
            v.reshape(-1, heads, dim),
            self.forward_metadata,
            layer.scaling,
        )
        return output.reshape(-1, layer.tp_q_head_num * dim)


def _refuse_layers(model: torch.nn.Module, num_layers: int) -> None:
    """Raise RaggedConfigError for attention that the operations do not compute."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if len({module.layer_id for module in layers}) != len(layers) or len(layers) != num_layers:
        raise RaggedConfigError(
            f"the model has {len(layers)} attention modules for {num_layers} layers of keys and values (layers that "
            f"share them?), which --kv-pool ragged does not support; use --kv-pool token"
        )
    for module in layers:
        reasons = (
            (module.logit_cap > 0, "logit capping"),
            (module.sliding_window_size > 0, "a sliding window"),
            (module.is_cross_attention, "cross-attention"),
            (module.attn_type != AttentionType.DECODER, "non-causal attention"),
            (module.xai_temperature_len > 0, "a temperature per position"),
            (module.qk_head_dim != module.v_head_dim, "different key and value dimensions"),
        )
        found = [reason for applies, reason in reasons if applies]
        if found:
            raise RaggedConfigError(
                f"layer {module.layer_id} uses {', '.join(found)}, which --kv-pool ragged does not support; "
                f"use --kv-pool token"
            )
