"""Speculative decoding in a worker: chains in open segments, and a draft model's cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.attention.operations import commit
from sgl_ragged.features.drafts import chain_hooks, draft_pool
from sgl_ragged.features.drafts.draft_model import DraftSettings
from sgl_ragged.mem_pool.open_segments import OpenChains
from sgl_ragged.serve.feature import Hook, ServeFeature, Worker


class Drafting(ServeFeature):
    """Settings: `draft_model.DraftSettings`."""

    name = "drafts"
    hooks = (
        Hook(sglang.NGRAM_CORPUS, chain_hooks.draft_chains),
        Hook(sglang.ALLOC_FOR_DRAFTS, chain_hooks.alloc_for_chains),
        Hook(sglang.BEFORE_VERIFY, chain_hooks.begin_chains),
        Hook(sglang.SAMPLE_DRAFTS, chain_hooks.sample_to_border),
        Hook(f"{sglang.DRAFT_BACKENDS}.create_decode_backend", draft_pool.steps_of_drafting),
        Hook(f"{sglang.DRAFT_BACKENDS}.create_draft_extend_backend", draft_pool.extend_after_drafting),
    )

    def own_pool(self, settings: DraftSettings, configurator: Any, build: Callable[[], Any]) -> Any:
        if not configurator.is_draft_worker:
            return None
        assert settings.model is not None, "SGLang makes a pool for a model that drafts"
        return draft_pool.build_draft_pool(settings.model, configurator, build)

    def attach(self, settings: DraftSettings, worker: Worker) -> Any:
        seal = functools.partial(commit, worker.pool.store, worker.req_to_token)
        ahead = settings.width if settings.overlapped else 0
        open_segments = worker.pool.open_segments
        open_segments.chains = OpenChains(open_segments, settings.width, seal, ahead)
        return worker.outer

    def server_info(self, settings: DraftSettings | None, pool: Any) -> dict[str, Any]:
        token_bytes = settings.model.token_bytes if settings and settings.model else None
        return {"draft_tokens": settings and settings.width, "draft_bytes_per_token": token_bytes}


FEATURE = Drafting()
