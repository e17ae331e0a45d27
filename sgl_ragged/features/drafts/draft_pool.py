"""Cache and attention of a draft model: SGLang's token pool, and torch attention for each step on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.draft_model import BACKENDS, DraftModel
from sgl_ragged.serve.pool import slab_pool


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


def build_draft_pool(model: DraftModel, configurator: Any, build: Callable[[], Any]) -> Any:
    """Build SGLang's own pool for the draft model, with tokens at the locations of the pool of slabs.

    Copies of open segments copy the draft model's tokens, too.

    Raises:
        RaggedConfigError: the pool does not have the size that was counted.
    """
    pool, slabs = build(), slab_pool(configurator.token_to_kv_pool_allocator.get_kvcache())
    counted = model.token_bytes * slabs.page_size * slabs.sizes.num_slots
    if sum(pool.get_kv_size_bytes()) != counted:
        raise RaggedConfigError(
            f"the draft model's cache takes {sum(pool.get_kv_size_bytes())} bytes, and {counted} were counted for it; "
            f"use --speculative-algorithm NGRAM"
        )
    offsets = torch.arange(slabs.page_size, device=slabs.device)

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        first = (pages[:, None] * slabs.page_size + offsets for pages in (target, source))
        pool.move_kv_cache(*(locations.flatten() for locations in first))

    slabs.open_segments.on_copy.append(copy)
    return pool


def steps_of_drafting(original: Callable, factory: Any) -> Any:
    """Return attention for the steps of drafting, which SGLang lacks on CPUs."""
    if factory.draft_attn_backend != BACKENDS["cpu"] or factory.speculative_num_steps <= 1:
        return original(factory)
    return DraftSteps(factory.draft_model_runner, factory.speculative_num_steps)


def extend_after_drafting(original: Callable, factory: Any) -> Any:
    """Return the draft model's attention to accepted tokens; None on CPUs keeps the one it has."""
    return None if factory.draft_attn_backend == BACKENDS["cpu"] else original(factory)
