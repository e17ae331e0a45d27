"""The benchmark of conversations that come back: what is on which tier, and which returns count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.pools import Pool
from benchmarks.harness.results import Results
from benchmarks.multi_turn.__main__ import parser
from benchmarks.multi_turn.returning import tables
from benchmarks.multi_turn.returning.results import Held, Returns
from benchmarks.multi_turn.returning.servers import check_bytes
from benchmarks.multi_turn.returning.shape import check
from benchmarks.multi_turn.returning.sizes import Heads, PoolPages, held, needed_to_evict
from benchmarks.multi_turn.returning.stages import TIERS_STAGE, Traffic
from benchmarks.multi_turn.returning.token_server import back_up_layers, load_layer, runs
from benchmarks.multi_turn.returning.variants import Variant
from benchmarks.multi_turn.returning.visit import DEVICE, DISK, HOST, RECOMPUTED, TIERS, Visit

HEADS = Heads(layers=4, kv_heads=8, head_dim=64, itemsize=4)
MIB = 2**20


def pages(ratio: float | None, kv_bytes: int = 64 * MIB) -> PoolPages:
    return PoolPages.of(Pool(ratio), HEADS, 256, kv_bytes)


def test_a_token_has_the_bytes_of_its_keys_and_values():
    assert HEADS.token_bytes == 2 * 4 * 8 * 64 * 4
    assert pages(None) == PoolPages(page=256, page_bytes=256 * HEADS.token_bytes, device=16)


def test_a_ragged_pool_holds_as_many_more_pages_as_its_slabs_are_smaller():
    full, half = pages(1.0), pages(0.5)
    assert half.page_bytes * 2 == full.page_bytes == pages(None).page_bytes
    # What lies beside requests costs a page; another of each is SGLang's padding page.
    assert (full.device, half.device) == (64 // 4 - 2, 64 // 2 - 2)


@pytest.mark.parametrize("ratio", [None, 1.0, 0.5, 0.3])
@pytest.mark.parametrize("host", [128 * MIB, 320 * MIB, 321 * MIB + 5])
def test_hosts_have_the_same_bytes_whatever_a_page_takes(ratio, host):
    one = pages(ratio)
    # As SGLang rounds.
    got = int(one.device * one.page * one.host_ratio(host)) // one.page
    assert got == one.host(host)
    assert host - one.page_bytes < got * one.page_bytes <= host


def test_caches_hold_whole_pages_and_not_the_newest_token():
    assert [held(tokens, 256) for tokens in (1, 256, 257, 3216)] == [0, 0, 256, 3072]
    assert held(3216, 1) == 3215


def hits(capacity: int, pages_each: int, visits: Sequence[int]) -> list[int]:
    """Pages of each visited conversation that a tier of `capacity` pages still holds when it is visited.

    A conversation's pages are dropped from its end on, and conversations in the order of their last visits.
    """
    kept: OrderedDict[int, int] = OrderedDict()
    found = []
    for visited in visits:
        found.append(kept.pop(visited, 0))
        kept[visited] = min(pages_each, capacity)
        excess = sum(kept.values()) - capacity
        while excess > 0:
            oldest = next(iter(kept))
            dropped = min(excess, kept[oldest])
            kept[oldest] -= dropped
            excess -= dropped
            if not kept[oldest]:
                del kept[oldest]
    return found


@pytest.mark.parametrize("device", range(5, 40))
@pytest.mark.parametrize("each", [1, 3, 5])
def test_as_many_conversations_as_needed_are_evicted_in_turns_and_one_less_is_not(device, each):
    needed = needed_to_evict(device, each)
    turns = [number % needed for number in range(4 * needed)]
    assert hits(device, each, turns) == [0] * len(turns)
    fewer = [number % (needed - 1) for number in range(4 * needed)]
    assert max(hits(device, each, fewer)) > 0


def test_what_was_used_last_stays_and_conversations_lose_their_end_first():
    # Seven pages for three conversations of three: the first one keeps one page.
    assert hits(7, 3, [0, 1, 2, 0]) == [0, 0, 0, 1]
    assert hits(9, 3, [0, 1, 2, 0, 1, 2]) == [0, 0, 0, 3, 3, 3]
    # The second visit makes the first conversation the youngest.
    assert hits(6, 3, [0, 1, 0, 2, 0, 1]) == [0, 0, 3, 0, 3, 0]


def test_the_defaults_evict_from_every_device():
    options = parser("return").parse_args([])
    variants = [Variant.parse(text, options.segment) for text in options.pools.split(",")]
    check(options, variants, HEADS, Traffic.of(options))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--conversations", "5"], "--conversations 6"),
        (["--kv-bytes", "48MiB"], "more --kv-bytes"),
        (["--host-bytes", "200MiB"], "do not hold all conversations of token"),
        (["--prompt-length", "200", "--pools", "ragged@0.3"], "no whole segment"),
        (["--returns", "0"], "--returns must be at least 1"),
        (["--pools", "token,token"], "measured once"),
        (["--pools", "token,ragged@0.3/recompute"], "needs ragged@0.3 beside it"),
    ],
)
def test_what_would_not_measure_its_tiers_is_refused(flags, said):
    options = parser("return").parse_args(flags)
    variants = [Variant.parse(text, options.segment) for text in options.pools.split(",")]
    with pytest.raises(SettingsError, match=said):
        check(options, variants, HEADS, Traffic.of(options))


def test_texts_are_the_same_from_the_same_seed_and_messages_differ():
    one = Traffic(conversations=2, prompt=20, answer=4, message=5, returns=2, seed=3)
    assert one.first(0) == one.first(0) != one.first(1)
    assert one.message_of(1) != one.message_of(2)
    assert one.first(0) != replace(one, seed=4).first(0)
    assert (len(one.first(0)), len(one.message_of(1))) == (20, 5)


def a_visit(cell: str, device: int = 0, host: int = 0, storage: int = 0, **more: object) -> Visit:
    plain = Visit("token", cell, 0, 0.5, 900, 768, device, host, storage)
    return replace(plain, **more)  # type: ignore[arg-type]


def test_a_return_counts_where_its_cell_says_only():
    found = {DEVICE: (768, 0, 0), HOST: (0, 768, 0), DISK: (0, 0, 768), RECOMPUTED: (0, 0, 0)}
    for cell in TIERS:
        for other, where in found.items():
            assert a_visit(cell, *where).in_place == (cell == other)
    assert not a_visit(HOST, 256, 512).in_place
    assert not a_visit(HOST, 0, 512).in_place


def results(tmp_path) -> Returns:
    made = Results(tmp_path / "found.json", "multi_turn.returning", {"limit": 1})
    visits = []
    for variant, scale in (("token", 1.0), ("ragged@0.3", 0.5), ("ragged@0.3/recompute", 0.6)):
        for number in range(3):
            for cell, base, where in (
                (DEVICE, 0.2, (768, 0, 0)),
                (HOST, 0.3, (0, 768, 0)),
                (RECOMPUTED, 1.0, (0, 0, 0)),
            ):
                if "/" not in variant or cell in (DEVICE, HOST):
                    taken = scale * base * (1 + number / 10)
                    visits.append(a_visit(cell, *where, variant=variant, conversation=number, ttft_s=taken))
    visits.append(a_visit(HOST, 256, 512, ttft_s=99.0))
    servers = [Held(TIERS_STAGE, variant, 100, 200, 10, 20, {}) for variant in ("token", "ragged@0.3")]
    made.add("tiers", {"servers": servers, "visits": visits})
    again = Returns.of(Results.load(made.path, "multi_turn.returning"))
    assert (again.servers, again.visits) == (servers, visits)
    return again


def test_tables_hold_medians_and_ratios_of_the_returns_that_count(tmp_path):
    found = results(tmp_path)
    rows = {row[:2]: row[2:] for row in tables.by_tier(found).rows}
    assert rows["token", HOST] == ("3", "330", "300", "360", "0.30", "1.00")
    assert rows["ragged@0.3", HOST] == ("3", "165", "150", "180", "0.30", "0.50")
    # Held against the same pool's recomputing, of which it has no returns of its own.
    assert rows["ragged@0.3/recompute", HOST] == ("3", "198", "180", "216", "0.36", "0.60")
    assert ("ragged@0.3/recompute", RECOMPUTED) not in rows
    added = {row[0]: row[2] for row in tables.restored_above_device(found).rows}
    assert added == {"token": "110", "ragged@0.3": "55", "ragged@0.3/recompute": "66"}
    assert len(tables.strays(found)) == 1
    assert "256 were found on the device, 512 on the host" in tables.strays(found)[0]


def test_servers_of_different_bytes_are_refused():
    one = Held("tiers", "token", 100, 200, 10, 20, {})
    check_bytes([one, replace(one, variant="ragged@0.3", device_bytes=105, host_bytes=190), replace(one, host_bytes=0)])
    with pytest.raises(SettingsError, match=r"host bytes are token 200, ragged@0\.3 170"):
        check_bytes([one, replace(one, variant="ragged@0.3", host_bytes=170)])


def test_pages_that_follow_each_other_are_one_copy():
    src, dst = torch.tensor([4, 5, 6, 9, 1, 2]), torch.tensor([0, 1, 2, 3, 7, 9])
    assert runs(src, dst) == [(4, 0, 3), (9, 3, 1), (1, 7, 1), (2, 9, 1)]
    assert runs(src[:0], dst[:0]) == []


@pytest.mark.parametrize("page", [1, 4])
def test_tokens_come_back_from_the_host_of_the_token_pool_as_they_were(page):
    layers, heads, dim, count = 3, 2, 5, 6
    device = [torch.randn(page * 10, heads, dim) for _ in range(2 * layers)]
    before = [one.clone() for one in device]
    host = torch.zeros(2, 12, layers, page, heads, dim)

    def indices(pages: list[int]) -> torch.Tensor:
        return (torch.tensor(pages)[:, None] * page + torch.arange(page)).flatten()

    here, there, back = indices([3, 4, 5, 1, 8, 9]), indices([2, 3, 7, 8, 0, 1]), indices([0, 1, 2, 7, 6, 5])
    back_up_layers(src_ptrs=device, dst_ptrs=[host[0], host[1]], src_indices=here, dst_indices=there, page_size=page)
    for one in device:
        one.zero_()
    for layer in range(layers):
        load_layer(
            src_ptrs=[host[0], host[1]],
            dst_ptrs=[device[layer], device[layers + layer]],
            src_indices=there,
            dst_indices=back,
            layer_id=layer,
            page_size=page,
        )
    for now, then in zip(device, before, strict=True):
        assert torch.equal(now[back], then[here])
        assert torch.count_nonzero(now.flatten(1).any(1)) == count * page
