"""KL, likelihood and top-1 between distributions of which the likeliest tokens are known, against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.verify.distributions import Distributions, distance


def known(probabilities: list[dict[int, float]], tokens: list[int], first: int = 1) -> Distributions:
    own = [(math.log(p[token]) if token in p else -9.0, token) for p, token in zip(probabilities, tokens, strict=True)]
    top = [
        [(math.log(p), token, "") for token, p in sorted(each.items(), key=lambda x: -x[1])] for each in probabilities
    ]
    return Distributions.from_meta(first, own, top)


def test_two_outcomes_have_the_kl_of_the_definition():
    found = distance(known([{3: 0.5, 4: 0.5}], [3]), known([{3: 0.25, 4: 0.75}], [3]))
    assert found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert found.nll == pytest.approx(math.log(0.5 / 0.25))
    assert (found.same_top1, found.positions) == (0.0, 1)


def test_tokens_that_one_side_lacks_are_in_the_rest():
    """Token 9 is among the reference's likeliest alone: both sides compare {3} with everything else."""
    found = distance(known([{3: 0.6, 9: 0.3}], [3]), known([{3: 0.8, 5: 0.1}], [3]))
    assert found.kl == pytest.approx(0.6 * math.log(0.6 / 0.8) + 0.4 * math.log(0.4 / 0.2))


def test_positions_are_aligned():
    whole = known([{3: 1.0}, {4: 0.5, 5: 0.5}, {6: 0.5, 7: 0.5}], [3, 4, 6])
    part = known([{4: 0.5, 5: 0.5}, {6: 0.5, 7: 0.5}], [4, 6], first=2)
    found = distance(whole, part)
    assert (found.kl, found.positions) == (pytest.approx(0, abs=1e-9), 2)


@pytest.mark.parametrize("tokens", [[4], []])
def test_other_texts_are_refused(tokens):
    with pytest.raises(ValueError, match="different tokens"):
        distance(known([{3: 0.5, 4: 0.5}], [3]), known([{3: 0.5, 4: 0.5}] * len(tokens), tokens))


@given(
    logits=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=30), count=st.integers(1, 30)
)
def test_it_is_at_most_the_full_kl_and_equal_where_all_is_known(logits, count):
    p, q = (np.exp(x) / np.exp(x).sum() for x in np.array(logits).T)
    full = float((p * np.log(p / q)).sum())

    def likeliest(x: np.ndarray, count: int) -> Distributions:
        return known([{int(token): float(x[token]) for token in np.argsort(-x)[:count]}], [int(np.argmax(p))])

    some = distance(likeliest(p, count), likeliest(q, len(q)))
    assert -1e-9 <= some.kl <= full + 1e-9
    assert distance(likeliest(p, len(p)), likeliest(q, len(q))).kl == pytest.approx(full, abs=1e-6)
