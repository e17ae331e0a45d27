"""Stability, similarity, clusters and foresight of heads, against closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calib import roles
from calib.attended import ANSWERING, ATTENDED_WINDOW, STARTS, TOKENS, TOP, WEIGHTS
from calib.roles import (
    ANCHOR,
    PIVOT,
    SATELLITE,
    VOLATILE,
    assign_roles,
    compare_heads,
    foresee,
    head_statistics,
    kept_tokens,
    overlaps,
    rank_pivots,
)
from sgl_ragged.profiles.head_statistics import (
    DROPPED,
    HEAD_STATISTICS,
    OVERLAP,
    PIVOT_ORDER,
    PIVOTS,
    ROLE,
    SIMILARITY,
    STABILITY,
    WATCHED,
)
from tests.examples import examples

SEGMENT = 64


def recording(sets: list[list[list[list[int]]]], weights: dict[int, float] | None = None, segments: int = 2):
    """A recording [layers][heads][windows][tokens] of consecutive windows; tokens weigh 1, or what `weights` says.

    Scores fall with the position, so that at a small ratio only the first and the last 16 tokens of a segment are kept.
    """
    layers, heads, windows = len(sets), len(sets[0]), len(sets[0][0])
    tokens = torch.full((layers, heads, windows, TOP), -1, dtype=torch.int32)
    amounts = torch.zeros(tokens.shape, dtype=torch.float16)
    for layer, head, window in itertools.product(range(layers), range(heads), range(windows)):
        chosen = sets[layer][head][window]
        tokens[layer, head, window, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        values = [1.0 if weights is None else weights[token] for token in chosen]
        amounts[layer, head, window, : len(chosen)] = torch.tensor(values)
    return {
        STARTS: segments * SEGMENT + ATTENDED_WINDOW * torch.arange(windows),
        ANSWERING: torch.zeros(windows, dtype=torch.bool),
        TOKENS: tokens,
        WEIGHTS: amounts,
        "x.scores": -torch.arange(SEGMENT).float().expand(segments, layers, heads, SEGMENT),
        "peaks.all": torch.ones(layers, heads, segments * SEGMENT),
    }


def test_overlap_is_the_share_of_the_smaller_set():
    """Eq. 1."""
    sets = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    torch.testing.assert_close(overlaps(sets, sets), torch.tensor([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 0]]))


def test_stability_is_the_median_overlap_with_the_first_window():
    """Eq. 2: overlaps 1/4, 1 and 3/4 of later windows; of four, the mean of the two in the middle."""
    windows = [[0, 1, 2, 3], [0, 9, 10, 11], [3, 2, 1, 0], [0, 1, 2, 11]]
    assert compare_heads(recording([[windows]])).stability == pytest.approx(0.75)
    assert compare_heads(recording([[[*windows, [20, 21, 22, 23]]]])).stability == pytest.approx(0.5)
    assert compare_heads(recording([[windows[:1]]])) is None


def test_similarity_is_the_median_of_the_nearest_heads():
    """Eq. 3: head 0 is near head 1 in the first window, near head 2 in the second, in the third near none."""
    heads = [[[0, 1], [0, 1], [0, 1]], [[0, 1], [5, 6], [5, 6]], [[7, 8], [1, 7], [7, 8]]]
    found = compare_heads(recording([heads]))
    np.testing.assert_allclose(found.similarity, [[0.5, 0.0, 0.0]])
    np.testing.assert_allclose(found.overlap, [np.eye(3)])
    # Heads of other layers do not count, and a head is not its own neighbour.
    apart = compare_heads(recording([[heads[0]], [heads[0]]]))
    np.testing.assert_allclose(apart.similarity, [[0.0], [0.0]])
    np.testing.assert_allclose(apart.overlap, np.ones((2, 1, 1)))


def test_only_the_best_tokens_are_compared():
    one, other = list(range(TOP)), [*range(60), *range(500, 500 + TOP - 60)]
    found = compare_heads(recording([[[one, one], [other, other]]], segments=10))
    assert found.similarity[0, 0] == pytest.approx(60 / roles.COMPARED)
    # Token 20 is dropped, and was the best but 64 in the window before, or the best but 63. Each is seen in its own.
    others = list(range(100, 100 + roles.COMPARED))
    for before, foreseen in (([*others, 20], 1), ([*others[1:], 20], 3)):
        weights = dict.fromkeys(others, 0.0) | {20: 1.0}
        sample = recording([[[before, [20]]]], weights, segments=3)
        assert foresee([sample], "x", "all").foreseen.tolist() == [[foreseen]]


# Clusters


def overlap_of(heads: int, *edges: tuple[int, int]) -> np.ndarray:
    overlap = np.eye(heads)
    for one, other in edges:
        overlap[one, other] = overlap[other, one] = 0.5
    return overlap


def test_stars_are_taken_by_degree():
    """Head 1 has three neighbours; then 4 and 5 are a pair; 6 resembles satellites alone, 7 nobody."""
    overlap = overlap_of(8, (1, 0), (1, 2), (1, 3), (3, 6), (4, 5))
    stability = np.array([0.9, 0.9, 0.1, 0.1, 0.1, 0.9, 0.1, 0.9])
    found = assign_roles(stability[None], overlap[None], 0.5, 0.5)
    assert found.tolist() == [[SATELLITE, PIVOT, SATELLITE, SATELLITE, PIVOT, SATELLITE, VOLATILE, ANCHOR]]
    alone = assign_roles(stability[None], overlap[None], 0.1, 0.51)
    assert (alone == ANCHOR).all()


@examples(60)
@given(heads=st.integers(1, 8), seed=st.integers(0, 999), tau=st.floats(0, 1))
def test_every_satellite_resembles_a_pivot_of_its_layer(heads, seed, tau):
    rng = np.random.default_rng(seed)
    pairs = rng.uniform(0, 1, (2, heads, heads))
    overlap, stability = np.maximum(pairs, pairs.transpose(0, 2, 1)), rng.uniform(0, 1, (2, heads))
    found = assign_roles(stability, overlap, 0.5, tau)
    for layer in range(2):
        pivots = np.flatnonzero(found[layer] == PIVOT)
        satellites = np.flatnonzero(found[layer] == SATELLITE)
        assert all(overlap[layer, satellite, pivots].max() >= tau for satellite in satellites)
        # Pivots do not resemble each other: one would be the other's satellite.
        assert all(overlap[layer, one, other] < tau for one, other in itertools.combinations(pivots, 2))
        for head in range(heads):
            if found[layer, head] in (ANCHOR, VOLATILE):
                assert (found[layer, head] == ANCHOR) == (stability[layer, head] >= 0.5)


# Foresight


def test_kept_tokens_are_those_that_serving_keeps():
    """16 of 64: 4 sinks and 12 of the guard in the first segment, the guard in the second; 32: the best too."""
    scores = -torch.arange(SEGMENT).float().expand(2, 1, 2, SEGMENT)
    kept = kept_tokens(scores, torch.tensor([[16, 32]]))
    assert kept.shape == (1, 2, 2 * SEGMENT)
    small, large = (set(torch.nonzero(row).flatten().tolist()) for row in kept[0])
    assert small == {*range(4), *range(52, 64), *range(112, 128)}
    assert large == {*range(16), *range(48, 64), *range(64, 80), *range(112, 128)}


WEIGHT = {20: 0.5, 21: 0.25, 22: 0.125, 0: 1.0}
"""Tokens 20, 21 and 22 are dropped by all heads, and 0 is a sink."""


def test_foresight_is_the_dropped_attention_that_is_or_was_attended_to():
    first = [[[20, 0], [0]], [[21], [20, 21, 0]]]
    second = [[[22], [22, 0]]] * 2
    sample = recording([first, second], WEIGHT)
    # Head 0 misses 20 at first, head 1 21 and then 20 and 21; the heads of the second layer miss 22 in both windows.
    at_first, then = np.zeros((4, 4)), np.zeros((4, 4))
    at_first[0, 0], at_first[1, 1], at_first[2:, 2:] = 0.5, 0.25, 0.125
    then[1, 1], then[2:, 2:] = 0.5 + 0.25, 0.125
    before = np.zeros((4, 4))
    before[0, 1], before[1, 1], before[2:, 2:] = 0.5, 0.25, 0.125
    found = foresee([sample, sample], "x", "all")
    assert found.windows == 2 * 3
    np.testing.assert_allclose(found.foreseen, 2 * (at_first + then + before))
    np.testing.assert_allclose(found.dropped, 2 * np.array([0.5, 0.25 + 2 * 0.75, 3 * 0.125, 3 * 0.125]))
    # Windows that do not follow each other are no pairs.
    apart = foresee([sample | {STARTS: torch.tensor([128, 144])}], "x", "all")
    assert apart.windows == 2
    np.testing.assert_allclose(apart.foreseen, at_first + then)
    # Of answers alone, those that generate some.
    sample |= {"peaks.answers": sample["peaks.all"], ANSWERING: torch.tensor([False, True])}
    answers = foresee([sample], "x", "answers")
    assert answers.windows == 2
    np.testing.assert_allclose(answers.foreseen, then + before)


def test_statistics_of_a_profile():
    first = [[[20, 0], [0]], [[21], [20, 21, 0]]]
    second = [[[22], [22, 0]]] * 2
    short = recording([[[[20]]] * 2] * 2)
    found = head_statistics([recording([first, second], WEIGHT), short], "x", "all", 0.5, 0.5)
    assert tuple(found) == HEAD_STATISTICS
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert found[OVERLAP].shape == (2, 2, 2)
    # The short sample adds 1 to what any head foresees of any. So head 1 foresees 1 + 2.25 + 1 + 1 of all; of what is
    # left head 2 foresees 0.375 twice, and then head 0 0.5 of its own.
    watched = np.zeros((2, 2, PIVOTS))
    watched[..., 0] = [[1 / 1.5, 2.25 / 2.75], [1 / 1.375, 1 / 1.375]]
    watched[1, :, 1] = 1
    watched[..., 2] = [[1, 1.5 / 2.75], [1 / 1.375, 1 / 1.375]]
    np.testing.assert_allclose(found[WATCHED], watched, rtol=1e-6)
    np.testing.assert_allclose(found[DROPPED], np.array([[1.5, 2.75], [1.375, 1.375]]) / 4)
    assert found[PIVOT_ORDER].tolist() == [[2, 0], [1, -1]]
    # With one window it has no part in these.
    np.testing.assert_allclose(found[STABILITY], [[1, 1], [1, 1]])
    np.testing.assert_allclose(found[SIMILARITY], [[0.5, 0.5], [1, 1]])
    assert found[ROLE].tolist() == [[PIVOT, SATELLITE], [PIVOT, SATELLITE]]
    nothing = head_statistics([recording([[[]] * 2] * 2)], "x", "all", 0.5, 0.5)
    assert (nothing[PIVOT_ORDER] == -1).all()
    assert (nothing[ROLE] == VOLATILE).all()


def test_greedy_choice_in_closed_form():
    """Heads 0 and 1 of layer 0, 2 of layer 1. Head 1 is best alone; with it, head 0 adds more than head 2 does."""
    foreseen = np.array([[4.0, 0, 0], [0, 3, 2], [9, 9, 2.5]])
    assert rank_pivots(foreseen, np.array([0, 0, 1]), 3) == [1, 0, 2]
    assert rank_pivots(foreseen, np.array([0, 0, 1]), 1) == [1]
    # Without the rule about layers, head 2 would see for all.
    assert rank_pivots(foreseen, np.array([0, 0, 0]), 3) == [2]
    assert rank_pivots(np.zeros((3, 3)), np.array([0, 0, 1]), 3) == []


@examples(40)
@given(seed=st.integers(0, 999), count=st.integers(1, 5))
def test_no_other_head_would_have_added_more(seed, count):
    rng = np.random.default_rng(seed)
    layer = np.sort(rng.integers(0, 3, 6))
    foreseen = rng.uniform(0, 1, (6, 6))

    def value(heads: list[int]) -> float:
        return sum(max((foreseen[p, s] for p in heads if layer[p] <= layer[s]), default=0.0) for s in range(6))

    chosen = rank_pivots(foreseen, layer, count)
    for place in range(len(chosen)):
        best = max(value([*chosen[:place], other]) for other in range(6))
        assert value(chosen[: place + 1]) == pytest.approx(best)
