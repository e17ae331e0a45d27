"""Prefill and decode in servers of their own: pages of one pool that are read or written by another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.features.disaggregation import decode_server, prefill_server
from sgl_ragged.features.disaggregation.meter import sent_bytes
from sgl_ragged.features.disaggregation.pages import RequestPages
from sgl_ragged.features.disaggregation.prefill_server import Exchange
from sgl_ragged.features.disaggregation.roles import NAME, ServerRole, agreement
from sgl_ragged.serve.feature import Hook, ServeFeature, Worker

OF_EACH_SERVER = (NAME, "tier")
"""Features that the two servers may have each for itself: the role, and a tier under the prefill server."""


class Disaggregation(ServeFeature):
    """Settings: `roles.ServerRole`."""

    name = NAME
    hooks = (
        Hook(sglang.PD_MEMORY, prefill_server.describe_memory, bound=True),
        Hook(sglang.PD_SENDER, prefill_server.send_open_pages),
        Hook(sglang.PD_PEER, prefill_server.refuse_other_pools),
        Hook(f"{sglang.PREALLOC_QUEUE}._pre_alloc", decode_server.allocate),
        Hook(f"{sglang.PREALLOC_QUEUE}._required_alloc_tokens", decode_server.needed_tokens),
        Hook(f"{sglang.PREALLOC_QUEUE}._prealloc_required_tokens", decode_server.needed_again),
        Hook(f"{sglang.PREALLOC_QUEUE}._check_if_req_exceed_kv_capacity", decode_server.refuse_what_never_fits),
        Hook(f"{sglang.PREALLOC_QUEUE}._transfer_page_indices", decode_server.destinations),
        Hook(f"{sglang.PREALLOC_QUEUE}._ensure_prefill_info", decode_server.agree_first),
    )

    def attach(self, settings: ServerRole, worker: Worker) -> Any:
        pool, plan = worker.pool, worker.rank.plan
        shared = tuple(one for one in plan.features if one.name not in OF_EACH_SERVER)
        digest = replace(plan, features=shared).digest
        page_bytes = [layout.slab_bytes(worker.rank.itemsize) for layout in plan.layouts]

        def agree() -> str:
            return agreement(digest, pool.store.stored_as, page_bytes, pool.open_segments.pages.tokens)

        pool.attached[NAME] = exchange = Exchange(RequestPages(pool.open_segments), agree)
        for method in (exchange.get_contiguous_buf_infos, exchange.get_cpu_copy, exchange.load_cpu_copy):
            setattr(pool, method.__name__, method)
        return worker.outer

    def server_info(self, settings: ServerRole | None, pool: Any) -> dict[str, Any]:
        if settings is None:
            return {NAME: None}
        agreed = pool.attached[NAME].agreement
        return {NAME: {"mode": settings.mode, "agreement": agreed, "sent_bytes": sent_bytes(pool.sizes)}}


FEATURE = Disaggregation()
