"""The attention backend of servers that retrieve what heads dropped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_ragged.attention.sinks import with_sinks
from sgl_ragged.plugin.backend import Heads, RaggedAttnBackend
from sgl_ragged.retrieval.retriever import Retriever


class RetrievingBackend(RaggedAttnBackend):
    """`RaggedAttnBackend` whose pivots watch, and whose satellites see what was fetched for them."""

    @property
    def retriever(self) -> Retriever:
        assert self.pool.retriever is not None, "this backend is chosen where there is one"
        return self.pool.retriever

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        self._tokens: tuple[torch.Tensor, torch.Tensor] | None = None
        if mode.is_decode() or mode.is_idle():
            return
        rows = self.retriever.running
        # A padded batch has more prefixes and lengths than requests.
        prefixes, lengths = (
            list(of_all)[: len(rows)]
            for of_all in (forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
        )
        self.retriever.describe_extend(rows, prefixes, lengths)

    def _describe_decode(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        super()._describe_decode(forward_batch, in_capture)
        if not in_capture:
            # The batch itself says rows on the device alone, and what SGLang makes of it to replay a graph no names.
            rows = self.retriever.running
            self.retriever.describe_decode(rows, forward_batch.seq_lens_cpu[: len(rows)].tolist())

    def _attend(
        self,
        operation: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Heads]:
        number = self.numbers[layer.layer_id]
        if not self.retriever.involves(number):
            return super()._attend(operation, q, k, v, layer, forward_batch, sinks)
        queries, keys, values, sides = heads = self._heads(q, k, v, layer)
        lse = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
        output = operation(number, queries, keys, values, self.forward_metadata, sides, lse)
        if forward_batch.forward_mode.is_decode():
            rows, positions = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long() - 1
            self.retriever.see_tokens(number, queries, output, lse, rows, positions)
        else:
            self.retriever.see_chunks(number, queries, output, lse)
        return (output if sinks is None else with_sinks(output, lse, sinks)).flatten(1), heads
