"""Overlays, what pivots name, and random lives of the reservoir."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.drift import attended, candidates, median_overlap, spread, top_tokens
from sgl_ragged.features.retrieval.overlay import Overlays, add_overlay, attend_overlay
from sgl_ragged.features.retrieval.reservoir import NOWHERE, Reservoir
from sgl_ragged.features.retrieval.roles import ELSEWHERE, HeadRoles
from sgl_ragged.features.retrieval.settings import Retrieval
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from tests.examples import examples
from tests.harness import TORCH
from tests.open_segments import full_segments
from tests.oracle import Tokens, kept_tokens
from tests.overlaid import check_overlays

SEGMENT, DIM, HEADS, LAYERS, SLOTS = 64, 8, 3, 2, 6
KEPT = np.array([[16, 64, 32], [32, 16, 48]])
SATELLITES = ((0, 2), (1,))
OPEN_PAGES = 2
"""Of an open segment beside its own, its stage among them; they are the last."""


def seal(store: SlabStore, slot: int, number: int, tokens: torch.Tensor) -> None:
    """A segment of tokens [layers, 2 (K, V), heads, S, d]."""
    which = torch.tensor([1]), torch.tensor([slot]), torch.tensor([number])
    store.seal(None, full_segments(store, *which, tokens[None], SLOTS))


def softmax_over(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float):
    logits = queries @ keys.T * scale
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def test_heads_attend_to_slabs_tails_and_overlays():
    check_overlays(TORCH, [3 * SEGMENT + 7, 2 * SEGMENT, 5 * SEGMENT + 1])


def test_overlay_and_the_rest_are_attention_to_both():
    """Two tokens, three heads of which two have overlays, one of these empty."""
    rng = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(shape, generator=rng) for shape in ((2, 3, 2, DIM), (3, 7, DIM), (3, 7, DIM)))
    fetched = torch.randn((2, 2, 5, 2 * DIM), generator=rng)
    counts, heads, scale = torch.tensor([[3, 0], [5, 0]]), torch.tensor([2, 0]), 0.3
    both = [[softmax_over(queries[t, h], keys[h], values[h], scale) for h in range(3)] for t in range(2)]
    output = torch.stack([torch.stack([out for out, _ in line]) for line in both])
    lse = torch.stack([torch.stack([log for _, log in line]) for line in both])
    before = output.clone()
    found, sums = attend_overlay(queries[:, heads], fetched, counts, scale)
    add_overlay(output, lse, heads, found, sums, None)
    torch.testing.assert_close(output[:, :2], before[:, :2])
    for token, count in enumerate((3, 5)):
        own_keys, own_values = fetched[token, 0, :count].chunk(2, dim=-1)
        merged = torch.cat([keys[2], own_keys]), torch.cat([values[2], own_values])
        expected, log = softmax_over(queries[token, 2], *merged, scale)
        torch.testing.assert_close(output[token, 2], expected)
        torch.testing.assert_close(lse[token, 2], log)


def test_cleared_overlays_count_for_nothing():
    overlays = Overlays(3, 2, 4, DIM, torch.float32, torch.device("cpu"))
    overlays.install(1, slice(0, 2), torch.ones(2, 4, 2 * DIM), torch.tensor([4, 1]))
    assert overlays.counts.tolist() == [[0, 0], [4, 1], [0, 0]]
    overlays.clear(1)
    assert not overlays.counts.any()


def test_attention_of_a_pivot():
    """The largest of its query heads, with all that it attends to in the denominator."""
    keys = torch.tensor([[1.0], [0.0], [2.0]])
    queries, lse = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[3.0, 1.0]])
    expected = [[max(math.exp(1 - 3), math.exp(-1 - 1)), max(math.exp(-3), math.exp(-1)), math.exp(2 - 3)]]
    torch.testing.assert_close(attended(queries, lse, keys, 1.0, 9), torch.tensor(expected))


def test_nobody_attends_to_what_comes_later():
    """A segment that ended within the queries has keys behind some of them."""
    keys, queries = torch.zeros(5, 1), torch.zeros(3, 1, 1)
    found = attended(queries, torch.zeros(3, 1), keys, 1.0, 2)
    assert found.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_tokens_behind_an_attended_one_are_named_too():
    weights = torch.tensor([0.8, 0, 0, 0, 0, 0, 0.3])
    torch.testing.assert_close(spread(weights), torch.tensor([0.8, 0.4, 0.2, 0.1, 0.05, 0, 0.3]))
    assert candidates(weights[None].repeat(2, 1), 4).tolist() == [0, 1, 6, 2]
    assert candidates(weights[None], 99).shape == (7,)


def test_overlap_of_what_is_attended_to_and_what_was_fetched():
    tops = top_tokens(torch.tensor([[0.5, 0.4, 0.1, 0.0], [0.0, 0.1, 0.4, 0.5], [0.4, 0.0, 0.5, 0.1]]), 2)
    assert [sorted(one) for one in tops.tolist()] == [[0, 1], [2, 3], [0, 2]]
    assert median_overlap(tops, torch.tensor([0, 1])) == 0.5
    assert median_overlap(tops[:0], torch.tensor([0, 1])) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("overlay", 0, "overlay 0 must be at least 1"),
        ("interval", 2, "watch-interval 2 must be at least 3"),
        ("drift", 1.5, "outside"),
    ],
)
def test_settings_that_cannot_be(field, value, message):
    settings = dict(reservoir_bytes=1, overlay=4, pivots=1, interval=8, drift=0.5)
    with pytest.raises(RaggedConfigError, match=message):
        Retrieval(**(settings | {field: value}))


class Lives:
    """A reservoir of `capacity` entries, and what it should hold: segments by slot, those used longest ago first."""

    def __init__(self, capacity: int) -> None:
        layout = SlabLayout(kept=KEPT, head_dim=DIM, segment=SEGMENT)
        self.store = SlabStore(layout, get_scorer("keydiff"), SLOTS + OPEN_PAGES, 2, torch.float32, "cpu")
        self.reservoir = Reservoir(self.store, SATELLITES, capacity)
        self.capacity, self.held = capacity, {}

    def seal(self, slot: int, seed: int, first: bool) -> None:
        rng = np.random.default_rng(seed)
        tails = rng.normal(size=(LAYERS, 2, HEADS, SEGMENT, DIM)).astype(np.float32)
        seal(self.store, slot, 0 if first else 3, torch.from_numpy(tails))
        self.held.pop(slot, None)
        while len(self.held) >= self.capacity:
            self.held.pop(next(iter(self.held)))
        self.held[slot] = (tails, first)

    def free(self, slot: int) -> None:
        self.reservoir.forget(torch.tensor([slot]))
        self.held.pop(slot, None)

    def look(self, slot: int, places: list[int]) -> None:
        """Rows of a slot's tokens are what the satellites dropped of them, and nothing else."""
        (entry,) = self.reservoir.entries([slot])
        assert (entry != NOWHERE) == (slot in self.held)
        if entry == NOWHERE:
            return
        self.held[slot] = self.held.pop(slot)
        tails, first = self.held[slot]
        satellites = [(layer, head) for layer, own in enumerate(SATELLITES) for head in own]
        where = torch.full((len(satellites), len(places)), entry)
        asked = torch.tensor(places).expand(len(satellites), -1)
        rows, counts = self.reservoir.gather(torch.arange(len(satellites)), where, asked, 20)
        for number, (layer, head) in enumerate(satellites):
            keys, values = tails[layer, :, head].astype(np.float64)
            kept = kept_tokens("keydiff", Tokens(keys, values), int(KEPT[layer, head]), first)
            dropped = [place for place in places if place not in kept][:20]
            assert int(counts[number]) == len(dropped)
            expected = np.concatenate([keys[dropped], values[dropped]], axis=1)
            np.testing.assert_allclose(rows[number, : len(dropped)], expected, atol=1e-6)

    def check(self) -> None:
        assert len(self.reservoir) == len(self.held) <= self.capacity
        assert len(self.reservoir) + len(self.reservoir._free) == self.capacity


slots = st.integers(1, SLOTS - 1)
places = st.lists(st.integers(0, SEGMENT - 1), min_size=8, max_size=24, unique=True)
steps = st.one_of(
    st.tuples(st.just("seal"), slots, st.integers(0, 99), st.booleans()),
    st.tuples(st.just("free"), slots),
    st.tuples(st.just("look"), slots, places),
)


@examples(800)
@given(st.integers(1, 4), st.lists(steps, min_size=5, max_size=25))
def test_lives_of_the_reservoir(capacity, taken):
    """Pages are sealed, shared, freed and sealed anew; entries make room for one another and none is lost."""
    lives = Lives(capacity)
    for name, *given_ in taken:
        getattr(lives, name)(*given_)
        lives.check()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_reservoir_gives_back_what_the_cache_held(dtype):
    layout = SlabLayout(kept=KEPT, head_dim=DIM, segment=SEGMENT)
    store = SlabStore(layout, get_scorer("keydiff"), SLOTS + OPEN_PAGES, 2, dtype, "cpu", query_dtype=torch.float32)
    reservoir = Reservoir(store, SATELLITES, 2)
    stored = torch.randn(LAYERS, 2, HEADS, SEGMENT, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    seal(store, 3, 0, stored)
    where = torch.full((3, SEGMENT), reservoir.entries([3])[0])
    rows, counts = reservoir.gather(torch.arange(3), where, torch.arange(SEGMENT).expand(3, -1), SEGMENT)
    overlays = Overlays(2, 3, SEGMENT, DIM, dtype, torch.device("cpu"))
    overlays.install(1, slice(0, 3), rows, counts)
    fetched, found = overlays.of(torch.tensor([1]), slice(1, 3))
    assert found.tolist() == [[SEGMENT - 32, SEGMENT - 16]]
    for number, (layer, head) in enumerate(((0, 2), (1, 1))):
        keys, values = stored[layer, :, head].float().numpy().astype(np.float64)
        kept = kept_tokens("keydiff", Tokens(keys, values), int(KEPT[layer, head]), True)
        dropped = [place for place in range(SEGMENT) if place not in kept]
        expected = np.concatenate([keys[dropped], values[dropped]], axis=1)
        np.testing.assert_array_equal(fetched[0, number, : len(dropped)].float().numpy(), expected)


def test_satellites_that_keep_everything_are_given_nothing():
    layout = SlabLayout(kept=np.full_like(KEPT, SEGMENT), head_dim=DIM, segment=SEGMENT)
    store = SlabStore(layout, get_scorer("keydiff"), SLOTS + OPEN_PAGES, 2, torch.float32, "cpu")
    reservoir = Reservoir(store, SATELLITES, 2)
    seal(store, 3, 0, torch.randn(LAYERS, 2, HEADS, SEGMENT, DIM))
    (entry,) = reservoir.entries([3])
    where, asked = torch.full((3, 2), entry), torch.tensor([[5, 40]]).expand(3, -1)
    rows, counts = reservoir.gather(torch.arange(3), where, asked, 20)
    assert (rows.shape, counts.tolist()) == ((3, 20, 2 * DIM), [0, 0, 0])


def test_a_reservoir_that_holds_nothing_is_refused():
    settings = Retrieval(reservoir_bytes=700, overlay=4, pivots=1, interval=8, drift=0.5)
    assert settings.entries([200, 140]) == 2
    with pytest.raises(RaggedConfigError, match=r"700 holds nothing.* 701 bytes"):
        settings.entries([700, 1])


def test_ranks_share_pivots():
    """Rank 0 has the second pivot, rank 1 the first; each has its own satellites."""
    roles = HeadRoles(((0, 1), (1, 0)), np.array([[0, -1, 0, -1], [-1, 1, 0, 1]]))
    heads = [np.array([[0, 2], [0, 3]]), np.array([[1, 3], [1, 2]])]
    first, second = (roles.on_rank(own) for own in heads)
    assert (first.pivots, first.satellites) == (((0, ELSEWHERE), (1, 0)), ((0, 1), (1,)))
    assert (second.pivots, second.satellites) == (((0, 0), (1, ELSEWHERE)), ((), (0, 1)))
    assert roles.on_rank(np.arange(4)[None].repeat(2, axis=0)).pivots == roles.pivots
