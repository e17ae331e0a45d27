"""Checks of the launcher before calibration and loading: flags, environment, port, memory, cores."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import psutil
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.cuda_graphs import captures_prefill, refuse_graphs
from sgl_ragged.launch.flags import RefusedValues, refuse_values
from sgl_ragged.launch.models import NAMED_KV_DTYPES
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import Prefill, ServingPlan
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.mem_pool.kv_dtype import beside_cache
from sgl_ragged.mem_pool.sizing import check_limits
from sgl_ragged.rank_sizes import fit_all_ranks

logger = logging.getLogger(__name__)


def refuse_segment(segment: int, device: str) -> None:
    """Raise RaggedConfigError for a segment length that SGLang's allocator on this device cannot use as page size."""
    if device == "cuda" and segment & (segment - 1):
        raise RaggedConfigError(
            f"--ragged-segment {segment} is no power of two, which SGLang's page allocator needs on CUDA; "
            f"use {1 << segment.bit_length() - 1} or {1 << segment.bit_length()}"
        )


def refuse_environment(server_args: Any) -> None:
    """Raise RaggedConfigError for environment variables that do not go with --kv-pool ragged; warn of one without
    effect."""
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        raise RaggedConfigError(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH captures what runs before a decode step, and --kv-pool ragged seals "
            "segments there, on the host's word; unset it"
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get() and not captures_prefill(server_args):
        logger.warning(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING does nothing with --kv-pool ragged: prefill is not captured, so "
            "SGLang leaves room for it, and the pool is that much smaller than the token pool; say --kv-bytes or "
            "--mem-fraction-static for another size"
        )


REFUSED_VALUES: RefusedValues = (
    # field, values that are served, reason
    ("attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop --attention-backend"),
    ("prefill_attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop the flag"),
    ("decode_attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop the flag"),
    (
        "hicache_host_memory_mode",
        ("cache",),
        "host memory as a mere buffer in front of storage is not supported with --kv-pool ragged; drop the flag",
    ),
    (
        "enable_unified_cache_external_linker",
        (False,),
        "external linkers read single tokens, which --kv-pool ragged does not store; use --enable-hierarchical-cache",
    ),
    (
        "radix_cache_backend",
        (None, ""),
        "--kv-pool ragged has a radix cache that knows open segments; drop --radix-cache-backend",
    ),
    ("enable_lmcache", (False,), "LMCache is not supported with --kv-pool ragged"),
    ("enable_flexkv", (False,), "FlexKV is not supported with --kv-pool ragged"),
    ("enable_memory_saver", (False,), "releasing KV memory at run time is not supported with --kv-pool ragged"),
    ("kv_canary", (None, "none"), "the KV canary reads single tokens, which --kv-pool ragged does not store"),
    ("enable_unified_memory", (False,), "the unified memory pool is not supported with --kv-pool ragged"),
    ("enable_page_major_kv_layout", (False,), "the page-major layout is not supported with --kv-pool ragged"),
    ("enable_streaming_session", (False,), "streaming sessions are not supported with --kv-pool ragged"),
    ("enable_hisparse", (False,), "HiSparse is not supported with --kv-pool ragged"),
    ("enable_kv_cache_sharding", (False,), "KV cache sharding is not supported with --kv-pool ragged"),
    ("enable_two_batch_overlap", (False,), "two-batch overlap is not supported with --kv-pool ragged"),
    ("enable_pdmux", (False,), "PD multiplexing is not supported with --kv-pool ragged"),
    ("prefill_only_disable_kv_cache", (False,), "--prefill-only-disable-kv-cache leaves no KV cache to compress"),
    ("dcp_size", (1,), "decode context parallelism is not supported with --kv-pool ragged; use --tp"),
    ("attn_cp_size", (1,), "context parallelism is not supported with --kv-pool ragged; use --tp"),
    ("attn_dp_size", (None, 1), "attention data parallelism is not supported with --kv-pool ragged; use --tp"),
    ("enable_dp_attention", (False,), "attention data parallelism is not supported with --kv-pool ragged; use --tp"),
    ("enable_torch_compile", (False,), "torch.compile is not supported with --kv-pool ragged; drop it"),
    (
        "enable_deterministic_inference",
        (False,),
        "deterministic inference needs one of SGLang's own attention backends; drop it, or use --kv-pool token",
    ),
    (
        "rl_on_policy_target",
        (None,),
        "deterministic inference needs one of SGLang's own attention backends; drop it, or use --kv-pool token",
    ),
    (
        "enable_mis",
        (False,),
        "multi-item scoring needs attention masks of its own, which --kv-pool ragged does not have; drop it",
    ),
    ("dllm_algorithm", (None,), "diffusion language models are not supported with --kv-pool ragged"),
    (
        "kv_cache_dtype",
        ("auto", *NAMED_KV_DTYPES),
        "of quantised KV caches --kv-pool ragged supports FP8; use --kv-cache-dtype fp8_e4m3, fp8_e5m2 or auto",
    ),
)


def refuse_flags(server_args: Any, options: RaggedOptions) -> None:
    """Raise RaggedConfigError for the first SGLang flag that does not go with --kv-pool ragged."""
    if server_args.page_size not in (None, options.segment):
        raise RaggedConfigError(
            f"--page-size {server_args.page_size} differs from the segment length {options.segment}: a page is a "
            f"segment; drop --page-size, or set --ragged-segment"
        )
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % options.segment:
        raise RaggedConfigError(
            f"--chunked-prefill-size {chunk} is not a multiple of the segment length {options.segment}: "
            f"set it to {max(chunk // options.segment, 1) * options.segment}, or drop it"
        )
    check_limits(options.segment, server_args.max_running_requests, server_args.max_total_tokens)
    if server_args.nnodes > 1 and not server_args.dist_init_addr:
        raise RaggedConfigError(
            f"--nnodes {server_args.nnodes} needs an address of the first node: give all nodes the same "
            f"--dist-init-addr HOST:PORT"
        )
    refuse_graphs(server_args, options)
    refuse_values(server_args, REFUSED_VALUES)


def refuse_port(view: Any) -> None:
    """Raise RaggedConfigError if another process listens on the server's port.

    SGLang would notice only after calibration. Engines have no port.

    Args:
        view: SGLang's resolved settings.
    """
    from sglang.srt.utils.network import is_port_available

    if view.node_rank == 0 and view.port and not is_port_available(view.port):
        raise RaggedConfigError(f"port {view.port} is in use; stop what listens on it, or take another --port")


def refuse_unbound_ranks(view: Any) -> None:
    """Raise RaggedConfigError for more ranks on a CPU than NUMA nodes, unless their cores are named."""
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


def refuse_small(kv_bytes: int, plan: ServingPlan, start: ModelStart) -> None:
    """Raise RaggedConfigError for a KV budget that holds less than one request, in the words of the workers.

    Args:
        kv_bytes: --kv-bytes, of each rank.
    """
    chunk, limits = start.view.chunked_prefill_size, (start.view.max_running_requests, start.view.max_total_tokens)
    prefill = Prefill(chunk if chunk is not None and chunk > 0 else start.model.context_len, start.view)
    queries = beside_cache(start.kv_dtype, start.model.dtype)
    fit_all_ranks(plan, prefill, start.kv_dtype, queries, kv_bytes, *limits)
