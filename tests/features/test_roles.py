"""Pivots of a profile, and budgets that keep them whole, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.roles import HeadRoles, head_roles, with_pivots
from sgl_ragged.profiles.budgets import GUARD, fit_kept, uniform_kept
from sgl_ragged.profiles.head_statistics import PIVOT_ORDER, PIVOTS, ROLES, WATCHED
from sgl_ragged.profiles.profile import Profile
from tests.examples import examples

VOLATILE, ANCHOR, PIVOT, SATELLITE = range(len(ROLES))


def make_profile(statistics: dict[str, object], **changes) -> Profile:
    arrays = {name: np.asarray(array, np.float32) for name, array in statistics.items()}
    shape = next(iter(arrays.values())).shape[:2] if arrays else (2, 3)
    values = {
        **dict(mu=np.full(shape, 0.3, np.float32), sigma=np.zeros(shape, np.float32), model_id="toy"),
        **dict(model_fingerprint="0" * 16, head_dim=64, scorer="gate", method="implied", scope="model", ratio=0.3),
        **dict(segment=256, samples=2, statistics=arrays),
    }
    return Profile(**(values | changes))


def watching(pairs: dict[tuple[int, int, int], float]) -> np.ndarray:
    """`watched` [2, 3, PIVOTS] with these entries."""
    watched = np.zeros((2, 3, PIVOTS), np.float32)
    for place, value in pairs.items():
        watched[place] = value
    return watched


ORDER = [[-1, 0, 2], [1, -1, -1]]
"""Pivots (0, 1), (1, 0), (0, 2) of two layers of three heads."""


def test_every_head_is_watched_by_the_pivot_that_foresees_most():
    watched = watching({(0, 0, 0): 0.2, (0, 0, 2): 0.3, (1, 1, 0): 0.2, (1, 1, 1): 0.4, (1, 1, 2): 0.5, (0, 1, 0): 0.9})
    profile = make_profile({PIVOT_ORDER: ORDER, WATCHED: watched})
    one, two, three = (head_roles(profile, count) for count in (1, 2, 3))
    assert one.pivots == ((0, 1),)
    assert one.watched_by.tolist() == [[0, -1, -1], [-1, 0, -1]]
    assert two.pivots == ((0, 1), (1, 0))
    assert two.watched_by.tolist() == [[0, -1, -1], [-1, 1, -1]]
    assert three.watched_by.tolist() == [[2, -1, -1], [-1, 2, -1]]
    assert three.watched_by.dtype == np.int64


def test_nobody_watches_for_an_earlier_layer():
    """Whatever the file says: such a pivot attends only after the head has."""
    profile = make_profile(
        {PIVOT_ORDER: [[-1, -1, -1], [0, -1, -1]], WATCHED: watching({(0, 2, 0): 0.9, (1, 2, 0): 0.1})}
    )
    assert head_roles(profile, 1).watched_by.tolist() == [[-1, -1, -1], [-1, -1, 0]]


@pytest.mark.parametrize(
    ("statistics", "count", "words"),
    [
        ({}, 1, "calibrate again"),
        ({PIVOT_ORDER: ORDER}, 1, "calibrate again"),
        ({PIVOT_ORDER: ORDER, WATCHED: watching({})}, 4, "ask for 1 to 3"),
        ({PIVOT_ORDER: ORDER, WATCHED: watching({})}, 0, "ask for 1 to 3"),
        ({PIVOT_ORDER: np.full((2, 3), -1), WATCHED: watching({})}, 1, "longer samples"),
    ],
)
def test_profiles_without_pivots_are_refused_in_one_line(statistics, count, words):
    with pytest.raises(RaggedConfigError, match=words) as refused:
        head_roles(make_profile(statistics), count)
    assert "\n" not in str(refused.value)


# Budgets with pivots


def of_ratio(weights: np.ndarray, segment: int):
    return lambda ratio: fit_kept(weights, ratio, segment)


def pivots_of(shape: tuple[int, int], *pivots: tuple[int, int]) -> HeadRoles:
    return HeadRoles(pivots, np.full(shape, -1))


def test_pivots_keep_everything_and_the_rest_share_what_is_left():
    """Of 4 heads * 256 * 0.5 = 512 tokens one pivot has 256: the others have 256 / 3 each, in units of 16."""
    kept = with_pivots(lambda r: uniform_kept(2, 2, r, 256), pivots_of((2, 2), (1, 0)), 0.5, 256)
    assert kept[1, 0] == 256
    assert kept.sum() == 512
    assert sorted(kept.ravel().tolist()) == [80, 80, 96, 256]


@examples(60)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(2, 4)),
    ratio=st.floats(0.07, 1.0),
    segment=st.sampled_from((64, 256)),
    seed=st.integers(0, 99),
    count=st.integers(1, 3),
)
def test_the_mean_is_the_ratio_and_no_more_would_fit(shape, ratio, segment, seed, count):
    rng = np.random.default_rng(seed)
    heads = rng.permutation(shape[0] * shape[1])[:count]
    pivots = [(int(head) // shape[1], int(head) % shape[1]) for head in heads]
    weights = rng.uniform(0.01, 1, shape)
    roles = pivots_of(shape, *pivots)
    least = (len(pivots) * segment + (weights.size - len(pivots)) * GUARD) / (weights.size * segment)
    if ratio < least:
        with pytest.raises(RaggedConfigError, match="fewer pivots"):
            with_pivots(of_ratio(weights, segment), roles, ratio, segment)
        return
    kept = with_pivots(of_ratio(weights, segment), roles, ratio, segment)
    assert all(kept[place] == segment for place in pivots)
    target = ratio * segment * weights.size
    assert kept.sum() <= target + 1e-6
    # One more unit does not fit, unless nobody has room for it.
    assert kept.sum() > target - 16 or (kept == segment).all()
    # The rest is what the profile gives at one ratio.
    others = np.ones(shape, bool)
    others[tuple(np.array(pivots).T)] = False
    found = any(
        (fit_kept(weights, units / (segment // 16 * weights.size), segment)[others] == kept[others]).all()
        for units in range(1, segment // 16 * weights.size + 1)
    )
    assert found
