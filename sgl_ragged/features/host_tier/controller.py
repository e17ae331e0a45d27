"""The host tier: SGLang's HiCache over rows of slabs (`--enable-hierarchical-cache`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.cache_controller import device_module
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackBuildResult, StackStrategy, build_pool_entry
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_per_host
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.codecs import make_codec
from sgl_ragged.features.host_tier.host_pool import DIRECT_LAYOUT, KERNEL_LAYOUT, RaggedHostPool, tier_row_bytes
from sgl_ragged.features.host_tier.open_store import open_host_pages
from sgl_ragged.features.host_tier.restore_schedule import LOAD, Rate, StoragePays, recomputed_first
from sgl_ragged.features.host_tier.restoring import Restorer
from sgl_ragged.features.host_tier.tier_meter import HOST, STORAGE, Stopwatch, TierMeter
from sgl_ragged.features.host_tier.tier_plan import TierPlan, refuse_storage
from sgl_ragged.serve.pool import RaggedTokenToKVPool
from sgl_ragged.serve.radix_cache import OpenRadixCache
from sgl_ragged.serve.ranks import least_over_ranks

logger = logging.getLogger(__name__)

STALE_FILE_S = 3600.0
"""Age in seconds at which an unfinished file of a killed server is removed."""


class RaggedCacheController(HybridCacheController):
    """Controller that runs pending seals before slabs are backed up or pages are loaded.

    SGLang counts a page as full one step before its segment is sealed. Without these seals, the page's earlier bytes
    would be backed up, and the pending seal of a freed page would overwrite the slab that is loaded into the page.
    """

    mem_pool_device: RaggedTokenToKVPool

    def __init__(self, *args: Any, mode: str, **more: Any) -> None:
        """mode: one of `host_tier.restore_schedule.MODES`; the other arguments are SGLang's."""
        self.restorer: Restorer = args[0].get_kvcache().attached["tier"]
        self.meter = self.restorer.meter
        self._mode = mode
        self._loading = Stopwatch(Rate(), self.restorer.on_cpu)
        self._storage_pays = StoragePays(mode, self.restorer.prefill.rate)
        super().__init__(*args, **more)

    def _flush_seals(self, forward_stream: Any) -> None:
        """Run pending seals on the stream of the forward passes, for which transfers wait."""
        store = self.mem_pool_device.store
        if forward_stream is None or get_schedule().disable_overlap_schedule:
            # Forward passes then run on the scheduler's stream, for which transfers wait.
            store.flush_pending_seals()
            return
        with device_module.stream(forward_stream):
            store.flush_pending_seals()

    def start_writing(self) -> None:
        if self.write_queue:
            self._flush_seals(self.write_fence_stream)
        super().start_writing()

    def load(self, host_indices: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor | None:
        """Load all but the first segments, and mark these to be computed, if that is faster."""
        device_indices = super().load(host_indices, *args, **more)
        if device_indices is None:
            return None
        rates = self.restorer.prefill.rate, self._loading.rate
        count = recomputed_first(len(host_indices) // self.page_size, self._mode, *rates)
        if self._mode != LOAD:
            # A forward pass runs on all ranks, and measured rates differ between ranks.
            parallel = get_parallel()
            count = least_over_ranks(count, parallel.attn_tp_size, parallel.world_group.cpu_group)
        if count:
            tokens = count * self.page_size
            self.restorer.mark(device_indices[:tokens], host_indices[:tokens])
            operation = self.load_queue[-1]
            operation.host_indices, operation.device_indices = host_indices[tokens:], device_indices[tokens:]
        return device_indices

    def start_loading(self) -> int:
        if not self.load_queue:
            return super().start_loading()
        self._flush_seals(self.load_fence_stream)
        tokens = sum(len(one.host_indices) for one in self.load_queue)
        self.meter.count(HOST, tokens)
        if self.restorer.on_cpu:
            with self._loading.measuring(tokens / self.page_size):
                return super().start_loading()
        producer = super().start_loading()
        done = self.ack_load_queue[-1]
        self._loading.add_events(done.start_event, done.finish_event, tokens / self.page_size)
        return producer

    def _storage_hit_query(self, operation: Any) -> tuple[list[str], int]:
        """Return a request's hits in storage; none if computing is faster than reading."""
        return super()._storage_hit_query(operation) if self._storage_pays() else ([], 0)

    def attach_storage_backend(self, storage_backend: str, *args: Any, **more: Any) -> None:
        # Backends whose keys do not name the model could return slabs of another model, at start and at run time.
        refuse_storage(storage_backend)
        super().attach_storage_backend(storage_backend, *args, **more)
        _remove_unfinished(Path(self.storage_backend.file_path))

    def _generic_page_get(
        self, operation: Any, hash_values: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> int:
        """Read pages of storage up to the first that is missing or damaged, and remove a damaged page."""
        pool, backend = self.storage_host_pool, self.storage_backend
        for count, key in enumerate(hash_values):
            if operation.is_terminated():
                return count
            began = time.perf_counter()
            try:
                page = backend.get(key, pool.get_dummy_flat_data_page())
                if page is None:
                    return count
                pool.set_from_flat_data_page(host_indices[count * self.page_size], page)
            except (OSError, ValueError) as error:
                logger.warning("removing the damaged page %s from storage: %s", key, error)
                _remove(backend, key)
                return count
            self._storage_pays.read.add(1, time.perf_counter() - began)
            self.meter.count(STORAGE, self.page_size)
        return len(hash_values)


def _remove(backend: Any, key: str) -> None:
    """Remove a page from SGLang's file storage, which would skip it when it is written again."""
    name = backend._get_suffixed_key(key)
    Path(backend.file_path, f"{name}.bin").unlink(missing_ok=True)
    if backend.metadata_cache is not None:
        backend.metadata_cache.remove(name)


def _remove_unfinished(folder: Path) -> None:
    """Remove files that killed servers have left half written; running servers have younger files."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > STALE_FILE_S:
                path.unlink()
        except OSError:
            # Another server may have removed the file.
            continue


def host_pages(pool: RaggedTokenToKVPool, row_bytes: int, sized: bool) -> int:
    """Return the rows of this rank's part of the host, without SGLang's padding row; equal on all ranks.

    --hicache-size gives bytes, --hicache-ratio tokens on the host per token on the device. Without either (not `sized`)
    SGLang's default ratio holds, on CPUs up to half of the free memory.

    Args:
        row_bytes: bytes of a row. sized: True if the user gave a size or a ratio.

    Raises:
        RaggedConfigError: the rows do not fit into free memory.
    """
    memory, parallel = get_memory(), get_parallel()
    on_cpu = torch.device(pool.device).type == "cpu"
    # On a CPU host and device share one memory.
    free = available_host_memory_bytes(allow_cgroup_fallback=True) - (
        0 if on_cpu else HICACHE_HOST_MEMORY_RESERVE_BYTES
    )
    free = max(free, 0) // ranks_per_host()
    if memory.hicache_size > 0:
        pages = int(memory.hicache_size * 1e9) // row_bytes
    else:
        pages = int(pool.size * memory.hicache_ratio) // pool.page_size
    if on_cpu and not sized:
        pages = min(pages, free // 2 // row_bytes)
    pages = least_over_ranks(pages, parallel.attn_tp_size, parallel.world_group.cpu_group)
    needed = (pages + 1) * row_bytes
    if pages < 1 or needed > free:
        raise RaggedConfigError(
            f"the host tier needs {needed} bytes for {max(pages, 1)} segments of {row_bytes} bytes, and {free} are "
            f"free for this rank; give a smaller --hicache-size (GB) or --hicache-ratio, or less to --kv-bytes"
        )
    return pages


class RaggedStack(StackStrategy):
    """Strategy for SGLang's HiCache that makes its host pool and controller.

    Args:
        build: `build_stack`, as the worker calls it.
    """

    def __init__(self, build: Callable[..., StackBuildResult]) -> None:
        self._build = build

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return isinstance(kvcache, RaggedTokenToKVPool) and components == {ComponentType.FULL}

    def build(self, **asked: Any) -> StackBuildResult:
        return self._build(**asked)


def build_stack(
    tier: TierPlan,
    *,
    cache: Any,
    kvcache: RaggedTokenToKVPool,
    params: Any,
    server_args: Any,
    load_cache_event: Any,
    storage_backend: str | None = None,
    storage_backend_extra_config: dict | None = None,
    prefetch_threshold: int = 256,
    model_name: str | None = None,
    enable_storage_metrics: bool = False,
) -> StackBuildResult:
    """Make host pool and controller for a ragged pool; all arguments but the first are SGLang's.

    Raises:
        RaggedConfigError: the host pool does not fit, or the storage backend is not supported.
    """
    refuse_storage(storage_backend)
    memory, layout = get_memory(), kvcache.sizes.layout
    codec = make_codec(tier.codec, layout, kvcache.dtype)
    codec.watch(kvcache.store)
    identity = tier.rank_identity(get_parallel().attn_tp_rank, kvcache.store.stored_as)
    row_bytes = tier_row_bytes(kvcache, codec)
    rows, open_pages = host_pages(kvcache, row_bytes, tier.sized), 0
    if isinstance(cache, OpenRadixCache):
        parallel, page_bytes = get_parallel(), kvcache.store.slabs[0].nbytes
        rows, open_pages = open_host_pages(rows, row_bytes, page_bytes, kvcache.open_segments.pages.most)
        # With a lossy codec the number of rows per page differs between ranks.
        rows, open_pages = (
            least_over_ranks(count, parallel.attn_tp_size, parallel.world_group.cpu_group)
            for count in (rows, open_pages)
        )
    layout_name = DIRECT_LAYOUT if memory.hicache_io_backend == "direct" else KERNEL_LAYOUT
    host = RaggedHostPool(kvcache, codec, rows + 1, layout_name, identity)
    open_store = None
    if open_pages:
        cache.below = open_store = host.open_store(kvcache.store, open_pages)
    kvcache.attached["tier"] = Restorer(kvcache, host, TierMeter(kvcache.page_size, row_bytes), open_store)
    layers = layout.num_layers
    group = HostPoolGroup(
        [
            build_pool_entry(
                name=PoolName.KV,
                host_pool=host,
                device_pool=kvcache,
                layer_mapping={layer: layer for layer in range(layers)},
                transfer_layer_id_max=layers,
                is_anchor=True,
            )
        ]
    )
    controller = RaggedCacheController(
        params.token_to_kv_pool_allocator,
        group,
        params.page_size,
        params.tp_cache_group,
        load_cache_event=load_cache_event,
        attn_cp_group=params.attn_cp_cache_group,
        attn_tp_group=params.attn_tp_cache_group,
        pp_group=params.pp_cache_group,
        write_policy=memory.hicache_write_policy,
        io_backend=memory.hicache_io_backend,
        storage_backend=storage_backend,
        prefetch_threshold=prefetch_threshold,
        model_name=model_name,
        storage_backend_extra_config=storage_backend_extra_config,
        transfer_layer_id_max=layers,
        enable_storage_metrics=enable_storage_metrics,
        host_memory_mode=memory.hicache_host_memory_mode,
        mode=tier.restore,
    )
    logger.info(
        "host tier: %d segments of %d bytes (codec %s), %d tokens, %d pages of open segments; identity %s",
        host.page_num - 1,
        row_bytes,
        codec.name,
        (host.page_num - 1) * kvcache.page_size,
        open_pages,
        identity,
    )
    return StackBuildResult(
        host_pool_group=group,
        cache_controller=controller,
        component_host_pools={ComponentType.FULL: host},
        pools_desc="slabs",
        # Declarations would make SGLang read buffers by token, which the pool does not have.
        pool_declarations=(),
    )
