"""Measured quality in a profile, and ratios chosen by it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile import load_profile
from sgl_ragged.profiles.quality import MeasuredQuality, kl_at, least_ratio, merge
from tests.profiles.test_reference import make_profile


def row(ratio: float, kl: float, slab_dtype: str = "k8v4") -> MeasuredQuality:
    return MeasuredQuality(ratio, slab_dtype, 0.7, kl, 0.001, 0.98, {"prose": kl})


# A power law: each quarter of the bytes loses sixteen times as much.
ROWS = (row(0.4, 0.001), row(0.1, 0.016))


def test_between_measured_ratios_it_is_a_power_law():
    assert least_ratio(ROWS, 0.004) == pytest.approx(0.2)
    assert kl_at(ROWS, 0.2) == pytest.approx(0.004)
    for ratio, kl in ((0.4, 0.001), (0.1, 0.016)):
        assert least_ratio(ROWS, kl) == pytest.approx(ratio)
        assert kl_at(ROWS, ratio) == pytest.approx(kl)


def test_nothing_is_extrapolated():
    assert least_ratio(ROWS, 0.0009) is None
    assert least_ratio(ROWS, 1.0) == 0.1
    assert least_ratio((), 1.0) is None
    assert kl_at(ROWS, 0.05) is kl_at(ROWS, 0.5) is kl_at((), 0.2) is None


def test_where_the_format_changes_the_higher_ratio_is_taken():
    """Between k5v4 at 0.2 and k4v4 at 0.1 SmolLM2 lost 13 % more than interpolation says."""
    rows = (row(0.3, 0.0005, "k6v6"), row(0.2, 0.002, "k5v4"), row(0.1, 0.006, "k4v4"), row(0.05, 0.02, "k4v4"))
    assert least_ratio(rows, 0.003) == 0.2
    assert least_ratio(rows, 0.001) == 0.3
    assert 0.05 < least_ratio(rows, 0.01) < 0.1


def test_a_ratio_below_a_worse_one_is_not_chosen():
    """By noise a lower ratio can lose less than a higher one."""
    rows = (row(0.4, 0.001), row(0.2, 0.008), row(0.1, 0.002))
    assert 0.2 < least_ratio(rows, 0.004) < 0.4


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(1e-6, 1)), min_size=1, max_size=6), st.floats(1e-6, 1))
def test_what_is_chosen_has_at_most_that_kl(points, kl):
    rows = merge((), [row(*point) for point in points])
    found = least_ratio(rows, kl)
    if found is None:
        assert rows[0].kl > kl
    else:
        assert kl_at(rows, min(max(found, rows[-1].ratio), rows[0].ratio)) <= kl * (1 + 1e-6)
        assert all(one.kl <= kl for one in rows if one.ratio > found * (1 + 1e-9))


def test_a_new_row_replaces_the_old_one():
    assert merge(ROWS, [row(0.2, 0.003), row(0.1, 0.02)]) == (row(0.4, 0.001), row(0.2, 0.003), row(0.1, 0.02))


def test_profiles_store_it(tmp_path):
    profile = make_profile(quality=ROWS)
    profile.save(tmp_path / "p.safetensors")
    assert load_profile(tmp_path / "p.safetensors").quality == ROWS
    assert profile.digest() != make_profile().digest()


@pytest.mark.parametrize(
    "rows", [ROWS[::-1], (ROWS[0], ROWS[0]), (row(0.4, math.nan),), (replace(ROWS[0], ratio=2.0),)]
)
def test_damaged_rows_are_refused(rows):
    with pytest.raises(RaggedConfigError, match="quality"):
        make_profile(quality=rows)
