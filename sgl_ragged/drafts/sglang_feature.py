"""Drafts, as a feature of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.history.sglang_feature import HISTORY
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.plan import ServingPlan
from sgl_ragged.plugin.feature import Feature, Seam, Worker
from sgl_ragged.plugin.launch import FLASHINFER, M_ROPE, MIXED, Conflict, Launch
from sgl_ragged.retrieval.sglang_feature import RETRIEVAL
from sgl_ragged.windows.sglang_feature import WINDOWS

HOOKS = "sgl_ragged.drafts.sglang_chains"

ALGORITHM = "NGRAM"
"""Whose drafts are verified."""

ADAPTERS = "--enable-lora"

USE = "use --speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1"

_FORBIDDEN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # field, values that are fine, reason
    (
        "speculative_ngram_max_bfs_breadth",
        (1,),
        "with --kv-pool ragged drafts are chains, no trees: set --speculative-ngram-max-bfs-breadth 1",
    ),
    (
        "speculative_ngram_external_corpus_path",
        (None,),
        "drafts from an external corpus have not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "speculative_ngram_external_sam_budget",
        (0,),
        "drafts from an external corpus have not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "speculative_adaptive",
        (False,),
        "chains of drafts have one length with --kv-pool ragged; drop --speculative-adaptive",
    ),
    (
        "speculative_use_rejection_sampling",
        (False,),
        "rejection sampling needs a draft model, which --kv-pool ragged does not serve; drop the flag",
    ),
    (
        "enable_watermark",
        (False,),
        "watermarks have not been tested with drafts and --kv-pool ragged; drop one of the two",
    ),
)


@dataclass(frozen=True)
class Drafts:
    """width: tokens of a chain, the first of which is certain."""

    width: int


class Drafting(Feature):
    """Settings: `Drafts`, once the model is known."""

    name = "drafts"
    case = "--speculative-algorithm"
    needed_for = " with --speculative-algorithm"
    cases: ClassVar[Mapping] = {
        ADAPTERS: lambda launch: bool(launch.server_args.enable_lora or launch.server_args.lora_paths)
    }
    conflicts = (
        Conflict(case, ADAPTERS, "beside requests with adapters an answer has been seen to differ"),
        Conflict(case, HISTORY.case, "a chain is verified against all segments"),
        Conflict(case, RETRIEVAL.case, "pivots watch one query per step"),
        Conflict(case, WINDOWS.case, "pages of windows are not handed out for chains", "drop it"),
        Conflict(case, FLASHINFER, "flashinfer does not plan for chains", "use --ragged-kernel triton"),
        Conflict(case, MIXED, "SGLang decodes drafts in batches of their own"),
        Conflict(case, M_ROPE, "positions of drafts beside pictures have not been tested", "drop it"),
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
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            (
                *("verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k"),
                *("watermark_state", "watermark_full_mask"),
            ),
            f"{HOOKS}.sample_to_border",
        ),
        Seam(
            "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
            ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
        ),
    )

    def asked(self, launch: Launch) -> bool:
        return launch.server_args.speculative_algorithm is not None

    def settle(self, launch: Launch) -> Any:
        server_args = launch.server_args
        if server_args.speculative_algorithm.upper() != ALGORITHM:
            raise RaggedConfigError(
                f"--speculative-algorithm {server_args.speculative_algorithm} is not supported with --kv-pool ragged, "
                f"where {ALGORITHM} is; {USE}"
            )
        for name, fine, reason in _FORBIDDEN:
            value = getattr(server_args, name)
            if value not in fine:
                raise RaggedConfigError(f"{reason} ({name} is {value!r})")
        _refuse_graphs(server_args)
        if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", -1)) > 0:
            raise RaggedConfigError("SGLANG_SIMULATE_ACC_LEN accepts drafts behind borders of segments; unset it")
        return True

    def declare(self, settings: Any, launch: Launch) -> dict[str, Any]:
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        graphs = with_phase(launch.view.cuda_graph_config, Phase.DECODE, backend=Backend.DISABLED)
        return {"disable_overlap_schedule": True, "cuda_graph_config": graphs}

    def join(self, settings: Any, plan: ServingPlan, launch: Launch) -> Any:
        width = launch.view.speculative_num_draft_tokens
        if width > plan.segment:
            raise RaggedConfigError(
                f"--speculative-num-draft-tokens {width} is more than a segment of {plan.segment} tokens; take fewer"
            )
        return Drafts(width)

    def state(self, settings: Any) -> tuple[Any, ...]:
        return (settings.width,)

    def attach(self, settings: Any, worker: Worker) -> Any:
        from sgl_ragged.drafts.sglang_chains import Chains

        worker.pool.attached[self.name] = Chains(worker.pool, worker.req_to_token)
        worker.pool.open_segments.width = settings.width
        return worker.given

    def describe(self, settings: Any, sizes: PoolSizes) -> str:
        return f"chains of {settings.width} drafts, without overlapped batches and CUDA graphs"

    def server_info(self, settings: Any, pool: Any) -> dict[str, Any]:
        return {"draft_tokens": settings and settings.width}


def _refuse_graphs(server_args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    asked = {Phase.DECODE: server_args.cuda_graph_backend_decode}
    for phase, given in (server_args.cuda_graph_config or {}).items():
        asked[phase] = given.get("backend", asked.get(phase))
    if asked[Phase.DECODE] not in (None, Backend.DISABLED):
        raise RaggedConfigError(
            "CUDA graphs of decode are not supported with drafts and --kv-pool ragged; drop the flag"
        )


DRAFTS = Drafting()
