"""The FairKV planner against brute force, closed forms and measured profiles."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.permute import least_possible, permute_layer
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import MODES, plan_placement
from sgl_ragged.fairkv.splitting import split_layer
from sgl_ragged.profiles.budgets import fit_kept
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER
from tests.examples import examples

with np.load(Path(__file__).parents[1] / "data" / "measured_profiles.npz") as _archive:
    MEASURED = {name: _archive[name] for name in _archive.files if name.endswith("/evictable")}
"""Mean shares [layers, heads] by SCORER/MODEL/SCOPE/SHARE; tests/data/README.md."""

LLAMA = json.loads((BUNDLED_FOLDER / "configs" / "llama-3.1-8b-instruct.json").read_text())


@st.composite
def layers_and_ranks(draw, most_heads: int = 12) -> tuple[np.ndarray, int]:
    """Kept counts of a few layers, many heads of one unit among them, and ranks that divide the heads."""
    heads = draw(st.integers(1, most_heads))
    ranks = draw(st.sampled_from([r for r in range(1, heads + 1) if heads % r == 0]))
    units = st.one_of(st.integers(1, 16), st.just(1))
    rows = draw(st.lists(st.lists(units, min_size=heads, max_size=heads), min_size=1, max_size=3))
    return 16 * np.array(rows), ranks


def divisions(heads: tuple[int, ...], ranks: int):
    """All divisions of the heads into sets of equal size, straight from the definition."""
    if ranks == 1:
        yield (heads,)
        return
    for others in itertools.combinations(heads[1:], len(heads) // ranks - 1):
        left = tuple(head for head in heads[1:] if head not in others)
        for rest in divisions(left, ranks - 1):
            yield ((heads[0], *others), *rest)


def best_division(loads: list[int], ranks: int) -> int:
    return min(
        max(sum(loads[head] for head in part) for part in division)
        for division in divisions(tuple(range(len(loads))), ranks)
    )


def busy(placement: Placement) -> float:
    return float(placement.load.mean(axis=1).sum() / placement.load.max(axis=1).sum())


def test_it_imports_numpy_alone():
    code = (
        "import sys, sgl_ragged.fairkv.planner\n"
        "assert not {'torch', 'sglang', 'scipy', 'matplotlib'} & set(sys.modules), 'imports more than numpy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What every placement promises


@given(layers_and_ranks(), st.sampled_from(MODES), st.integers(0, 2))
def test_every_head_is_covered_exactly_once(case, mode, extra):
    kept, ranks = case
    placement = plan_placement(kept, ranks, mode, extra_places=extra)
    assert placement.mode == mode
    assert placement.heads.shape == placement.kept.shape == (len(kept), ranks, placement.places)
    assert kept.shape[1] // ranks <= placement.places <= kept.shape[1] // ranks + extra
    assert ((placement.kept % 16 == 0) & (placement.kept >= 0)).all()
    for layer, row in enumerate(kept.tolist()):
        for held in placement.heads[layer].tolist():
            assert held == sorted(set(held)), "a rank holds a head once, lower heads first"
        for head, kept_count in enumerate(row):
            assert placement.kept[layer][placement.heads[layer] == head].sum() == kept_count


@given(layers_and_ranks(), st.sampled_from(MODES), st.integers(0, 2), st.booleans())
def test_no_plan_is_worse_than_none(case, mode, extra, with_cost):
    kept, ranks = case
    cost = CostModel(hidden=256, head_dim=64, q_per_kv=2, segment=256, batch=1, context=2048) if with_cost else None
    placement = plan_placement(kept, ranks, mode, extra_places=extra, cost=cost)
    none = plan_placement(kept, ranks, "none")
    assert (placement.load.max(axis=1) <= none.load.max(axis=1)).all()
    if cost is not None:
        assert cost.step_bytes(placement.load, placement.places) <= cost.step_bytes(none.load, none.places)


@given(layers_and_ranks(), st.sampled_from(["permute", "split"]))
def test_totals_over_layers_come_out_even(case, mode):
    """No two ranks differ by more than the widest spread of a layer."""
    kept, ranks = case
    load = plan_placement(kept, ranks, mode).load
    assert np.ptp(load.sum(axis=0)) <= np.ptp(load, axis=1).max() + 1e-9


def test_equal_heads_stay_where_they_are():
    kept = np.full((3, 8), 80)
    for mode in MODES:
        for ranks in (1, 2, 4, 8):
            placement = plan_placement(kept, ranks, mode)
            assert (
                placement.heads.tolist()
                == np.broadcast_to(np.arange(8).reshape(ranks, -1), placement.heads.shape).tolist()
            )


def test_a_plan_by_hand():
    """Layer 0: 256 + 16 | 128 + 144 (272 each). Layer 1 has the wider spread and comes first: 96 + 16 | 32 + 32.

    Rank 0 has more of it, so the first set of layer 0 goes to rank 1.
    """
    kept = np.array([[256, 128, 144, 16], [96, 32, 32, 16]])
    placement = plan_placement(kept, 2, "permute")
    assert placement.heads.tolist() == [[[1, 2], [0, 3]], [[0, 3], [1, 2]]]
    # Layer 1 split: 176 tokens are 5.5 units a rank. Runs of two neighbours: 16 + 32 and 3 of the 6 units of head 0.
    placement = plan_placement(kept, 2, "split")
    assert placement.places == 3
    assert placement.load.max(axis=1).tolist() == [272, 96]


def test_places_that_hold_nothing():
    """Nine units on sixteen places: seven hold nothing, and their heads are no other's of the rank."""
    placement = plan_placement(np.array([[16] * 7 + [32]]), 8, "split")
    assert placement.places == 1, "a second place would not help: some rank has two units in any case"
    kept = np.array([[16] * 7 + [32], [16] * 7 + [256]])
    placement = plan_placement(kept, 8, "split")
    assert placement.places == 2
    assert (placement.kept[0] == 0).sum() == 7
    assert (placement.kept[1] == 0).sum() == 1
    assert all(len(set(held)) == 2 for layer in placement.heads.tolist() for held in layer)


# Permute


@given(st.lists(st.integers(1, 40), min_size=8, max_size=8), st.sampled_from([2, 4, 8]))
def test_permute_equals_brute_force(loads, ranks):
    held = permute_layer(np.array(loads), ranks)
    assert sorted(held.ravel().tolist()) == list(range(8))
    assert max(np.array(loads)[held].sum(axis=1)) == best_division(loads, ranks)


@examples(25)
@given(st.data(), st.sampled_from([(9, 3), (10, 2), (12, 3), (12, 4), (12, 6)]))
def test_permute_equals_brute_force_on_finer_loads(data, shape):
    heads, ranks = shape
    loads = data.draw(st.lists(st.integers(1, 1000), min_size=heads, max_size=heads))
    best = best_division(loads, ranks)
    held = permute_layer(np.array(loads), ranks)
    assert max(np.array(loads)[held].sum(axis=1)) == best
    assert least_possible(np.array(loads), ranks) <= best


@pytest.mark.parametrize("shape", [(9, 3), (12, 3), (12, 4)])
def test_permute_equals_brute_force_where_loads_repeat(shape):
    """Where the optimum is a single unit better than what exchanging heads finds, too."""
    heads, ranks = shape
    rng = np.random.default_rng(heads)
    for loads in rng.integers(1, 17, ({9: 400, 12: 20}[heads], heads)):
        held = permute_layer(loads, ranks)
        assert loads[held].sum(axis=1).max() == best_division(loads.tolist(), ranks)


@given(st.lists(st.integers(1, 1000), min_size=32, max_size=32), st.sampled_from([2, 4, 8]))
def test_permute_of_many_heads_keeps_within_its_bound(loads, ranks):
    """Greedy placing alone ends at most one head above the mean, and the bound is at least the mean."""
    held = permute_layer(np.array(loads), ranks)
    fullest, bound = max(np.array(loads)[held].sum(axis=1)), least_possible(np.array(loads), ranks)
    assert sorted(held.ravel().tolist()) == list(range(32))
    assert (
        -(-sum(loads) // ranks)
        <= bound
        <= fullest
        <= max(bound + max(loads), max(np.array(loads).reshape(ranks, -1).sum(axis=1)))
    )


@given(st.lists(st.integers(0, 500), min_size=20, max_size=20))
def test_two_heads_a_rank_are_optimal(loads):
    """Beyond the heads that are searched to the end: the largest with the smallest, and so on."""
    ascending = sorted(loads)
    pairs = max(small + large for small, large in zip(ascending[:10], ascending[:9:-1], strict=True))
    assert max(np.array(loads)[permute_layer(np.array(loads), 10)].sum(axis=1)) == pairs


# Split


@given(layers_and_ranks(24))
def test_split_reaches_the_mean_with_one_place(case):
    """The largest load is the mean, rounded up to a whole unit: no division whatsoever has a smaller one."""
    kept, ranks = case
    assume(ranks > 1)
    for row in kept // 16:
        shares = split_layer(row, ranks)
        assert max(sum(held.values()) for held in shares) == -(-row.sum() // ranks)
        assert {len(held) for held in shares} == {len(row) // ranks + 1}
    load = plan_placement(kept, ranks, "split").load
    assert load.max(axis=1).tolist() == [16 * -(-total // (16 * ranks)) for total in kept.sum(axis=1).tolist()]


@given(layers_and_ranks(24), st.integers(0, 10_000))
def test_split_is_within_five_percent_of_the_mean(case, seed):
    """Wherever units are fine enough for it: twenty or more on each rank."""
    kept, ranks = case
    assume(ranks > 1)
    fine = kept * np.random.default_rng(seed).integers(20, 60, kept.shape)
    load = plan_placement(fine, ranks, "split").load
    assert (load.max(axis=1) <= 1.05 * load.mean(axis=1)).all()


def test_split_by_hand():
    """Units 1, 1, 1, 5 on two ranks, four each: the last run of two that fits is heads 1 and 2; 2 of head 3 fill up.

    The other rank has head 0 and the other 3 units of head 3, and a place that cannot hold a unit: no head has one to
    spare but head 3, which it has already.
    """
    assert split_layer(np.array([1, 1, 1, 5]), 2) == [{1: 1, 2: 1, 3: 2}, {0: 1, 3: 3, 1: 0}]
    # No head needs splitting; the places left over are filled by exchanging a unit.
    assert split_layer(np.array([4, 4]), 2) == [{0: 1, 1: 3}, {0: 3, 1: 1}]


# Cost


def test_the_cost_model_counts_every_weight_of_llama():
    """Llama-3.1-8B has 8,030,261,248 parameters: without the embedding and 65 norms, those that a step reads."""
    cost = CostModel.from_config(LLAMA, 256)
    assert cost.place_bytes == 2 * 4096 * 128 * (4 + 1 + 1 + 4)
    assert 32 * 8 * cost.place_bytes + cost.other_bytes == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    # A token's keys and values in 16 bit: 128 KiB over 32 layers and 8 heads.
    full = np.full((32, 1), 8 * 256)
    assert cost.kv_bytes(full).sum() == cost.batch * cost.context * 128 * 1024


def test_step_bytes_by_hand():
    cost = CostModel(hidden=10, head_dim=2, q_per_kv=3, segment=64, batch=4, context=640, other_bytes=1000)
    assert cost.place_bytes == 2 * 4 * 2 * 10 * 2
    load = np.array([[16, 32], [64, 16]])
    # 96 tokens of the fullest ranks, ten segments, four requests, 8 bytes of key and value each.
    assert cost.step_bytes(load, 3) == 96 * 10 * 4 * 8 + 2 * 3 * 320 + 500
    # Each of three places reads a header of every segment.
    assert replace(cost, header_bytes=5).step_bytes(load, 3) == cost.step_bytes(load, 3) + 2 * 3 * 10 * 4 * 5


def test_places_that_do_not_pay_are_declined():
    """Heads of 256 and 16 tokens: permuted 256, split 144. A place may cost no more than is saved."""
    kept = np.array([[256, 16]])
    cost = CostModel(hidden=8, head_dim=1, q_per_kv=1, segment=256, batch=1, context=256)
    saved = 112
    for batch, places in ((10, 2), (1, 1)):
        priced = replace(cost, batch=batch, hidden=saved // 2)
        assert priced.place_bytes == saved * 4
        assert plan_placement(kept, 2, "split", cost=priced).places == places
    assert plan_placement(kept, 2, "split", cost=replace(cost, hidden=saved // 2 - 1)).places == 2
    assert plan_placement(kept, 2, "split", extra_places=0).places == 1


@pytest.mark.parametrize("name", ["hidden", "head_dim", "q_per_kv", "segment", "batch", "context", "kv_itemsize"])
def test_the_cost_model_refuses_what_is_not_positive(name):
    with pytest.raises(RaggedConfigError, match=f"{name} must be at least {0.25 if name == 'kv_itemsize' else 1}"):
        replace(CostModel(hidden=1, head_dim=1, q_per_kv=1, segment=32), **{name: 0})


# Bad input


@pytest.mark.parametrize(
    ("kept", "ranks", "mode", "words"),
    [
        ([[16, 16]], 2, "best", "unknown placement 'best'; known: none, permute, split"),
        ([[16, 16, 16]], 2, "permute", "3 heads cannot be placed on 2 ranks"),
        ([[16, 16]], 4, "split", "2 heads cannot be placed on 4 ranks"),
        ([[16, 16]], 0, "none", "2 heads cannot be placed on 0 ranks"),
        ([[16, 20]], 2, "permute", "positive multiples of 16"),
        ([[16, 0]], 2, "permute", "positive multiples of 16"),
        ([16, 16], 2, "permute", r"must be \[layers, heads\]"),
    ],
)
def test_bad_input_is_refused(kept, ranks, mode, words):
    with pytest.raises(RaggedConfigError, match=words):
        plan_placement(np.array(kept), ranks, mode)


def test_fewer_places_than_heads_need_are_refused():
    with pytest.raises(RaggedConfigError, match="at least 0, not -1"):
        plan_placement(np.array([[16, 16]]), 2, "split", extra_places=-1)


# Measured profiles


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_busy_rates_of_measured_profiles(name, ranks):
    """Split reaches what units of 16 tokens allow at segments of 256; with finer units, the mean itself."""
    scope = name.split("/")[2]
    kept = fit_kept(MEASURED[name], 0.3, 256, scope)
    none, permute, split = (plan_placement(kept, ranks, mode) for mode in ("none", "permute", "split"))
    assert busy(none) <= busy(permute) <= busy(split)
    limit = kept.sum() / ranks / (16 * -(-kept.sum(axis=1) // (16 * ranks))).sum()
    assert busy(split) == pytest.approx(limit)
    if scope == "layer":
        # Layers of an odd number of units leave one over.
        assert busy(split) >= {2: 0.989, 4: 0.95, 8: 0.95}[ranks] - 1e-9
    fine = plan_placement(fit_kept(MEASURED[name], 0.3, 16 * 1024, scope), ranks, "split")
    assert busy(fine) >= 0.995


@pytest.mark.parametrize(("heads", "ranks"), [(8, 8), (8, 4), (64, 8), (16, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_models_of_eighty_layers_are_planned(heads, ranks, mode):
    kept = fit_kept(np.random.default_rng(0).random((80, heads)) ** 3, 0.3, 256)
    placement = plan_placement(kept, ranks, mode)
    assert {head for rank in placement.heads[0] for head in rank} >= set(range(heads))
    np.testing.assert_array_equal(placement.load.sum(axis=1), kept.sum(axis=1))
