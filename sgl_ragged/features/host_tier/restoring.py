"""Compute segments that the host holds in a forward pass before that of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.runtime_context import get_schedule

from sgl_ragged.features.host_tier.host_pool import RaggedHostPool
from sgl_ragged.features.host_tier.open_store import OpenStore
from sgl_ragged.features.host_tier.restore_schedule import Rate
from sgl_ragged.features.host_tier.tier_meter import RECOMPUTED, Stopwatch, TierMeter
from sgl_ragged.mem_pool.segments import SegmentTable
from sgl_ragged.serve.pool import RaggedTokenToKVPool

DEFAULT_CHUNK = 8192
"""Tokens of a forward pass where --chunked-prefill-size sets no bound."""

WAITS_FOR_NOTHING = -1
"""SGLang's consumer index of batches that wait for no transfer."""


class Restorer:
    """Computation of segments that the host holds, before a request reads them.

    Slots are marked when SGLang allocates their pages. Before the next batch runs, marked segments of its requests are
    computed, and all other marked segments are loaded.

    Args:
        pool: pool of the device.
        host: pool of the host.
        meter: counts segments that are computed.
        open_store: store of open segments on the host; None if there is none.
    """

    def __init__(
        self, pool: RaggedTokenToKVPool, host: RaggedHostPool, meter: TierMeter, open_store: OpenStore | None = None
    ) -> None:
        self.pool = pool
        self._host, self._open = host, open_store
        self.meter = meter
        self._host_pages: dict[int, int] = {}
        self.on_cpu = torch.device(pool.device).type == "cpu"
        self.prefill = Stopwatch(Rate(), self.on_cpu)

    gauges: ClassVar = {"host_open_bytes_in_use": "Bytes of this rank's open segments in the host tier."}
    counters: ClassVar = {
        "restored_segments": "Segments that came back from below the device on this rank: copied from the host, read "
        "from storage to the host, or computed again though the host has them.",
        "restored_bytes": "Bytes that were copied from the host or read from storage on this rank.",
    }
    label: ClassVar = "tier"

    def readings(self) -> Mapping[tuple[str, str], float]:
        """Return metric values by name and label."""
        counts = zip(self.counters, (self.meter.segments, self.meter.bytes), strict=True)
        totals = {(name, way): count for name, ways in counts for way, count in ways.items()}
        held = 0 if self._open is None else self._open.pages_in_use * self._open.page_bytes
        return totals | {("host_open_bytes_in_use", ""): held}

    def settings(self) -> dict[str, Any]:
        """Return the tier's part of /server_info."""
        host = self._host
        pages = host.page_num - 1
        return {
            "codec": host.codec.name,
            "identity": host.identity,
            "host_segments": pages,
            "row_bytes": host.row_bytes,
            "host_bytes": pages * host.row_bytes,
            "host_open_bytes": 0 if self._open is None else self._open.num_pages * self._open.page_bytes,
        }

    def mark(self, device_indices: torch.Tensor, host_indices: torch.Tensor) -> None:
        """Mark segments that will not be loaded, as SGLang's token indices. Waits for the device."""
        slots, host_pages = (self._host.pages_of(indices).tolist() for indices in (device_indices, host_indices))
        self._host_pages.update(zip(slots, host_pages, strict=True))

    def run(self, worker: Any, batch: Any) -> None:
        """Compute the segments that a batch lacks, before its forward pass (SGLang's TpModelWorker, ScheduleBatch)."""
        if not self._host_pages:
            return
        if batch.forward_mode.is_extend_without_speculative():
            for index in range(len(batch.reqs)):
                self._compute_prefix(worker, batch, index)
        if self._host_pages:
            self._host.restore_all(self.pool, list(self._host_pages), list(self._host_pages.values()))
            self._host_pages.clear()

    def _compute_prefix(self, worker: Any, batch: Any, index: int) -> None:
        """Compute the marked segments of a request's prefix, in order."""
        runner, segment = worker.model_runner, self.pool.page_size
        req_pool_index = int(batch.req_pool_indices_cpu[index])
        table = SegmentTable(runner.req_to_token_pool.req_to_token, segment)
        slots = table.row_slots(req_pool_index, -(-batch.prefix_lens[index] // segment)).tolist()
        histories = self.pool.attached.get("history")
        history = None if histories is None else histories.get(req_pool_index)
        # A bounded request's row of the table still names freed pages, which may belong to another request.
        freed: set[int] = set() if history is None else history.returned
        chunk = get_schedule().chunked_prefill_size
        at_once = chunk if chunk is not None and chunk > 0 else DEFAULT_CHUNK
        marked = [slot in self._host_pages and number not in freed for number, slot in enumerate(slots)]
        for first, end in marked_runs(marked):
            # Earlier segments may still be on their way from the host; the first segment has none to wait for.
            worker.set_hicache_consumer(batch.hicache_consumer_index if first else WAITS_FOR_NOTHING)
            for start in range(first * segment, end * segment, at_once):
                runner.forward(alone(runner, batch, index, start, min(start + at_once, end * segment)))
            for slot in slots[first:end]:
                del self._host_pages[slot]
            self.meter.count(RECOMPUTED, (end - first) * segment)


def marked_runs(marked: list[bool]) -> list[tuple[int, int]]:
    """Return [first, end) of each run of True."""
    padded = [False, *marked, False]
    edges = [index for index in range(len(padded) - 1) if padded[index] != padded[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def alone(runner: Any, batch: Any, index: int, start: int, end: int) -> ForwardBatch:
    """Return a forward batch of tokens [start, end) of one request of a batch, without sampling."""
    part, device = copy(batch), runner.device
    part.reqs = [batch.reqs[index]]
    tokens = part.reqs[0].full_untruncated_fill_ids[start:end]
    part.input_ids = torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True)
    part.prefill_input_ids_cpu = None
    part.req_pool_indices = batch.req_pool_indices[index : index + 1]
    part.req_pool_indices_cpu = batch.req_pool_indices_cpu[index : index + 1]
    part.prefix_lens, part.extend_lens, part.extend_num_tokens = [start], [end - start], end - start
    part.seq_lens_cpu, part.seq_lens_sum = torch.tensor([end], dtype=torch.int64), end
    part.seq_lens = part.orig_seq_lens = part.seq_lens_cpu.to(device, non_blocking=True)
    req_pool_index = int(part.req_pool_indices_cpu[0])
    part.out_cache_loc = runner.req_to_token_pool.req_to_token[req_pool_index, start:end].long()
    part.return_logprob, part.top_logprobs_nums, part.token_ids_logprobs = False, None, None
    part.extend_logprob_start_lens, part.extend_input_logprob_token_ids = [end - start], None
    part.is_prefill_only, part.spec_info, part.sampling_info, part.has_grammar = True, None, None, False
    part.multimodal_inputs = [None]
    return ForwardBatch.init_new(
        part, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
    )
