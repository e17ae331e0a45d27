"""Drafts, as a feature of the server."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts import sglang_flags
from sgl_ragged.features.drafts.draft_model import DraftModel
from sgl_ragged.features.history.launch import HISTORY
from sgl_ragged.features.host_tier.launch import HOST_TIER
from sgl_ragged.features.retrieval.launch import RETRIEVAL
from sgl_ragged.features.windows.launch import WINDOWS
from sgl_ragged.launch.feature import Feature, Rank, Seam, Worker
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import FLASHINFER, FP8, M_ROPE, MIXED, Conflict, Launch
from sgl_ragged.mem_pool.sizing import PoolSizes

HOOKS = "sgl_ragged.features.drafts.chain_hooks"
FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"

ADAPTERS, RANKS = "--enable-lora", "more ranks than one"

BY_MODEL = "a draft model"
"""Drafts by a smaller model, or by a head on the served model's hidden states."""


@dataclass(frozen=True)
class Drafts:
    """width: tokens of a chain, the first of which is certain. model: that drafts, if one does. overlapped: whether a
    step is prepared while the one before is computed."""

    width: int
    model: DraftModel | None = None
    overlapped: bool = False


class Drafting(Feature):
    """Settings: `Drafts`, once the model is known."""

    name = "drafts"
    case = "--speculative-algorithm"
    layout_also = sglang_flags.IN_LAYOUTS
    needed_for = " with --speculative-algorithm"
    cases: ClassVar[Mapping] = {
        ADAPTERS: lambda launch: bool(launch.server_args.enable_lora or launch.server_args.lora_paths),
        BY_MODEL: lambda launch: sglang_flags.by_model(launch.server_args),
        RANKS: lambda launch: launch.server_args.tp_size > 1,
    }
    conflicts = (
        Conflict(case, ADAPTERS, "beside requests with adapters an answer has been seen to differ"),
        Conflict(case, HISTORY.case, "a chain is verified against all segments"),
        Conflict(case, RETRIEVAL.case, "pivots watch one query per step"),
        Conflict(case, WINDOWS.case, "pages of windows are not handed out for chains", "drop it"),
        Conflict(case, FLASHINFER, "flashinfer does not plan for chains", "use --ragged-kernel triton"),
        Conflict(case, MIXED, "SGLang decodes drafts in batches of their own"),
        Conflict(case, M_ROPE, "positions of drafts beside pictures have not been tested", "drop it"),
        Conflict(BY_MODEL, HOST_TIER.case, "what comes back from the host has nothing of the draft model with it"),
        Conflict(BY_MODEL, FP8, "a draft model beside an FP8 cache has not been tested", "use --kv-cache-dtype auto"),
        Conflict(BY_MODEL, RANKS, "a draft model on several ranks has not been tested", "use --tp 1, or NGRAM"),
    )
    seams = (
        Seam(
            "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get",
            ("self", "req_ids", "batch_tokens", "total_lens"),
            f"{HOOKS}.draft_chains",
        ),
        Seam(
            "sglang.srt.mem_cache.allocation.alloc_for_spec_decode",
            (
                *("tree_cache", "req_to_token_pool", "reqs", "req_pool_indices", "cur_kv_lens", "cur_kv_lens_cpu"),
                *("nxt_kv_lens", "nxt_kv_lens_cpu", "num_needed_tokens", "batch"),
            ),
            f"{HOOKS}.alloc_for_chains",
        ),
        Seam(
            "sglang.srt.speculative.spec_utils.record_stream_for_v2_verify",
            ("batch", "verify_input", "fwd_stream"),
            f"{HOOKS}.begin_chains",
        ),
        Seam(
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            (
                *("verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k"),
                *("watermark_state", "watermark_full_mask"),
            ),
            f"{HOOKS}.sample_to_border",
        ),
        Seam(
            f"{FACTORY}.create_decode_backend",
            ("self",),
            "sgl_ragged.features.drafts.draft_pool.steps_of_drafting",
        ),
        Seam(
            f"{FACTORY}.create_draft_extend_backend",
            ("self",),
            "sgl_ragged.features.drafts.draft_pool.behind_drafting",
        ),
        Seam(
            "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
            ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
        ),
    )

    def asked(self, launch: Launch) -> bool:
        return launch.server_args.speculative_algorithm is not None

    def settle(self, launch: Launch) -> Any:
        sglang_flags.refuse(launch.server_args)
        if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", -1)) > 0:
            raise RaggedConfigError("SGLANG_SIMULATE_ACC_LEN accepts drafts behind borders of segments; unset it")
        return True

    def declare(self, settings: Any, launch: Launch) -> dict[str, Any]:
        sglang_flags.refuse_resolved(launch.view)
        # SGLang overlaps no batches with drafts on CPUs; nothing is in the way on the plugin's platform.
        changed: dict[str, Any] = {"disable_overlap_schedule": launch.server_args.disable_overlap_schedule}
        if sglang_flags.by_model(launch.server_args):
            changed["speculative_draft_attention_backend"] = sglang_flags.draft_backend(launch)
        return changed

    def join(self, settings: Any, plan: ServingPlan, launch: Launch) -> Any:
        width = sglang_flags.width(launch)
        if width > plan.segment:
            raise RaggedConfigError(
                f"--speculative-num-draft-tokens {width} is more than a segment of {plan.segment} tokens; take fewer"
            )
        model = None
        if sglang_flags.by_model(launch.server_args):
            from sgl_ragged.features.drafts.draft_pool import read_draft_model

            model = read_draft_model(launch)
        return Drafts(width, model, launch.view is not None and not launch.view.disable_overlap_schedule)

    def state(self, settings: Any) -> tuple[Any, ...]:
        return (settings.width, settings.model.token_bytes if settings.model else 0)

    def page_bytes(self, settings: Any, rank: Rank) -> int:
        return rank.plan.segment * settings.model.token_bytes if settings.model else 0

    def own_pool(self, settings: Any, configurator: Any, build: Callable[[], Any]) -> Any:
        if not configurator.is_draft_worker:
            return None
        from sgl_ragged.features.drafts.draft_pool import build_beside

        return build_beside(settings.model, configurator, build)

    def attach(self, settings: Any, worker: Worker) -> Any:
        from sgl_ragged.attention.operations import commit
        from sgl_ragged.mem_pool.open_chains import OpenChains

        seal = functools.partial(commit, worker.pool.store, worker.req_to_token)
        ahead = settings.width if settings.overlapped else 0
        open_segments = worker.pool.open_segments
        open_segments.chains = OpenChains(open_segments, settings.width, seal, ahead)
        return worker.given

    def describe(self, settings: Any, sizes: PoolSizes) -> str:
        whose = ""
        if settings.model is not None:
            whose = f" by {settings.model.name}, {settings.model.token_bytes} bytes for each virtual token"
        without = "" if settings.overlapped else ", without overlapped batches"
        return f"chains of {settings.width} drafts{whose}{without}"

    def server_info(self, settings: Any, pool: Any) -> dict[str, Any]:
        return {"draft_tokens": settings and settings.width} | self._model_info(settings)

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return self._model_info(settings)

    @staticmethod
    def _model_info(settings: Any) -> dict[str, Any]:
        return {"draft_bytes_per_token": settings.model.token_bytes if settings and settings.model else None}


DRAFTS = Drafting()
