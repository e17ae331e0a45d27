"""Layers that share what is stored of them: the choice of pairs, and what comes back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.layer_pairs import CANDIDATES, Shareable, choose_pairs, distances, pair_candidates
from sgl_ragged.features.host_tier.shared_codec import SharedCodec
from sgl_ragged.features.host_tier.slab_transfer import SlabTransfer
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.segments import InChunk
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.profiles.budgets import uniform_kept
from sgl_ragged.scorers import get_scorer
from tests.open_segments import full_segments

CPU = torch.device("cpu")
SEGMENT, DIM = 64, 8


def upper(layers: int) -> np.ndarray:
    return np.triu(np.ones((layers, layers), dtype=bool), 1)


def pairs_of(attention: np.ndarray, eligible: np.ndarray, count: int) -> list[tuple[int, int]]:
    return choose_pairs(distances(attention), pair_candidates(attention), eligible, count)


def test_pairs_by_hand():
    """Layers 1 and 3 attend most alike. 4 and 5 attend to the middle alone, so neither is a candidate."""
    attention = np.zeros((8, 20))
    ends = [(0, 0.55), (1, 0.9), (2, 0.6), (3, 0.91), (6, 0.7), (7, 0.3)]
    for layer, share in ends:
        attention[layer, 0], attention[layer, 5 + layer] = share, 1 - share
    attention[[4, 5], 10] = 1
    assert pair_candidates(attention).tolist() == [True, True, True, True, False, False, True, True]
    # 4 and 5 are equal, but no pair_candidates: they come last.
    assert pairs_of(attention, upper(8), 4) == [(1, 3), (2, 6), (0, 7), (4, 5)]
    assert pairs_of(attention, upper(8), 1) == [(1, 3)]
    eligible = upper(8)
    eligible[1, 3] = False
    assert pairs_of(attention, eligible, 1) == [(1, 6)]


def test_equal_layers_are_paired_from_the_first():
    assert pairs_of(np.full((7, 10), 0.1), upper(7), 3) == [(0, 1), (2, 3), (4, 5)]
    assert pair_candidates(np.full((8, 10), 0.1)).sum() == 8 * CANDIDATES


@given(st.integers(2, 9), st.integers(0, 5), st.integers(0, 2**31))
def test_pairs_are_those_of_the_algorithm_as_written(layers, count, seed):
    rng = np.random.default_rng(seed)
    attention = rng.dirichlet(np.ones(20), layers)
    eligible = upper(layers) & (rng.random((layers, layers)) < 0.7)
    threshold = np.sort(attention[:, :2].sum(axis=1) + attention[:, -2:].sum(axis=1))[layers - -(-3 * layers // 4)]
    inner = {i for i in range(layers) if attention[i, [0, 1, -2, -1]].sum() < threshold - 1e-12}
    apart = {
        (i, j): float(((attention[i] - attention[j]) ** 2).sum()) ** 0.5
        for i, j in itertools.combinations(range(layers), 2)
        if eligible[i, j]
    }
    expected: list[tuple[int, int]] = []
    shared: set[int] = set()
    for pair in sorted(apart, key=lambda one: (bool(set(one) & inner), apart[one])):
        if len(expected) < count and not set(pair) & shared:
            expected.append(pair)
            shared |= set(pair)
    assert pairs_of(attention, eligible, count) == expected


def test_heads_that_keep_equally_many():
    layout = SlabLayout(kept=np.array([[16, 32, 32], [32, 16, 48], [32, 32, 32], [64, 64, 64]]), head_dim=8, segment=64)
    shareable = Shareable(layout)
    assert shareable.heads(0, 1) == {0: 1, 1: 0}
    assert shareable.heads(0, 2) == {0: 1, 1: 2}
    assert shareable.heads(1, 2) == {0: 0}
    assert shareable.heads(0, 3) == {}
    assert shareable.elems.tolist() == [[0, 768, 1024, 0], [0, 0, 512, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    # One pair among the three layers, whichever is nearest.
    assert shareable.promise == (1, 1024)


@pytest.mark.parametrize(("layers", "pairs"), [(2, 1), (4, 1), (30, 8), (32, 8), (80, 20)])
def test_with_equal_budgets_half_of_the_layers_share(layers, pairs):
    layout = SlabLayout(kept=uniform_kept(layers, 2, 0.5, SEGMENT), head_dim=DIM, segment=SEGMENT)
    codec = SharedCodec(layout, torch.bfloat16)
    assert codec.pairs == pairs
    saved = 2 * pairs * int(layout.layer_elems[0])
    assert codec.row_bytes == layout.slab_bytes(2) - saved + -(-2 * layers // 16) * 16


def test_budgets_with_nothing_to_share_are_refused():
    layout = SlabLayout(kept=np.array([[16, 32], [48, 64]]), head_dim=DIM, segment=SEGMENT)
    with pytest.raises(RaggedConfigError, match="use fp8 or exact"):
        SharedCodec(layout, torch.float32)


def sealed(layout: SlabLayout, segments: int, seed: int, dtype: torch.dtype = torch.float32):
    """A store whose first slots hold sealed segments, and a codec that has seen them."""
    random = torch.Generator().manual_seed(seed)
    store = SlabStore(layout, get_scorer("keydiff"), segments + 1, 3, dtype, "cpu")
    codec = SharedCodec(layout, dtype)
    codec.watch(store)
    for layer in range(layout.num_layers):
        keys, values = torch.randn((2, segments * SEGMENT, layout.num_heads, DIM), generator=random).to(dtype)
        every = torch.arange(segments)
        store.seal(layer, InChunk(every * SEGMENT, every, every, keys, values, None))
    return store, codec


def test_a_segment_that_decode_filled_is_seen_as_one_that_prefill_filled():
    layout = SlabLayout(kept=np.array([[16, 48], [32, 16], [64, 64]]), head_dim=DIM, segment=SEGMENT)
    random = torch.Generator().manual_seed(2)
    store = SlabStore(layout, get_scorer("keydiff"), 8, 3, torch.float32, "cpu")
    codec = SharedCodec(layout, torch.float32)
    codec.watch(store)
    both = torch.randn(2, 3, 2, 2, SEGMENT, DIM, generator=random)
    which = torch.tensor([1, 2]), torch.tensor([0, 1]), torch.tensor([0, 5])
    store.seal(None, full_segments(store, *which, both, 4))
    for layer in range(3):
        tokens = both[:, layer].permute(1, 0, 3, 2, 4).flatten(1, 2)
        chunk = InChunk(torch.tensor([0, 64]), torch.tensor([2, 3]), torch.tensor([0, 5]), tokens[0], tokens[1], None)
        store.seal(layer, chunk)
    counts = codec._seen.counts
    assert torch.equal(counts[0], counts[2])
    assert torch.equal(counts[1], counts[3])
    assert counts[:4].sum(dim=2).tolist() == [[64, 48, 128]] * 4, "what the heads keep, together"
    assert (counts[:2, 2] == 2).all()
    # The sinks of the first segment and everybody's last 16, of which the head with 16 gives the sinks four.
    assert (counts[0, 0, :4] == 2).all()
    assert (counts[:2, :, -12:] == 2).all()


@given(
    st.lists(st.lists(st.sampled_from([16, 32, 48]), min_size=3, max_size=3), min_size=4, max_size=10),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_what_comes_back(kept, dtype, seed):
    """Layers are their own, or, of those that are restored, every head is its own or one of the source."""
    kept[1] = kept[0]
    layout = SlabLayout(kept=np.array(kept), head_dim=DIM, segment=SEGMENT)
    store, codec = sealed(layout, 3, seed, dtype)
    rows = torch.zeros((5, codec.row_bytes), dtype=torch.uint8)
    transfer = SlabTransfer(codec, rows)
    transfer.back_up(store.slabs, torch.tensor([0, 1, 2]), torch.tensor([4, 1, 2]))
    back = torch.full_like(store.slabs, 7)
    for layer in range(layout.num_layers):
        transfer.restore(back, torch.tensor([1, 2, 3]), torch.tensor([4, 1, 2]), layer)
    assert (back[0] == 7).all()
    for slot in range(3):
        sources = codec.sources(codec._seen.counts[slot].numpy())
        restored = [layer for layer in range(layout.num_layers) if sources[layer] != layer]
        assert len(restored) == codec.pairs
        assert all(sources[sources[layer]] == sources[layer] < layer for layer in restored)
        for layer, head in np.ndindex(layout.kept.shape):
            elems = 2 * layout.kept[layer, head] * DIM
            source = codec._shareable.heads(sources[layer], layer).get(head) if layer in restored else None
            of = (layer, head) if source is None else (sources[layer], source)
            mine, was = int(layout.key_offset[layer, head]), int(layout.key_offset[of])
            assert torch.equal(back[slot + 1, mine : mine + elems], store.slabs[slot, was : was + elems])


def test_a_row_is_a_function_of_the_segment():
    layout = SlabLayout(kept=uniform_kept(8, 2, 0.5, SEGMENT), head_dim=DIM, segment=SEGMENT)
    (store, codec), (again, other) = sealed(layout, 2, 5), sealed(layout, 2, 5)
    assert torch.equal(codec.encode(store.slabs[:2], [0, 1]), other.encode(again.slabs[:2], [0, 1]))
    assert torch.equal(codec.encode(store.slabs[1:2], [1])[0], codec.encode(store.slabs[:2], [0, 1])[1])
