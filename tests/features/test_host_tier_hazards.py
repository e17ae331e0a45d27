"""Seals that are still to come when slabs are copied: SGLang's own allocator and cache controller, our pools."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_pool_entry
from sglang.srt.mem_cache.pool_host import HostPoolGroup

from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.features.host_tier import controller, restoring
from sgl_ragged.features.host_tier.codecs import CODECS
from sgl_ragged.features.host_tier.controller import RaggedCacheController
from sgl_ragged.features.host_tier.host_pool import DIRECT_LAYOUT, RaggedHostPool
from sgl_ragged.features.host_tier.restoring import Restorer, marked_runs
from sgl_ragged.features.host_tier.tier_meter import TierMeter
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.backend import RaggedAttnBackend
from sgl_ragged.serve.pool import RaggedTokenToKVPool
from tests.open_segments import full_segments

SEGMENT, DIM = 64, 8
LAYOUT = SlabLayout(kept=np.array([[16, 32], [48, 16]]), head_dim=DIM, segment=SEGMENT)
OPEN_PAGES = 3
"""Of an open segment beside its own, its stage among them: they are not the allocator's here."""


class Tier:
    """A device pool of a few pages with a host tier, and what fills them.

    score: by which segments leave bounded histories, if any do.
    """

    def __init__(self, device_pages: int, score: str | None = None) -> None:
        sizes = PoolSizes(LAYOUT, 4, OpenPages(SEGMENT, 28), num_slots=device_pages + 1 + OPEN_PAGES, num_rows=3)
        self.beside = device_pages + 1
        self.store = SlabStore(
            LAYOUT, get_scorer("keydiff"), sizes.num_slots, sizes.num_rows, torch.float32, "cpu", pages=sizes.open_pages
        )
        self.pool = RaggedTokenToKVPool(sizes, self.store, device="cpu", layer_numbers=range(2))
        if score is not None:
            self.scores = SegmentScores(self.store, score)
            self.table = torch.zeros((3, 4 * SEGMENT), dtype=torch.int32)
            histories = Histories(HistoryBound(3, score), self.table, SEGMENT, self.scores)
            self.pool.attached["history"] = self.pool.views = histories
        self.allocator = PagedTokenToKVPoolAllocator(
            device_pages * SEGMENT, SEGMENT, torch.float32, "cpu", self.pool, need_sort=False
        )
        codec = CODECS["exact"](LAYOUT, torch.float32)
        self.host = RaggedHostPool(self.pool, codec, 9, DIRECT_LAYOUT, "identity")
        self.pool.attached["tier"] = Restorer(self.pool, self.host, TierMeter(SEGMENT, self.host.row_bytes))
        entry = build_pool_entry(
            name=PoolName.KV,
            host_pool=self.host,
            device_pool=self.pool,
            layer_mapping={0: 0, 1: 1},
            transfer_layer_id_max=2,
            is_anchor=True,
        )
        self.controller = RaggedCacheController(
            self.allocator, HostPoolGroup([entry]), SEGMENT, None, None, io_backend="direct", mode="load"
        )

    def filled_slab(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A page with a sealed segment: its tokens' indices, and what it holds."""
        indices = self.allocator.alloc(SEGMENT)
        slab = self.store.slabs[int(indices[0]) // SEGMENT]
        slab.normal_()
        return indices, slab.clone()

    def filled_tail(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A page whose segment decode has just filled: its indices, and what its slab has to be."""
        indices = self.allocator.alloc(SEGMENT)
        tokens = torch.randn(1, 2, 2, 2, SEGMENT, DIM)
        which = torch.tensor([1]), indices[:1] // SEGMENT, torch.tensor([0])
        segment = full_segments(self.store, *which, tokens, self.beside)
        self.store.seal(None, segment)
        slab = self.store.slabs[int(indices[0]) // SEGMENT]
        wanted = slab.clone()
        # Open again: what its stage holds is in its own page.
        slab.copy_(self.store.slabs[int(segment.pages[0, 0])])
        self.store.defer_seals(segment)
        return indices, wanted


@pytest.fixture(autouse=True)
def _serial(monkeypatch):
    monkeypatch.setattr(controller, "get_schedule", lambda: SimpleNamespace(disable_overlap_schedule=True))


def test_a_page_is_sealed_before_it_is_backed_up():
    tier = Tier(device_pages=3)
    indices, wanted = tier.filled_tail()
    rows = tier.controller.write(indices)
    tier.controller.start_writing()
    row = tier.host.kv_buffer[int(rows[0]) // SEGMENT]
    assert torch.equal(row.view(torch.float32), wanted)


def test_a_freed_page_is_not_sealed_over():
    """It was a duplicate of another request's, freed while its seal was still to come, and is loaded to."""
    tier = Tier(device_pages=2)
    indices, content = tier.filled_slab()
    rows = tier.controller.write(indices)
    tier.controller.start_writing()
    duplicate, _ = tier.filled_tail()
    tier.allocator.free(duplicate)
    loaded = tier.controller.load(rows)
    assert torch.equal(loaded, duplicate), "no other page is free"
    tier.controller.start_loading()
    tier.store.flush_pending_seals()
    assert torch.equal(tier.store.slabs[int(loaded[0]) // SEGMENT], content)


def test_what_no_request_of_a_batch_reads_is_loaded_after_all():
    tier = Tier(device_pages=4)
    indices, content = tier.filled_slab()
    rows = tier.controller.write(indices)
    tier.controller.start_writing()
    device = tier.allocator.alloc(SEGMENT)
    tier.pool.attached["tier"].mark(device, rows)
    tier.pool.attached["tier"].run(
        None, SimpleNamespace(forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: False))
    )
    assert torch.equal(tier.store.slabs[int(device[0]) // SEGMENT], content)


def test_a_page_that_was_given_back_is_not_computed_for_who_had_it(monkeypatch):
    """A bounded request still names it in its row of the table; it has been marked for another request by then."""
    monkeypatch.setattr(restoring, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=SEGMENT))
    tier = Tier(device_pages=4, score="value_key_norm")
    indices, content = tier.filled_slab()
    rows = tier.controller.write(indices)
    tier.controller.start_writing()
    device = tier.allocator.alloc(SEGMENT)
    history = tier.pool.attached["history"].advance(1, 4)
    (left,) = history.left
    tier.table[1, left * SEGMENT : (left + 1) * SEGMENT] = device
    history.returned.add(left)
    tier.pool.attached["tier"].mark(device, rows)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
        reqs=[None],
        req_pool_indices_cpu=torch.tensor([1]),
        prefix_lens=[4 * SEGMENT],
    )
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=tier.table))
    tier.pool.attached["tier"].run(SimpleNamespace(model_runner=runner), batch)
    assert torch.equal(tier.store.slabs[int(device[0]) // SEGMENT], content)


def test_scores_come_back_with_their_segments():
    """From the host, and from a stored page in another row; those of a segment that was still to be sealed."""
    tier = Tier(device_pages=4, score="value_key_norm")
    indices, _ = tier.filled_tail()
    slot = indices[:1] // SEGMENT
    wanted = tier.scores.values[slot].clone()
    assert wanted.min() > 0
    tier.scores.values.zero_()
    rows = tier.controller.write(indices)
    tier.controller.start_writing()
    tier.scores.values.fill_(7.0)

    loaded = tier.controller.load(rows)
    tier.controller.start_loading()
    assert loaded[0] != indices[0]
    assert torch.equal(tier.scores.values[loaded[:1] // SEGMENT], wanted)
    assert (tier.scores.values == 7).all(dim=1).sum() == len(tier.scores.values) - 1, "no other was written"

    page = tier.host.get_data_page(rows[0])
    assert len(page) == len(tier.host.get_dummy_flat_data_page())
    other = tier.host.alloc(SEGMENT)
    tier.host.set_from_flat_data_page(other[0], page)
    device = tier.allocator.alloc(SEGMENT)
    tier.pool.attached["tier"].mark(device, other)
    tier.pool.attached["tier"].run(
        None, SimpleNamespace(forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: False))
    )
    assert torch.equal(tier.scores.values[device[:1] // SEGMENT], wanted)
    assert torch.equal(tier.store.slabs[device[0] // SEGMENT], tier.store.slabs[slot[0]])


def test_pages_without_scores_are_those_of_servers_without_them():
    plain, scored = Tier(device_pages=2), Tier(device_pages=2, score="value_key_norm")
    assert plain.host.row_bytes == plain.host.codec.row_bytes
    assert scored.host.row_bytes == plain.host.row_bytes + 2 * 4
    with pytest.raises(ValueError, match="not a whole page"):
        scored.host.set_from_flat_data_page(0, plain.host.get_data_page(0))


def test_runs():
    assert marked_runs([]) == []
    assert marked_runs([True]) == [(0, 1)]
    assert marked_runs([False, True, True, False, True]) == [(1, 3), (4, 5)]


def test_a_layer_is_not_read_before_it_has_come_from_the_host():
    said = []
    pool = SimpleNamespace(
        layer_transfer_counter=SimpleNamespace(wait_until=lambda layer: said.append(("wait", layer)))
    )
    heads = (torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), None)

    def operation(layer: int, queries: torch.Tensor, *_: object) -> torch.Tensor:
        said.append(("read", layer))
        return queries

    layer, numbers = SimpleNamespace(layer_id=7), {7: 3}
    backend = SimpleNamespace(
        pool=pool, _behind={3: []}, layer_indices=numbers, forward_metadata=None, _heads=lambda *_: heads
    )
    RaggedAttnBackend._attend(backend, operation, None, None, None, layer, None, None, None)
    assert said == [("wait", 3), ("read", 3)]
