"""Scorers against closed forms, and the choice of what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers import SCORERS, get_scorer, keep_positions
from tests.oracle import kept_tokens

KEYS = torch.tensor([[3.0, 0.0], [0.0, 4.0], [-5.0, 0.0], [1.0, 0.0]])
VALUES = torch.tensor([[6.0, 8.0], [0.0, 2.0], [0.0, 0.0], [0.5, 0.0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Unit keys are e1, e2, -e1, e1; their mean is (1, 1) / 4, at 45 degrees to e1.
        ("keydiff", [-(0.5**0.5), -(0.5**0.5), 0.5**0.5, -(0.5**0.5)]),
        ("key_norm", [-3.0, -4.0, -5.0, -1.0]),
        ("value_key_norm", [10 / 3, 0.5, 0.0, 0.5]),
        ("streaming", [0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_closed_forms(name, expected):
    torch.testing.assert_close(get_scorer(name).score(KEYS, VALUES), torch.tensor(expected))


@pytest.mark.parametrize("name", sorted(SCORERS))
def test_leading_axes_are_independent_and_arguments_unchanged(name):
    keys, values = torch.randn(2, 3, 32, 8), torch.randn(2, 3, 32, 8)
    before = keys.clone(), values.clone()
    scores = get_scorer(name).score(keys, values)
    assert scores.shape == (2, 3, 32)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[1, 2], get_scorer(name).score(keys[1, 2], values[1, 2]))
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


def test_unknown_scorer_lists_the_known():
    with pytest.raises(RaggedConfigError, match="key_norm, keydiff, streaming, value_key_norm"):
        get_scorer("nonsense")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCORERS)),
    units=st.integers(1, 4),
    first=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_selection_equals_the_literal_rule(name, units, first, seed):
    rng = np.random.default_rng(seed)
    # Multiples of a quarter: exact in float32 and float64 alike for the norms' squares, with many exact ties.
    keys = rng.integers(-3, 4, (64, 4)) / 4
    keys[0] = 0.25
    values = rng.integers(-3, 4, (64, 4)) / 4
    keys[(keys == 0).all(axis=1)] = 0.25
    scores = get_scorer(name).score(torch.tensor(keys[None, None]), torch.tensor(values[None, None]))
    found = keep_positions(scores, 16 * units, torch.tensor([first]))[0, 0].tolist()
    if name == "streaming":
        assert found == kept_tokens(name, keys, values, 16 * units, first)
    # The literal rule on the scores as computed: ties and forced tokens, whatever the rounding of a formula.
    flat = scores[0, 0].tolist()
    sinks = list(range(4)) if first else []
    chosen = (sinks + list(range(63, 47, -1)))[: 16 * units]
    rest = sorted((p for p in range(64) if p not in chosen), key=lambda p: (-flat[p], p))
    assert found == sorted(chosen + rest[: 16 * units - len(chosen)])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_scores_are_deterministic(bad, first):
    scores = torch.zeros(1, 1, 64)
    scores[..., 20:30] = bad
    kept = keep_positions(scores, 32, torch.tensor([first]))[0, 0].tolist()
    assert len(set(kept)) == 32
    assert kept == sorted(kept)
    assert set(range(48, 64)) <= set(kept)
    assert (20 in kept) == (bad == torch.inf)


def test_all_equal_scores_keep_the_earliest():
    kept = keep_positions(torch.zeros(1, 1, 64), 32, torch.tensor([False]))[0, 0].tolist()
    assert kept == [*range(16), *range(48, 64)]


def test_guard_gives_way_to_sinks():
    kept = keep_positions(torch.zeros(1, 1, 64), 16, torch.tensor([True]))[0, 0].tolist()
    assert kept == [*range(4), *range(52, 64)]
