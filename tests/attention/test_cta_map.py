"""The CTA map: how many CTAs each head gets, against closed forms, brute force and measured profiles."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sgl_ragged.attention.cta_map import (
    BALANCE,
    METHODS,
    CtaMap,
    algorithm1,
    batch_buckets,
    build_cta_map,
    cta_counts,
    cta_table,
    head_parts,
    imbalance,
    makespan,
)
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.budgets import fit_kept, uniform_kept
from tests.examples import examples

with np.load(Path(__file__).parents[1] / "data" / "measured_profiles.npz") as _archive:
    MEASURED = dict(_archive)
"""Mean shares [layers, heads] by SCORER/MODEL/SCOPE/SHARE; tests/data/README.md."""

RESIDENT = 396
"""132 SMs with 3 CTAs each."""

KEPT = arrays(
    np.int64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.integers(1, 16).map(lambda units: 16 * units)
)


def test_it_imports_numpy_alone():
    code = (
        "import sys, sgl_ragged.attention.cta_map\n"
        "assert not {'torch', 'sglang', 'scipy', 'matplotlib'} & set(sys.modules), 'imports more than numpy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Algorithm 1


def test_algorithm_1_by_hand():
    """Layer 0: sum 2, tau 0.2, Phi / tau = 0.25, 1.75, 3.5 (a tie, up), 4.5 (up), so 1 + 2 + 4 + 5 = 12 CTAs, not 10.

    Layer 1: sum 4, tau 0.4: 2.5 each, a tie, up. Layer 2 has nothing to do.
    """
    budgets = np.array([[0.05, 0.35, 0.7, 0.9], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert algorithm1(budgets, 10).tolist() == [[1, 2, 4, 5], [3, 3, 3, 3], [1, 1, 1, 1]]


@given(KEPT, st.integers(1, 100))
def test_algorithm_1_as_printed(kept, num_ctas):
    counts = algorithm1(kept, num_ctas)
    for row, out in zip(kept.tolist(), counts.tolist(), strict=True):
        tau = Fraction(sum(row), num_ctas)
        assert out == [max(1, (Fraction(phi) / tau + Fraction(1, 2)).__floor__()) for phi in row]
    assert cta_counts(kept, num_ctas, 1, "algorithm1").tolist() == counts.tolist()


def test_algorithm_1_of_a_batch():
    kept = np.array([[256, 32, 64, 48]])
    # Three requests leave 11 CTAs each, forty leave less than one, which counts as one.
    assert cta_counts(kept, 35, 3, "algorithm1").tolist() == algorithm1(kept, 11).tolist() == [[7, 1, 2, 1]]
    assert cta_counts(kept, 35, 40, "algorithm1").tolist() == [[1, 1, 1, 1]]


# Exact


def test_exact_by_hand():
    # All loads are 32: no division of 12 is better. Half a place too many does not matter, a whole one is used.
    kept = np.array([[256, 64, 32, 32]])
    for resident, batch in ((12, 1), (24, 2), (25, 2)):
        assert cta_counts(kept, resident, batch, "exact").tolist() == [[8, 2, 1, 1]]
    assert cta_counts(kept, 26, 2, "exact").tolist() == [[9, 2, 1, 1]]
    # Ties go to the lower head.
    equal = np.full((1, 4), 64)
    assert cta_counts(equal, 43, 1, "exact").tolist() == [[11, 11, 11, 10]]


@pytest.mark.parametrize(
    ("resident", "batch", "total"),
    [
        (4, 1, 4),  # one wave
        (1, 1, 4),  # four waves of one CTA
        (2, 4, 4),  # eight waves of half a CTA of each request
        (5, 1, 20),  # 5 / 4, 10 / (4 * 2), 15 / (4 * 3) are 1.25; 20 are equal
        (5, 2, 12),  # 2.5 hold no CTA for each head; 5, 7.5 and 10 are 1.25; 12.5 / (4 * 3) = 1.04
        (9, 2, 36),  # four heads in 4.5 places: even, but 1.125 times the least possible time, as up to 31.5
        (21, 5, 4),  # four heads in 4.2 places: 1.05
    ],
)
def test_exact_divides_equal_heads_into_the_fewest_waves(resident, batch, total):
    """With N CTAs for 4 equal heads the largest load is 1 / floor(N / 4) of a head."""
    equal = np.full((1, 4), 64)
    counts = cta_counts(equal, resident, batch, "exact")
    assert counts.sum() == total
    assert makespan(equal, counts, batch, resident) <= BALANCE


def test_an_extreme_head_is_divided_over_several_waves():
    """Parts of the last head, times in waves * 256 / parts over 304 / 4: 1, 5, 9 and 13 give 3.37, 1.35, 1.12, 1.04."""
    assert cta_counts(np.array([[16, 16, 16, 256]]), 4, 1, "exact").tolist() == [[1, 1, 1, 13]]


def divisions(total: int, heads: int) -> Iterator[tuple[int, ...]]:
    """All ways to hand `total` CTAs to heads, at least one each."""
    for cuts in itertools.combinations(range(1, total), heads - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


@examples(150)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 8))
def test_exact_needs_as_few_waves_as_any_division_and_has_the_smallest_largest_load(row, resident, batch):
    (counts,) = cta_counts(np.array([row]), resident, batch, "exact").tolist()

    def largest(division: tuple[int, ...]) -> Fraction:
        return max(Fraction(n, s) for n, s in zip(row, division, strict=True))

    for waves in itertools.count(1):
        total = waves * resident // batch
        if total > 18:
            assert sum(counts) > 18
            return
        if total < len(row):
            continue
        best = min(largest(division) for division in divisions(total, len(row)))
        time = best * waves * resident / (batch * sum(row))
        assume(time != Fraction(str(BALANCE)))  # floats may be off by one unit
        if time < BALANCE:
            break
    assert sum(counts) == total
    assert largest(tuple(counts)) == best


@given(KEPT, st.integers(1, 450), st.integers(1, 70))
def test_exact_fills_whole_waves_evenly(kept, resident, batch):
    counts = cta_counts(kept, resident, batch, "exact")
    assert (counts >= 1).all()
    assert (imbalance(kept, counts) <= BALANCE).all()
    per_wave = Fraction(resident, batch)
    for row, out in zip(kept, counts, strict=True):
        total = int(out.sum())
        waves = -(-total * batch // resident)
        assert total == waves * per_wave // 1
        assert total < 11 * (len(row) + 1) + per_wave
        assert (row / out).max() * waves * resident <= row.sum() * batch * (BALANCE + 1e-12)
        # A larger head has no fewer parts (of equal ones the lower may have one more), and every CTA went to a
        # head whose load was at least the final largest.
        assert (np.diff(out[np.argsort(row, kind="stable")]) >= -1).all()
        taken = out > 1
        if taken.any():
            assert (row[taken] / (out[taken] - 1)).min() >= (row / out).max()


@given(KEPT, st.integers(1, 9), st.integers(0, 99))
def test_exact_needs_one_wave_where_it_holds_many_ctas(kept, batch, more):
    """Largest load L: s <= n / L + 1 for every head, so N <= sum / L + H, and L / mean <= N / (N - H).

    A wave holds x < N + 1 CTAs of a request, so its time is less than x / (x - 1 - H): 1.1 at x = 11 * (H + 1). Where
    the batch divides the wave, x = N, and 11 * H are enough.
    """
    heads = kept.shape[1]
    for resident in (11 * (heads + 1) * batch + more, (11 * heads + more) * batch):
        counts, num_ctas = cta_counts(kept, resident, batch, "exact"), resident // batch
        assert (counts.sum(axis=1) == num_ctas).all()
        assert (imbalance(kept, counts) <= num_ctas / (num_ctas - heads) + 1e-12).all()


@examples(50)
@given(KEPT, st.integers(1, 60), st.integers(1, 12))
def test_exact_is_within_its_limit_of_the_least_possible_time(kept, resident, batch):
    counts = cta_counts(kept, resident, batch, "exact")
    assert (makespan(kept, counts, batch, resident) <= BALANCE + 1e-9).all()


# All methods


@given(KEPT, st.integers(1, 120), st.integers(1, 20), st.sampled_from(METHODS))
def test_every_head_has_a_cta_and_equal_layers_are_divided_alike(kept, resident, batch, method):
    counts = cta_counts(kept, resident, batch, method)
    assert counts.shape == kept.shape
    assert counts.dtype == np.int64
    assert (counts >= 1).all()
    twice = cta_counts(np.concatenate([kept, kept]), resident, batch, method)
    assert twice.tolist() == counts.tolist() * 2
    assert (imbalance(kept, counts) >= 1 - 1e-12).all()
    if method == "none":
        assert (counts == 1).all()
    if method == "uniform":
        assert (counts == max(1, resident // batch // kept.shape[1])).all()


@pytest.mark.parametrize("method", METHODS)
def test_equal_budgets_are_divided_equally(method):
    kept = uniform_kept(4, 8, 0.5, 256)
    counts = cta_counts(kept, 96 * 3, 3, method)
    assert (counts == (1 if method == "none" else 12)).all()
    assert imbalance(kept, counts).tolist() == [1.0] * 4


# Tables for the kernels


@given(arrays(np.int64, st.integers(1, 9), elements=st.integers(1, 16)), st.integers(1, 100), st.sampled_from(METHODS))
def test_the_table_covers_every_part_once_longest_first(row, num_ctas, method):
    (counts,) = cta_counts(row[None], num_ctas, 1, method)
    table, first = cta_table(counts, row), head_parts(counts)
    assert table.shape == (counts.sum(), 4)
    assert table.dtype == first.dtype == np.int32
    expected = [(head, part, s) for head, s in enumerate(counts.tolist()) for part in range(s)]
    assert sorted(map(tuple, table[:, :3].tolist())) == expected
    # Places are head-major, and those of head_parts.
    assert [tuple(line[:3]) for line in sorted(table.tolist(), key=lambda line: line[3])] == expected
    assert sorted(table[:, 3].tolist()) == list(range(len(table)))
    assert (table[:, 3] == first[table[:, 0], 0] + table[:, 1]).all()
    assert (first[table[:, 0], 1] == table[:, 2]).all()
    loads = row[table[:, 0]] / table[:, 2]
    assert (np.diff(loads) <= 0).all()
    assert (np.diff(table[:, 3])[np.diff(loads) == 0] > 0).all()


def test_a_table_by_hand():
    kept, counts = np.array([32, 96, 48]), np.array([1, 2, 1])
    assert cta_table(counts, kept).tolist() == [[1, 0, 2, 1], [1, 1, 2, 2], [2, 0, 1, 3], [0, 0, 1, 0]]
    assert head_parts(counts).tolist() == [[0, 1], [1, 2], [3, 1]]


# Loads


def test_imbalance_by_hand():
    kept = np.array([[32, 96], [64, 64]])
    assert imbalance(kept, np.array([[1, 1], [1, 1]])).tolist() == [1.5, 1.0]
    assert imbalance(kept, np.array([[1, 3], [1, 2]])).tolist() == [1.0, 1.5]


def test_makespan_by_hand():
    kept, whole = np.array([[32, 96]]), np.array([[1, 1]])
    # One slot does everything; two slots: 96 against 32; four: two stand idle.
    assert [makespan(kept, whole, 1, slots).tolist() for slots in (1, 2, 4)] == [[1.0], [1.5], [3.0]]
    # Three requests on four slots: 96, 96, 96, then 32 three times in the fourth slot.
    assert makespan(kept, whole, 3, 4).tolist() == [1.0]
    # Eight CTAs of 32 on three slots: three waves for 8 / 3.
    assert makespan(kept, np.array([[1, 3]]), 2, 3).tolist() == [9 / 8]


@examples(50)
@given(KEPT, st.integers(1, 5), st.integers(1, 20), st.sampled_from(METHODS))
def test_makespan_bounds(kept, batch, slots, method):
    """Between the largest CTA, or all slots equally full, and one CTA more than that (Graham 1969)."""
    counts = cta_counts(kept, slots, batch, method)
    loads, mean = kept / counts, kept.sum(axis=1) * batch / slots
    found = makespan(kept, counts, batch, slots) * mean
    assert (found >= np.maximum(loads.max(axis=1), mean) - 1e-9).all()
    assert (found <= mean + loads.max(axis=1) * (1 - 1 / slots) + 1e-9).all()


# The map


def test_the_map_of_several_batches():
    kept = fit_kept(MEASURED["keydiff/llama-3.1-8b-instruct/layer/evictable"], 0.3, 256)
    found = build_cta_map(kept, RESIDENT, [64, 1, 4, 60, 400, 500, 4])
    assert list(found.counts_by_batch) == [1, 4, 60, 64, 400, 500]
    for batch in found.counts_by_batch:
        assert found.for_batch(batch).tolist() == cta_counts(kept, RESIDENT, batch, "exact").tolist()
    for batch, bucket in ((2, 4), (3, 4), (5, 60), (61, 64), (401, 500), (10_000, 500)):
        assert found.for_batch(batch) is found.counts_by_batch[bucket]
    assert not found.kept.flags.writeable
    assert not found.for_batch(1).flags.writeable
    kept[0, 0] = 16  # the caller's own array stays the caller's


def test_batches_with_the_same_counts_share_them():
    kept = fit_kept(MEASURED["keydiff/llama-3.1-8b-instruct/layer/evictable"], 0.3, 256)
    found = build_cta_map(kept, RESIDENT, [60, 64, 65, 400], "algorithm1")
    assert found.for_batch(60) is found.for_batch(64) is found.for_batch(65)
    assert found.for_batch(400) is not found.for_batch(60)


def test_room_for_the_parts_of_any_batch():
    """Two requests leave twelve parts, three leave six: a larger batch need not leave more."""
    found = CtaMap(np.array([[64, 16]]), {2: np.array([[4, 2]]), 4: np.array([[1, 1]])}, "exact", 12)
    assert [found.most_parts(most) for most in (1, 2, 3, 6, 7)] == [6, 12, 12, 12, 14]


def test_scratch_is_what_the_page_says():
    """docs/kernels.md: MiB for partial results in decode and prefill."""
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    heading, measured, equal = (
        re.search(rf"^\| {name} \| (.+) \|$", page, re.MULTILINE)[1].split(" | ")
        for name in ("`--max-running-requests`", "measured budgets", "equal budgets")
    )
    profiles = [
        fit_kept(shares, 0.3, 256, name.split("/")[2])
        for name, shares in MEASURED.items()
        if "llama-3.1-8b" in name and name.endswith("/evictable")
    ]
    assert len(profiles) == 8

    def mebibytes(kept: np.ndarray, requests: int) -> float:
        rows = requests + 1  # row 0 belongs to no request
        parts = build_cta_map(kept, RESIDENT, batch_buckets(rows)).most_parts(rows)
        return parts * (128 + 1) * 4 * 4 / 2**20

    for requests, between, alone in zip(map(int, heading), measured, equal, strict=True):
        sizes = [mebibytes(kept, requests) for kept in profiles]
        assert between == f"{min(sizes):.1f} to {max(sizes):.1f}"
        assert alone == f"{mebibytes(uniform_kept(32, 8, 0.5, 256), requests):.1f}"

    maps = [build_cta_map(kept, 132, range(1, 132 // 16 + 1)).counts_by_batch for kept in profiles]
    most = max(tiles * counts.sum(axis=1).max() for one in maps for tiles, counts in one.items())
    assert f"at most {most * 128 * (128 + 1) * 4 / 2**20:.1f} MiB" in page


def test_the_map_hands_its_options_on():
    kept = np.array([[256, 32, 64, 48]])
    found = build_cta_map(kept, 22, [2], "algorithm1")
    assert (found.method, found.resident_ctas) == ("algorithm1", 22)
    assert found.for_batch(1).tolist() == [[7, 1, 2, 1]]


@pytest.mark.parametrize("ratio", [0.25, 0.3, 0.5])
@pytest.mark.parametrize("name", MEASURED)
def test_measured_profiles_are_divided_evenly(name, ratio):
    kept = fit_kept(MEASURED[name], ratio, 256, name.split("/")[2])
    found = build_cta_map(kept, RESIDENT, [1, 4, 16, 64])
    for batch, counts in found.counts_by_batch.items():
        assert (imbalance(kept, counts) <= 1.10).all()
        assert (makespan(kept, counts, batch, RESIDENT) <= 1.10 + 1e-9).all()
    for batch in (1, 4):
        assert (found.for_batch(batch).sum(axis=1) == RESIDENT // batch).all()


# Bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda kept: cta_counts(kept, 10, 1, "guess"), "unknown method 'guess' of the CTA map; known: exact"),
        (lambda kept: cta_counts(kept, 0, 1, "exact"), "resident CTAs must be at least 1, not 0"),
        (lambda kept: cta_counts(kept, 10, 0, "none"), "batch must be at least 1, not 0"),
        (lambda kept: cta_counts(kept[0], 10, 1, "none"), "positive integers .layers, heads."),
        (lambda kept: cta_counts(0 * kept, 10, 1, "exact"), "positive integers"),
        (lambda kept: cta_counts(kept / 256, 10, 1, "exact"), "positive integers"),
        (lambda kept: cta_counts(kept[:0], 10, 1, "exact"), "positive integers"),
        (lambda kept: algorithm1(-kept, 10), "not negative"),
        (lambda kept: algorithm1(kept * np.nan, 10), "not negative"),
        (lambda kept: algorithm1(kept, 0), "CTAs per request"),
        (lambda kept: makespan(kept, kept, 0, 10), "batch must be at least 1"),
        (lambda kept: makespan(kept, kept, 1, 0), "resident CTAs must be"),
        (lambda kept: build_cta_map(kept, 0, [1]), "resident CTAs must be"),
        (lambda kept: build_cta_map(kept, 10, []), "at least one batch"),
        (lambda kept: build_cta_map(kept, 10, [4, 0]), "batch must be at least 1, not 0"),
        (lambda kept: build_cta_map(kept, 10, [4], "guess"), "unknown method"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(RaggedConfigError, match=words) as raised:
        call(np.full((2, 4), 64))
    assert "\n" not in str(raised.value)
