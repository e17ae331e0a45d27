"""Prefill and decode in servers of their own: flags that do not go with it, and settings of SGLang."""

from __future__ import annotations

import importlib.util
from typing import Any

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.disaggregation.meter import sent_bytes
from sgl_ragged.features.disaggregation.roles import DECODE, NAME, PREFILL, ServerRole
from sgl_ragged.launch.conflicts import CHECKED, M_ROPE, NODES
from sgl_ragged.launch.feature import UNCHECKED, Conflict, LaunchFeature
from sgl_ragged.launch.flags import RefusedValues, refuse_values
from sgl_ragged.launch.plan import Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, ModelStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.scorers import get_scorer

CASE = "--disaggregation-mode"

ENGINE = "nixl"
"""The transfer engine that has been served with."""

REFUSED_VALUES: RefusedValues = (
    # field, values that are served, reason
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


class Disaggregation(LaunchFeature):
    """Settings: `ServerRole`."""

    name = NAME
    case = CASE
    contract = sglang.DISAGGREGATION
    needed_for = " with --disaggregation-mode"
    conflicts = (
        Conflict(CASE, "--ragged-reservoir", "dropped tokens are not sent"),
        Conflict(CASE, "--ragged-history", "the scores by which segments leave are not sent"),
        Conflict(CASE, "sliding-window layers", "pages of windows are not sent", "drop it"),
        Conflict(CASE, "--speculative-algorithm", "drafts on a decode server have not been tested"),
        Conflict(CASE, NODES, "it has been tested on one node only"),
        Conflict(CASE, M_ROPE, "positions of pictures on two servers have not been tested", "drop it"),
        Conflict(
            CHECKED, CASE, "neither server answers alone", "ask both with `sgl-ragged verify --decode`", UNCHECKED
        ),
    )

    def asked(self, start: Start) -> bool:
        return start.server_args.disaggregation_mode != "null"

    def settle(self, start: Start) -> ServerRole:
        from sglang.srt.environ import envs

        if importlib.util.find_spec(ENGINE) is None:
            raise RaggedConfigError(f"--disaggregation-mode sends pages with {ENGINE}, which is missing: install it")
        server_args = start.server_args
        refuse_values(server_args, REFUSED_VALUES)
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
        return ServerRole(server_args.disaggregation_mode)

    def sglang_settings(self, settings: ServerRole, start: ModelStart) -> dict[str, Any]:
        if settings.mode == PREFILL:
            # With overlapped batches SGLang records a CUDA event where it sends a cached prefix ahead of its prompt.
            return {"disable_overlap_schedule": True} if start.view.device == "cpu" else {}
        backup = start.server_args.disaggregation_decode_retraction_backup or "cpu_tensor"
        return {"disaggregation_decode_extra_slots": 0, "disaggregation_decode_retraction_backup": backup}

    def join(self, settings: ServerRole, plan: ServingPlan, start: BudgetedStart) -> ServerRole:
        places, _ = get_scorer(plan.scorer).input_shape(plan.segment, plan.q_per_kv, plan.geometry.head_dim)
        if places not in (0, plan.segment):
            raise RaggedConfigError(
                f"scorer {plan.scorer!r} looks at the last queries of a segment, which are not sent to a decode "
                f"server; use another --ragged-scorer"
            )
        return settings

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"sent_bytes": sent_bytes(sizes)}


FEATURE = Disaggregation()
