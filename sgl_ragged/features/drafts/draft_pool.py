"""The draft model's own cache, at the locations of the pool of slabs, and its attention on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.draft_backend import DraftSteps
from sgl_ragged.features.drafts.draft_model import BACKENDS, DraftModel
from sgl_ragged.serve.pool import slab_pool


def build_beside(model: DraftModel, configurator: Any, build: Callable[[], Any]) -> Any:
    """SGLang's own pool for the draft model, at the locations of the pool of slabs; copies of open segments have its
    tokens, too.

    Raises:
        RaggedConfigError: it is not of the size that was counted.
    """
    pool, slabs = build(), slab_pool(configurator.token_to_kv_pool_allocator.get_kvcache())
    counted = model.token_bytes * slabs.page_size * slabs.sizes.num_slots
    if sum(pool.get_kv_size_bytes()) != counted:
        raise RaggedConfigError(
            f"the draft model's cache takes {sum(pool.get_kv_size_bytes())} bytes, and {counted} were counted for it; "
            f"use --speculative-algorithm NGRAM"
        )
    places = torch.arange(slabs.page_size, device=slabs.device)

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        first = (pages[:, None] * slabs.page_size + places for pages in (target, source))
        pool.move_kv_cache(*(locations.flatten() for locations in first))

    slabs.open_segments.on_copy.append(copy)
    return pool


def steps_of_drafting(original: Callable, factory: Any) -> Any:
    """Return attention for the steps of drafting, which SGLang lacks on CPUs."""
    if factory.draft_attn_backend != BACKENDS["cpu"] or factory.speculative_num_steps <= 1:
        return original(factory)
    return DraftSteps(factory.draft_model_runner, factory.speculative_num_steps)


def behind_drafting(original: Callable, factory: Any) -> Any:
    """Return the draft model's attention to accepted tokens; None on CPUs keeps the one it has."""
    return None if factory.draft_attn_backend == BACKENDS["cpu"] else original(factory)
