"""Speculative decoding: which drafts are served, and with which settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts import sglang_flags
from sgl_ragged.features.drafts.draft_config import read_draft_model
from sgl_ragged.features.drafts.draft_model import DraftSettings
from sgl_ragged.launch.conflicts import FLASHINFER, FP8, M_ROPE, MIXED
from sgl_ragged.launch.feature import Conflict, LaunchFeature
from sgl_ragged.launch.plan import Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, ModelStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes

CASE = "--speculative-algorithm"

ADAPTERS, RANKS = "--enable-lora", "more ranks than one"

BY_MODEL = "a draft model"
"""Drafts by a smaller model, or by a head on the served model's hidden states."""


class Drafting(LaunchFeature):
    """Settings: `DraftSettings`, once the model is known."""

    name = "drafts"
    case = CASE
    contract = sglang.DRAFTS
    needed_for = " with --speculative-algorithm"
    cases: ClassVar[Mapping] = {
        ADAPTERS: lambda start: bool(start.server_args.enable_lora or start.server_args.lora_paths),
        BY_MODEL: lambda start: sglang_flags.by_model(start.server_args),
        RANKS: lambda start: start.server_args.tp_size > 1,
    }
    conflicts = (
        Conflict(CASE, ADAPTERS, "an answer differed with adapters in the batch"),
        Conflict(CASE, "--ragged-history", "a chain is verified against all segments"),
        Conflict(CASE, "--ragged-reservoir", "pivots watch one query per step"),
        Conflict(CASE, "sliding-window layers", "chains get no pages of windows", "drop it"),
        Conflict(CASE, FLASHINFER, "flashinfer does not plan for chains", "use --ragged-kernel triton"),
        Conflict(CASE, MIXED, "SGLang decodes drafts in batches of their own"),
        Conflict(CASE, M_ROPE, "positions of drafts after pictures have not been tested", "drop it"),
        Conflict(BY_MODEL, "--enable-hierarchical-cache", "restored pages lack the draft model's keys and values"),
        Conflict(BY_MODEL, FP8, "a draft model with an FP8 cache has not been tested", "use --kv-cache-dtype auto"),
        Conflict(BY_MODEL, RANKS, "a draft model on several ranks has not been tested", "use --tp 1, or NGRAM"),
    )

    def asked(self, start: Start) -> bool:
        return start.server_args.speculative_algorithm is not None

    def settle(self, start: Start) -> None:
        sglang_flags.refuse(start.server_args)
        if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", -1)) > 0:
            raise RaggedConfigError("SGLANG_SIMULATE_ACC_LEN accepts drafts beyond borders of segments; unset it")

    def sglang_settings(self, settings: None, start: ModelStart) -> dict[str, Any]:
        sglang_flags.refuse_resolved(start.view)
        # SGLang overlaps no batches with drafts on CPUs; nothing is in the way on the plugin's platform.
        changed: dict[str, Any] = {"disable_overlap_schedule": start.server_args.disable_overlap_schedule}
        if sglang_flags.by_model(start.server_args):
            changed["speculative_draft_attention_backend"] = sglang_flags.draft_backend(start)
        return changed

    def join(self, settings: None, plan: ServingPlan, start: BudgetedStart) -> DraftSettings:
        width = sglang_flags.width(start)
        if width > plan.segment:
            raise RaggedConfigError(
                f"--speculative-num-draft-tokens {width} is more than a segment of {plan.segment} tokens; take fewer"
            )
        model = read_draft_model(start) if sglang_flags.by_model(start.server_args) else None
        return DraftSettings(width, model, start.served and not start.view.disable_overlap_schedule)

    def layout_info(self, settings: DraftSettings | None, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"draft_bytes_per_token": settings.model.token_bytes if settings and settings.model else None}


FEATURE = Drafting()
