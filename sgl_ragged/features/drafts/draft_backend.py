"""Attention of a draft model on CPUs: torch attention for each step, which SGLang lacks."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DraftStep(TorchNativeAttnBackend):
    """Attention of one step of drafting: queries see accepted tokens, and drafts up to this step."""

    def __init__(self, model_runner: Any, step: int) -> None:
        super().__init__(model_runner)
        self._drafts = step + 1

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        **more: Any,
    ) -> torch.Tensor:
        # While it drafts, SGLang leaves the lengths as they were before the first step.
        lengths = seq_lens + self._drafts
        cache = k_cache, v_cache, req_to_token
        return super()._run_sdpa_forward_decode(query, output, *cache, req_pool_indices, lengths, *args, **more)


class DraftSteps:
    """Backends of the steps of SGLang's draft worker, except for the last, which only samples."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, steps: int) -> None:
        self.attn_backends: list[AttentionBackend] = [DraftStep(model_runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
