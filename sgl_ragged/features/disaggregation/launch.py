"""Prefill and decode in servers of their own, as a feature of the server."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.disaggregation.meter import sent_bytes
from sgl_ragged.features.disaggregation.roles import DECODE, NAME, PREFILL
from sgl_ragged.features.disaggregation.serve import SEAMS
from sgl_ragged.features.drafts.launch import DRAFTS
from sgl_ragged.features.history.launch import HISTORY
from sgl_ragged.features.host_tier.launch import HOST_TIER
from sgl_ragged.features.retrieval.launch import RETRIEVAL
from sgl_ragged.features.windows.launch import WINDOWS
from sgl_ragged.launch.feature import Feature, Rank, Worker
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import M_ROPE, NODES, Conflict, Launch
from sgl_ragged.mem_pool.sizing import PoolSizes

ENGINE = "nixl"
"""The transfer engine that has been served with."""

_FORBIDDEN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # field, values that are fine, reason
    (
        "disaggregation_transfer_backend",
        (ENGINE,),
        "pages of --kv-pool ragged lie in one buffer, of which SGLang's other transfer engines would send nothing or "
        f"half: use --disaggregation-transfer-backend {ENGINE}",
    ),
    (
        "disaggregation_decode_retraction_backup",
        (None, "cpu_tensor", "none"),
        "what a retracted request holds goes to host memory of its own with --kv-pool ragged: drop the flag",
    ),
    (
        "disaggregation_decode_extra_slots",
        (None, 0),
        "rows of requests cost little with --kv-pool ragged: drop the flag, and raise --max-running-requests",
    ),
    (
        "disaggregation_decode_enable_radix_cache",
        (False,),
        "a decode server with --kv-pool ragged keeps no prefixes: drop --disaggregation-decode-enable-radix-cache",
    ),
    (
        "disaggregation_decode_enable_offload_kvcache",
        (False,),
        "a decode server with --kv-pool ragged has no host tier: drop --disaggregation-decode-enable-offload-kvcache",
    ),
    (
        "disaggregation_decode_host_receive_threshold",
        (1.0,),
        "pages of --kv-pool ragged are received on the device: drop the flag",
    ),
    (
        "disaggregation_decode_allocation_policy",
        ("early",),
        "a decode server with --kv-pool ragged allocates before pages are sent: drop the flag",
    ),
    ("disaggregation_enable_kv_checksum", (False,), "checksums have not been tested with --kv-pool ragged: drop it"),
    ("enable_pd_role_switch", (False,), "roles of servers are fixed with --kv-pool ragged: drop the flag"),
    ("optimistic_prefill_attempts", (0,), "optimistic prefill has not been tested with --kv-pool ragged: drop it"),
    ("dp_size", (1,), "replicas of such a server are servers of their own with --kv-pool ragged: start several"),
)


class Disaggregation(Feature):
    """Settings: PREFILL or DECODE."""

    name = NAME
    case = "--disaggregation-mode"
    needed_for = " with --disaggregation-mode"
    conflicts = (
        Conflict(case, RETRIEVAL.case, "what heads drop is not sent"),
        Conflict(case, HISTORY.case, "by which score segments leave a view is not sent"),
        Conflict(case, WINDOWS.case, "pages of windows are not sent", "drop it"),
        Conflict(case, DRAFTS.case, "drafts on a decode server have not been tested"),
        Conflict(case, NODES, "a server that sends or receives pages has been tested on one node"),
        Conflict(case, M_ROPE, "positions of pictures on two servers have not been tested", "drop it"),
    )
    seams = SEAMS

    def asked(self, launch: Launch) -> bool:
        return launch.server_args.disaggregation_mode != "null"

    def require(self) -> None:
        if importlib.util.find_spec(ENGINE) is None:
            raise RaggedConfigError(f"--disaggregation-mode sends pages with {ENGINE}, which is missing: install it")
        super().require()

    def settle(self, launch: Launch) -> str:
        from sglang.srt.environ import envs

        server_args = launch.server_args
        for name, fine, reason in _FORBIDDEN:
            value = getattr(server_args, name)
            if value not in fine:
                raise RaggedConfigError(f"{reason} ({name} is {value!r})")
        if server_args.disaggregation_mode == DECODE and server_args.enable_hierarchical_cache:
            raise RaggedConfigError(
                "a decode server with --kv-pool ragged keeps no prefixes, so there is nothing for a host tier: drop "
                "--enable-hierarchical-cache, or give it to the prefill server"
            )
        if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
            raise RaggedConfigError(
                "SGLANG_DISAGG_STAGING_BUFFER gathers heads for another number of ranks, and pages of --kv-pool ragged "
                "go to as many; unset it"
            )
        return server_args.disaggregation_mode

    def declare(self, settings: str, launch: Launch) -> dict[str, Any]:
        if settings == PREFILL:
            # With overlapped batches SGLang records a CUDA event where it sends a cached prefix ahead of its prompt.
            return {"disable_overlap_schedule": True} if launch.view.device == "cpu" else {}
        backup = launch.server_args.disaggregation_decode_retraction_backup or "cpu_tensor"
        return {"disaggregation_decode_extra_slots": 0, "disaggregation_decode_retraction_backup": backup}

    def join(self, settings: str, plan: ServingPlan, launch: Launch) -> str:
        from sgl_ragged.scorers import get_scorer

        places, _ = get_scorer(plan.scorer).input_shape(plan.segment, plan.q_per_kv, plan.geometry.head_dim)
        if places not in (0, plan.segment):
            raise RaggedConfigError(
                f"scorer {plan.scorer!r} looks at the last queries of a segment, which are not sent to a decode "
                f"server; use another --ragged-scorer"
            )
        return settings

    def attach(self, settings: str, worker: Worker) -> Any:
        from sgl_ragged.features.disaggregation.agreement import agreement
        from sgl_ragged.features.disaggregation.pages import RequestPages
        from sgl_ragged.features.disaggregation.prefill_server import Exchange

        pool, plan = worker.pool, worker.rank.plan
        # A tier below the prefill server is its own affair, as is which of the two this is.
        shared = tuple(one for one in plan.features if one.name not in (NAME, HOST_TIER.name))
        digest = replace(plan, features=shared).digest
        page_bytes = [layout.slab_bytes(worker.rank.itemsize) for layout in plan.layouts]
        pages = RequestPages(pool.open_segments)

        def agree() -> str:
            return agreement(digest, pool.store.stored_as, page_bytes, pool.open_segments.pages.tokens)

        pool.attached[NAME] = exchange = Exchange(pages, agree)
        for method in (exchange.get_contiguous_buf_infos, exchange.get_cpu_copy, exchange.load_cpu_copy):
            setattr(pool, method.__name__, method)
        return worker.given

    def describe(self, settings: str, sizes: PoolSizes) -> str:
        parts = [f"{one['pages'] / one['token_pool']:.2f} at {tokens}" for tokens, one in sent_bytes(sizes).items()]
        return f"{settings} server, share of the token pool's bytes that is sent, by tokens: {', '.join(parts)}"

    def server_info(self, settings: Any, pool: Any) -> dict[str, Any]:
        if settings is None:
            return {NAME: None}
        agreed = pool.attached[NAME].agreement
        return {NAME: {"mode": settings, "agreement": agreed, "sent_bytes": sent_bytes(pool.sizes)}}

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"sent_bytes": sent_bytes(sizes)}


DISAGGREGATION = Disaggregation()
