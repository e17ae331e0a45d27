"""Checks of the launcher before calibration and loading: port, memory, cores."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import Prefill, Rank
from sgl_ragged.launch.joining import feature_bytes, page_bytes, side_pages
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.mem_pool.kv_dtype import beside_cache
from sgl_ragged.mem_pool.sizing import fit_pool
from sgl_ragged.mem_pool.slab_store import open_pages, side_bytes
from sgl_ragged.scorers import get_scorer


def refuse_port(view: Any) -> None:
    """Raise RaggedConfigError for a server whose port another process listens on; calibration would come before SGLang
    notices. Engines have no port.

    Args:
        view: SGLang's resolved settings.
    """
    from sglang.srt.utils.network import is_port_available

    if view.node_rank == 0 and view.port and not is_port_available(view.port):
        raise RaggedConfigError(f"port {view.port} is in use; stop what listens on it, or take another --port")


def refuse_unbound_ranks(view: Any) -> None:
    """Raise RaggedConfigError for more ranks on a CPU than NUMA nodes, whose cores SGLang wants to be told."""
    from sglang.srt.utils import get_cpu_ids_by_node

    ranks = view.tp_size * view.pp_size * view.dp_size // view.nnodes
    told = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all")
    if view.device != "cpu" or ranks == 1:
        return
    groups = len(get_cpu_ids_by_node()) if told == "all" else len(told.split("|"))
    if ranks <= groups:
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise RaggedConfigError(f"{ranks} ranks on {len(cores)} cores: each rank needs a core of its own; use fewer")
    has = f"{groups} NUMA nodes" if told == "all" else f"{groups} groups of cores in SGLANG_CPU_OMP_THREADS_BIND"
    share = len(cores) // ranks
    value = "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))
    raise RaggedConfigError(
        f"{ranks} ranks on CPUs need cores of their own, and this machine has {has}; set "
        f"SGLANG_CPU_OMP_THREADS_BIND='{value}'"
    )


def refuse_bytes(kv_bytes: int, view: Any) -> None:
    """Raise RaggedConfigError for a KV budget of all ranks that is more than the memory that is free.

    On GPUs the launcher does not touch the devices; the total of the smallest one is compared.

    Args:
        kv_bytes: --kv-bytes, of each rank.
        view: SGLang's resolved settings.
    """
    if view.device == "cpu":
        from sglang.srt.utils.common import get_instance_memory_status

        ranks = view.tp_size * view.pp_size * view.dp_size // view.nnodes
        # A container's use counts files that are cached, so its limit alone is compared.
        limit = get_instance_memory_status("/sys/fs/cgroup/memory.max")
        have = min(psutil.virtual_memory().available, limit if limit is not None else sys.maxsize)
        asked, what = kv_bytes * ranks, "free on this machine"
    elif view.device == "cuda":
        devices = range(torch.cuda.device_count())
        have = min((torch.cuda.get_device_properties(one).total_memory for one in devices), default=kv_bytes)
        asked, what = kv_bytes, "all that a GPU here has"
    else:
        return
    if asked > have:
        raise RaggedConfigError(
            f"--kv-bytes {kv_bytes} asks for {_gib(asked)} GiB in all, but {_gib(have)} GiB are {what}; give fewer"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


def refuse_small(kv_bytes: int, plan: ServingPlan, kv_dtype: torch.dtype, model_config: Any, view: Any) -> None:
    """Raise RaggedConfigError for a KV budget that holds less than one request, in the words of the workers.

    Args:
        kv_bytes: --kv-bytes, of each rank.
        kv_dtype: of the cache, as far as the launcher knows it.
        view: SGLang's resolved settings.
    """
    queries, scorer = beside_cache(kv_dtype, model_config.dtype), get_scorer(plan.scorer)
    chunk = view.chunked_prefill_size
    prefill = Prefill(chunk if chunk is not None and chunk > 0 else model_config.context_len, view)
    pages = open_pages(scorer, plan.slab_layouts, plan.q_per_kv, kv_dtype, queries)
    for number in range(max(len(plan.stages), 1)):
        stage = plan.stage(number)
        for own in range(plan.ranks):
            rank = Rank(stage, own, kv_dtype.itemsize, queries.itemsize)
            layout = stage.layout(own)
            side = side_bytes(scorer, layout, stage.q_per_kv, queries) + feature_bytes(rank)
            fit_pool(
                layout,
                kv_dtype.itemsize,
                pages,
                kv_bytes,
                view.max_running_requests,
                side,
                view.max_total_tokens,
                side_pages(rank, prefill)[1],
                page_bytes(rank),
            )
