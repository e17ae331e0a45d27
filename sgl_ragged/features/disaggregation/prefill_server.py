"""The prefill server: the description of its memory, and extra pages that are sent with those of segments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.common.conn import CommonKVSender

from sgl_ragged.features.disaggregation.meter import SendMeter
from sgl_ragged.features.disaggregation.pages import RequestPages
from sgl_ragged.features.disaggregation.roles import NAME, PREFILL
from sgl_ragged.launch.plan import WorkerSettings
from sgl_ragged.serve.pool import slab_pool

logger = logging.getLogger(__name__)


class Exchange:
    """Component that a worker of either server attaches to its pool.

    Args:
        pages: pages of the pool's requests.
        agree: returns the agreement (`disaggregation.roles.agreement`).
    """

    def __init__(self, pages: RequestPages, agree: Callable[[], str]) -> None:
        self.pages, self._agree = pages, agree
        self._meter = SendMeter(pages.buffer.page_bytes)
        self.gauges, self.counters, self.label = self._meter.gauges, self._meter.counters, self._meter.label
        self.count, self.readings = self._meter.count, self._meter.readings

    @property
    def agreement(self) -> str:
        # Scales of an FP8 cache are known once the model has been loaded, which is after the pool has been made.
        return self._agree()

    # SGLang calls these methods of the pool; the pool's own raise.

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return addresses, bytes, and bytes per item of all buffers: there is one, whose items are pages."""
        buffer = self.pages.buffer
        return [buffer.address], [buffer.num_bytes], [buffer.page_bytes]

    def get_cpu_copy(self, indices: torch.Tensor, *, req_pool_index: int, **_: Any) -> torch.Tensor:
        return self.pages.copy_to_host(self._slots(indices), req_pool_index, len(indices))

    def load_cpu_copy(self, copy: torch.Tensor, indices: torch.Tensor, *, req_pool_index: int, **_: Any) -> None:
        self.pages.copy_from_host(copy, self._slots(indices), req_pool_index, len(indices))

    def _slots(self, indices: torch.Tensor) -> torch.Tensor:
        segment = self.pages.segment
        return indices[::segment].long() // segment


def exchange_of(kvcache: Any) -> Exchange:
    """Return the `Exchange` that is attached to SGLang's pool."""
    return slab_pool(kvcache).attached[NAME]


def describe_memory(
    serving: WorkerSettings, original: Callable, kv_args: Any, token_to_kv_pool: Any, *args: Any, **more: Any
) -> None:
    """Complete the description of memory that either server gives its transfer engine."""
    original(kv_args, token_to_kv_pool, *args, **more)
    if token_to_kv_pool.store.slabs.device.type == "cpu":
        # SGLang takes every pool for GPU memory, which UCX refuses to register on a machine without one.
        kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)
    if serving.served_plan.settings_of(NAME).mode == PREFILL:
        # SGLang sends it to decode servers, which compare it in `decode_server.agree_first`. SGLang's own comparison
        # would end the server with an error about another model.
        kv_args.kv_layout = exchange_of(token_to_kv_pool).agreement


def send_open_pages(original: Callable, queue: Any, req: Any, *args: Any, **more: Any) -> bool:
    """Have a request's sender send the extra pages of its open segment after the page of its last token.

    SGLang sends a list of pages, and the decode server returns an equally long list of destinations (`decode_server`).
    """
    created = original(queue, req, *args, **more)
    sender = getattr(req, "disagg_kv_sender", None)
    if created and isinstance(sender, CommonKVSender):
        sending = _Sending(exchange_of(queue.token_to_kv_pool), queue.scheduler, req, sender)
        sender.init, sender.send = sending.init, sending.send
    return created


def refuse_other_pools(original: Callable, manager: Any, peer: Any) -> None:
    """Refuse a decode server whose buffers are not pages of this size; each of its requests fails.

    Decode servers with this pool compare agreements first. A decode server with the token pool and equal page size gets
    here, and SGLang's error would end the thread that serves all decode servers.
    """
    own, found = list(manager.kv_args.kv_item_lens), list(peer.dst_kv_item_lens)
    if found == own:
        original(manager, peer)
        return
    logger.error(
        "sgl_ragged: decode server %s has buffers with items of %s bytes, and pages here have %s: start it with "
        "--kv-pool ragged, and the same flags as this one",
        peer.endpoint,
        found,
        own,
    )


class _Sending:
    """Wrap `init` and `send` of one request's sender, to send extra pages as well."""

    def __init__(self, exchange: Exchange, scheduler: Any, req: Any, sender: Any) -> None:
        self._exchange, self._scheduler, self._req = exchange, scheduler, req
        self._init, self._send = sender.init, sender.send
        self._left = 0

    @property
    def _tokens(self) -> int:
        return len(self._req.origin_input_ids)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._left = num_kv_indices
        self._init(num_kv_indices + self._exchange.pages.num_extra(self._tokens), aux_index)

    def send(self, kv_indices: np.ndarray, *args: Any, **more: Any) -> None:
        # Chunks seal before they attend, so only decode steps leave pending seals.
        if self._exchange.pages.unsealed:
            flush_seals(self._exchange.pages, self._scheduler)
        self._left -= len(kv_indices)
        last = self._left == 0
        if last:
            extra = self._exchange.pages.extra(self._req.kv.req_pool_idx, self._tokens)
            kv_indices = np.concatenate([kv_indices, extra.cpu().numpy().astype(kv_indices.dtype)])
        self._send(kv_indices, *args, **more)
        self._exchange.count(len(kv_indices), int(last), self._tokens * last)


def flush_seals(pages: RequestPages, scheduler: Any) -> None:
    """Seal full segments after the running forward passes, and wait for both, because transfers do not wait."""
    device = torch.get_device_module(scheduler.device)
    if not scheduler.enable_overlap:
        pages.flush_seals()
    else:
        with device.stream(scheduler.forward_stream):
            pages.flush_seals()
    device.synchronize()
