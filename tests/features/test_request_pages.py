"""Pages of a request that go from one pool to another: decode goes on there as it would have here, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_ragged.attention.operations import commit
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.features.disaggregation.decode_server import destinations
from sgl_ragged.features.disaggregation.meter import SendMeter
from sgl_ragged.features.disaggregation.pages import RequestPages
from sgl_ragged.features.disaggregation.prefill_server import Exchange, refuse_other_pools
from sgl_ragged.features.disaggregation.roles import NAME, agreement, disagreement
from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from tests.pool_machine import LAYOUT, SEGMENT, TRUNK, kv

SLOTS, ROWS = 40, 4
TOKENS = [*TRUNK.tolist(), *TRUNK.tolist()]


class Server:
    """A pool with one request in `row`, whose segments have these slots, and whose open ones take pages from `beside`
    on. h2o scores by queries of all tokens, which lie in the pages."""

    def __init__(self, row: int, slots: list[int], beside: int) -> None:
        self.store = SlabStore(LAYOUT, get_scorer("h2o"), SLOTS, ROWS, torch.float32, "cpu")
        self.open, self.operations = OpenSegments(self.store), TorchOps(self.store)
        self.row, self.slots, self.next = row, torch.tensor(slots), beside
        self.table = torch.zeros((ROWS, len(slots) * SEGMENT), dtype=torch.int32)
        self.table[row] = (self.slots[:, None] * SEGMENT + torch.arange(SEGMENT)).flatten()
        self.pages = RequestPages(self.open)

    def allocate(self, begin: int, end: int) -> None:
        self.open.extend([self.row], [begin], [end], self._take(self.open.extend_demand([begin], [end])))

    def prefill(self, length: int) -> None:
        for begin in range(0, length, 2 * SEGMENT):
            end = min(begin + 2 * SEGMENT, length)
            self.allocate(begin, end)
            self._describe()
            batch = self.operations.describe_extend(self.table, torch.tensor([self.row]), [begin], [end - begin])
            self._compute(self.operations.extend, batch, begin, end)

    def decode(self, begin: int, end: int) -> torch.Tensor:
        """[end - begin, layers, heads, 1, d]: what attention gives for tokens that are decoded one by one."""
        found = []
        for length in range(begin + 1, end + 1):
            self.open.decode([self.row], [length], self._take(self.open.decode_demand([length])))
            self._describe()
            rows, lengths = torch.tensor([self.row]), torch.tensor([length])
            batch = self.operations.describe_decode(self.table, rows, lengths, lengths)
            commit(self.store, self.table, rows, [length])
            found.append(torch.stack(self._compute(self.operations.decode, batch, length - 1, length), dim=1))
        return torch.cat(found)

    def _take(self, count: int) -> torch.Tensor:
        self.next += count
        assert self.next <= SLOTS
        return torch.arange(self.next - count, self.next)

    def _describe(self) -> None:
        self.store.begin_batch()
        self.store.flush_pending_seals()

    def _compute(self, operation, batch, begin: int, end: int) -> list[torch.Tensor]:
        content = kv(TOKENS[begin:end], begin)
        return [
            operation(layer, keys[:, :, None], keys, values, batch, keys)
            for layer in range(LAYOUT.num_layers)
            for keys, values in [(content[:, layer, 0], content[:, layer, 1])]
        ]


@pytest.mark.parametrize("length", [1, 20, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT - 2, 3 * SEGMENT, 130])
def test_decode_goes_on_in_another_pool(length):
    """Other slots, another row, other extra pages; across the next border, so that what is sealed there is the same."""
    here, there = Server(1, [3, 5, 4, 9, 8], 10), Server(2, [7, 6, 2, 3, 1], 20)
    here.prefill(length)
    there.allocate(0, length)
    segments = -(-length // SEGMENT)
    sent = here.pages.copy_to_host(here.slots[:segments], here.row, length)
    assert len(sent) == segments + here.pages.num_extra(length)
    assert sent.nbytes == here.pages.num_bytes(length)
    there.pages.copy_from_host(sent, there.slots[:segments], there.row, length)
    end = (length // SEGMENT + 1) * SEGMENT + 3
    expected, found = here.decode(length, end), there.decode(length, end)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # It would not have gone on like that from nothing.
    assert not torch.equal(Server(2, [7, 6, 2, 3, 1], 20).decode(length, end), expected) or length == 0


def test_a_full_segment_is_sealed_before_it_is_copied_and_one_that_is_filled_meanwhile_is_not():
    server = Server(1, [3, 5, 4], 10)
    server.prefill(SEGMENT - 2)
    server.decode(SEGMENT - 2, SEGMENT - 1)
    before = server.pages.copy_to_host(server.slots[:1], 1, SEGMENT - 1)
    server.decode(SEGMENT - 1, SEGMENT)
    assert server.pages.unsealed
    # A step on its way has filled the segment, and its token will be dropped: all but that is as it was.
    open_still = server.pages.copy_to_host(server.slots[:1], 1, SEGMENT - 1)
    assert torch.equal(open_still[before != 0], before[before != 0])
    assert server.pages.unsealed
    sealed = server.pages.copy_to_host(server.slots[:1], 1, SEGMENT)
    assert not server.pages.unsealed
    assert len(sealed) == 1
    torch.testing.assert_close(sealed[0], server.store.slabs[3])


def test_what_is_pending_is_settled_before_pages_are_given_away():
    """A request that ends with its segment leaves a seal for a page that may be another's by then."""
    server = Server(1, [3, 5, 4], 10)
    server.prefill(SEGMENT - 1)
    server.decode(SEGMENT - 1, SEGMENT)
    server.open.release(1)
    server.open.extend([2], [0], [20], torch.arange(30, 30 + server.open.pages.extra(20)))
    exchange = Exchange(server.pages, lambda: "ragged-0")
    queue = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(attached={NAME: exchange}),
        scheduler=SimpleNamespace(enable_overlap=True, device="cpu", forward_stream=torch.cpu.current_stream()),
    )
    request = SimpleNamespace(req=SimpleNamespace(kv=SimpleNamespace(req_pool_idx=2, kv_committed_len=20)))
    found = destinations(lambda *_: np.array([3], np.int32), queue, request, None, SEGMENT)
    assert found.tolist() == [3, *range(30, 30 + server.open.pages.extra(20))]
    assert found.dtype == np.int32
    server.store.slabs[3] = 7
    server.store.flush_pending_seals()
    assert (server.store.slabs[3] == 7).all()


def test_who_may_send():
    one = agreement("0a1", "torch.float32 []", [4096], 19)
    assert disagreement(one, one, 2, 2) is None
    for other in (
        agreement("0a2", "torch.float32 []", [4096], 19),
        agreement("0a1", "torch.float16 []", [4096], 19),
        agreement("0a1", "torch.float32 []", [4097], 19),
        agreement("0a1", "torch.float32 []", [4096], 20),
    ):
        assert "another plan" in (disagreement(one, other, 2, 2) or "")
    assert "2 tensor-parallel ranks and this one 4" in (disagreement(one, one, 4, 2) or "")
    for other in (None, "another-layout"):
        assert "another KV pool" in (disagreement(one, other, 1, 1) or "")


def test_a_decode_server_with_another_pool_is_not_taken_up(caplog):
    taken: list[object] = []
    manager = SimpleNamespace(kv_args=SimpleNamespace(kv_item_lens=[4096]))
    peers = [SimpleNamespace(dst_kv_item_lens=lens, endpoint="other") for lens in ([4096], [4096, 4096], [512] * 8)]
    for peer in peers:
        refuse_other_pools(lambda _, one: taken.append(one), manager, peer)
    assert taken == peers[:1]
    assert [record.message.count("start it with --kv-pool ragged") for record in caplog.records] == [1, 1]


def test_what_is_sent_is_counted():
    meter = SendMeter(100)
    meter.count(3)
    meter.count(2, requests=1, tokens=250)
    assert meter.readings() == {("sent_requests", ""): 1, ("sent_tokens", ""): 250, ("sent_bytes", ""): 500}
    assert {name for name, _ in meter.readings()} == meter.counters.keys()
