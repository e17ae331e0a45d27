"""Retrieval after attention: pivots watch, and satellites attend to their overlays."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_ragged.features.retrieval.retriever import Retriever


class Watching:
    """Epilogue (`attention.epilogue.Epilogue`) that calls a retriever."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    def describe(self, batch: ForwardBatch) -> None:
        # The batch has rows on the device alone, and the copy that SGLang makes to replay a graph has no request ids.
        req_pool_indices = self._retriever.running
        if batch.forward_mode.is_decode():
            self._retriever.describe_decode(req_pool_indices, batch.seq_lens_cpu[: len(req_pool_indices)].tolist())
            return
        # A padded batch has more prefixes and lengths than requests.
        padded = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        prefixes, lengths = (list(one)[: len(req_pool_indices)] for one in padded)
        self._retriever.describe_extend(req_pool_indices, prefixes, lengths)

    def needed(self, layer: int) -> bool:
        return self._retriever.involves(layer)

    def apply(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        if batch.forward_mode.is_decode():
            req_pool_indices, positions = batch.req_pool_indices.long(), batch.seq_lens.long() - 1
            self._retriever.after_decode(layer, queries, output, lse, req_pool_indices, positions)
        else:
            self._retriever.after_extend(layer, queries, output, lse)
        return output
