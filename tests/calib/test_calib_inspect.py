"""Command inspect: budgets, stability and grouping, on made-up and on real measured profiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from calib.__main__ import main
from calib.grouping import group_largest, measure_reclaimed
from calib.inspect import make_report
from calib.role_report import measure_roles
from calib.stability import measure_stability
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.budgets import GUARD, UNIT, fit_kept
from sgl_ragged.profiles.fingerprint import config_fingerprint
from sgl_ragged.profiles.head_statistics import (
    DROPPED,
    OVERLAP,
    PIVOT_ORDER,
    PIVOTS,
    ROLE,
    SIMILARITY,
    STABILITY,
    WATCHED,
)
from sgl_ragged.profiles.profile import Profile, load_profile, profile_kept
from tests.examples import examples

with np.load(Path(__file__).parents[1] / "data" / "measured_profiles.npz") as _archive:
    MEASURED = dict(_archive)
"""Mean shares [layers, heads] by SCORER/MODEL/SCOPE/SHARE; tests/data/README.md."""


def make_profile(mu, **changes) -> Profile:
    mu = np.asarray(mu, np.float32)
    values = {
        "sigma": np.zeros_like(mu),
        "model_id": "toy",
        "model_fingerprint": "0" * 16,
        "head_dim": 64,
        "scorer": "keydiff",
        "method": "implied",
        "scope": "layer",
        "ratio": 0.3,
        "segment": 256,
        "samples": 6,
        "alpha": 0.0,
    }
    return Profile(mu=mu, **(values | changes))


def sampled_profile(**changes) -> Profile:
    rng = np.random.default_rng(1)
    mu = rng.uniform(0.1, 0.5, (3, 8))
    shares = np.clip(mu + rng.normal(0, 0.01, (6, 3, 8)), 0, 1).astype(np.float32)
    return make_profile(
        shares.mean(axis=0),
        **{"sigma": shares.std(axis=0), "shares": shares, "tasks": ("one", "one", "two", "two", "three", "three")}
        | changes,
    )


def reclaimed(profile: Profile) -> dict[tuple[int, str], float]:
    kept = profile_kept(profile, 0.3, 256)
    return {(e.heads_per_group, e.order): 100 * e.calibrated for e in measure_reclaimed(profile, kept, 256)}


# Heads per group


@pytest.mark.parametrize(
    ("scorer", "adjacent", "clustered", "single"),
    [
        ("expected_attention", 55.4, 59.8, 69.9),
        ("fastkvzip", 53.2, 57.8, 69.9),
        ("keydiff", 58.9, 62.8, 69.8),
        ("snapkv", 63.0, 65.9, 69.8),
    ],
)
def test_groups_of_four_on_measured_profiles(scorer, adjacent, clustered, single):
    found = reclaimed(make_profile(MEASURED[f"{scorer}/llama-3.1-8b-instruct/layer/whole"]))
    assert found[4, "adjacent"] == pytest.approx(adjacent, abs=1)
    assert found[4, "clustered"] == pytest.approx(clustered, abs=1)
    assert found[1, "adjacent"] == found[1, "clustered"] == pytest.approx(single, abs=1)


def test_reclaimed_in_closed_form():
    entries = measure_reclaimed(
        make_profile([[0.25, 0.75, 0.25, 0.75]], sigma=np.full((1, 4), 0.125, np.float32), alpha=1.0),
        np.array([[64, 192, 64, 192]]),
        256,
    )
    found = {(e.heads_per_group, e.order): (e.calibrated, e.served) for e in entries}
    assert found == {
        (1, "adjacent"): (0.375, 0.5),
        (1, "clustered"): (0.375, 0.5),
        (2, "adjacent"): (0.125, 0.25),
        (2, "clustered"): (0.375, 0.5),
        (4, "adjacent"): (0.125, 0.25),
        (4, "clustered"): (0.125, 0.25),
        (8, "adjacent"): (0.125, 0.25),
        (8, "clustered"): (0.125, 0.25),
    }


# Budgets of measured profiles


@pytest.mark.parametrize("name", MEASURED)
@examples(12)
@given(
    ratios=st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)).map(sorted),
    segment=st.sampled_from([128, 256, 512]),
    scope=st.sampled_from(["layer", "model"]),
)
def test_budgets_meet_the_ratio_on_measured_profiles(name, ratios, segment, scope):
    weights = MEASURED[name]
    small, large = (fit_kept(weights, ratio, segment, scope) for ratio in ratios)
    assert (small <= large).all()
    for kept, ratio in zip((small, large), ratios, strict=True):
        assert (kept % UNIT == 0).all()
        assert (kept >= GUARD).all()
        assert (kept <= segment).all()
        sums = kept.sum(axis=1) if scope == "layer" else kept.sum(keepdims=True)
        # The guard of every head is kept even where the ratio asks for less.
        target = max(ratio * segment, GUARD) * kept.size / sums.size
        assert (abs(sums - target) <= UNIT).all()


# Stability


def test_stability_of_stable_heads():
    found = measure_stability(sampled_profile())
    assert (found.samples, found.tasks) == (6, ("one", "three", "two"))
    assert found.halves > 0.98
    assert 0.95 < found.tasks_lowest <= found.tasks_mean <= 1
    assert found.steady == 1.0


def test_stability_in_closed_form():
    # Even samples rank the heads one way and odd ones the other; the two tasks agree in part.
    shares = np.array([[[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.1]], [[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.0]]], np.float32)
    sigma = np.array([[0.1, 0.01, 0.04]], np.float32)
    found = measure_stability(make_profile(shares.mean(axis=0), sigma=sigma, shares=shares, tasks=("a", "b", "a", "a")))
    assert found.halves == pytest.approx(-1)
    # Means of task a: 1/6, 0.2, 0.2 (ranks 1, 2.5, 2.5); of task b: ranks 3, 2, 1.
    assert found.tasks_lowest == found.tasks_mean == pytest.approx(-np.sqrt(0.75), abs=1e-6)
    assert found.steady == pytest.approx(2 / 3)


def test_the_recall_models_profile_is_uneven_and_stable():
    """Acceptance of the committed calibration: 50 samples, shares that span 4x, halves that agree."""
    folder = Path(__file__).parents[2] / "benchmarks" / "recall"
    profile = load_profile(folder / "keydiff-coverage.safetensors")
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    assert profile.model_fingerprint == config_fingerprint(config)
    found = measure_stability(profile)
    assert found.samples == 50
    assert found.halves >= 0.95
    assert profile.mu.max() >= 4 * profile.mu.min()


def test_nothing_to_compare():
    assert measure_stability(make_profile([[0.3, 0.3]])) is None
    alike = np.full((1, 1, 2), 0.3, np.float32)
    found = measure_stability(make_profile(alike[0], shares=alike, tasks=("one",)))
    assert (found.halves, found.tasks_lowest, found.tasks_mean) == (None, None, None)
    alike = np.full((2, 1, 2), 0.3, np.float32)
    assert measure_stability(make_profile(alike[0], shares=alike, tasks=("a", "b"))).halves is None


# The command


def test_json(tmp_path, capsys):
    profile = sampled_profile()
    profile.save(tmp_path / "p.safetensors")
    main(["inspect", str(tmp_path / "p.safetensors"), "--ratio", "0.5", "--segment", "128", "--json"])
    report = json.loads(capsys.readouterr().out)
    kept = profile_kept(profile, 0.5, 128)
    assert report["kept"] == kept.tolist()
    assert report["profile"]["digest"] == profile.digest()
    assert report["profile"]["tasks"] == {"one": 2, "two": 2, "three": 2}
    budgets = report["budgets"]
    assert (budgets["ratio"], budgets["segment"]) == (0.5, 128)
    assert (budgets["min"], budgets["median"], budgets["max"]) == (kept.min(), np.median(kept), kept.max())
    assert budgets["memory_kept"] == pytest.approx(kept.mean() / 128)
    assert budgets["span"] == pytest.approx(float(profile.mu.max() / profile.mu.min()))
    np.testing.assert_allclose(np.array(budgets["layers"])[:, 1], kept.mean(axis=1) / 128)
    assert report["stability"]["halves"] > 0.98
    assert len(report["reclaimed"]) == 8


def test_tables(tmp_path, capsys):
    sampled_profile().save(tmp_path / "p.safetensors")
    main(["inspect", str(tmp_path / "p.safetensors")])
    shown = capsys.readouterr().out
    assert "ratio 0.3, segment 256" in shown
    for words in ("keydiff", "memory kept", "rank correlation", "4 clustered"):
        assert words in shown


def profile_with_roles(**changes) -> Profile:
    """Two layers of two heads: pivots (0, 1) and then (1, 0), the rest of roles by thresholds of 0.5."""
    watched = np.zeros((2, 2, PIVOTS), np.float32)
    watched[..., 0] = [[0.25, 0.5], [0.5, 0.5]]
    watched[1, :, 1] = [1, 0.75]
    statistics = {
        STABILITY: np.array([[0.2, 0.9], [0.45, 0.35]]),
        SIMILARITY: np.array([[0.1, 0.1], [0.55, 0.55]]),
        OVERLAP: np.array([[[1, 0.1], [0.1, 1]], [[1, 0.55], [0.55, 1]]]),
        ROLE: np.array([[0, 1], [2, 3]]),
        PIVOT_ORDER: np.array([[-1, 0], [1, -1]]),
        WATCHED: watched,
        DROPPED: np.array([[2, 0], [1, 1]]),
    }
    arrays = {name: array.astype(np.float32) for name, array in statistics.items()}
    return make_profile(np.full((2, 2), 0.3), **({"statistics": arrays} | changes))


def test_roles_in_closed_form():
    found = measure_roles(profile_with_roles())
    assert [(row.layer, row.head, row.role) for row in found.heads] == [
        *((0, 0, "volatile"), (0, 1, "anchor"), (1, 0, "pivot"), (1, 1, "satellite"))
    ]
    # No pivot is watched for, and the second one foresees more for (1, 1) than the first.
    assert [row.watched_by for row in found.heads] == [(0, 1), None, None, (1, 0)]
    assert [row.coverage for row in found.heads] == [0.25, None, None, 0.75]
    # 0.25 * 2 + 0.5 + 0.5 of 4; then 0.25 * 2 + 1 + 0.75.
    assert [(pivot.layer, pivot.head, pivot.coverage) for pivot in found.pivots] == [(0, 1, 0.375), (1, 0, 0.5625)]
    given, *swept = found.counts
    assert (given.tau, given.heads) == (None, (1, 1, 1, 1))
    assert [(entry.tau, entry.heads) for entry in swept] == [
        *((0.3, (1, 1, 1, 1)), (0.4, (1, 1, 1, 1)), (0.5, (1, 1, 1, 1)), (0.6, (3, 1, 0, 0)))
    ]
    assert measure_roles(sampled_profile()) is None


def test_roles_are_shown_and_drawn(tmp_path, capsys):
    profile_with_roles().save(tmp_path / "p.safetensors")
    main(["inspect", str(tmp_path / "p.safetensors"), "--roles", "--plots", str(tmp_path / "plots")])
    shown = capsys.readouterr().out
    for words in ("satellite", "(1, 0)", "0.562", "as calibrated"):
        assert words in shown
    assert (tmp_path / "plots" / "roles.png").read_bytes().startswith(b"\x89PNG")
    main(["inspect", str(tmp_path / "p.safetensors"), "--json"])
    roles = json.loads(capsys.readouterr().out)["roles"]
    assert roles["heads"][3]["watched_by"] == [1, 0]
    assert roles["pivots"][0]["coverage"] == 0.375
    main(["inspect", str(tmp_path / "p.safetensors")])
    assert "satellite" not in capsys.readouterr().out


def test_profiles_without_roles_say_so(tmp_path, capsys):
    sampled_profile().save(tmp_path / "p.safetensors")
    main(["inspect", str(tmp_path / "p.safetensors"), "--roles"])
    assert "calibrate again" in capsys.readouterr().out
    # Nothing is dropped, so nobody watches.
    nobody = profile_with_roles().statistics | {PIVOT_ORDER: np.full((2, 2), -1.0, np.float32)}
    nobody |= {DROPPED: np.zeros((2, 2), np.float32)}
    found = measure_roles(profile_with_roles(statistics=nobody))
    assert found.pivots == ()
    assert {row.watched_by for row in found.heads} == {None}


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plots(tmp_path, capsys, suffix, start):
    rng = np.random.default_rng(0)
    coverage = np.sort(rng.uniform(0, 1, (3, 8, 16)), axis=2).astype(np.float32)
    sampled_profile(method="coverage", coverage=coverage).save(tmp_path / "p.safetensors")
    main(["inspect", str(tmp_path / "p.safetensors"), "--plots", str(tmp_path / "plots"), "--format", suffix])
    for name in ("heatmap", "retention", "grouping", "coverage"):
        drawn = (tmp_path / "plots" / f"{name}.{suffix}").read_bytes()
        assert drawn.startswith(start)
        assert len(drawn) > 2000


def test_plots_of_means_only(tmp_path, capsys):
    make_profile([[0.2, 0.4]]).save(tmp_path / "p.safetensors")
    main(["inspect", str(tmp_path / "p.safetensors"), "--json", "--plots", str(tmp_path / "plots")])
    assert json.loads(capsys.readouterr().out)["stability"] is None
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["grouping.png", "heatmap.png"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("none.safetensors",), "does not exist"),
        (("text.safetensors",), "damaged or no profile"),
        (("p.safetensors", "--ratio", "2"), "outside (0, 1]"),
        (("p.safetensors", "--segment", "100"), "must be a multiple of 16"),
        (("p.safetensors", "--plots", "text.safetensors"), "cannot write plots"),
    ],
)
def test_bad_input_ends_with_one_line(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    sampled_profile().save("p.safetensors")
    Path("text.safetensors").write_text("no profile\n")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *args])
    line = str(ended.value.code)
    assert line.startswith("calib: ")
    assert words in line
    assert "\n" not in line


def test_head_that_keeps_nothing_has_no_span():
    assert make_report(make_profile([[0.0, 0.6]])).budgets.span is None


# Groups


@given(
    arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.integers(1, 9)),
    st.integers(1, 9),
    st.sampled_from(["clustered", "adjacent"]),
)
def test_groups_share_their_largest_budget(kept, size, order):
    grouped = group_largest(kept, size, order)
    assert (grouped >= kept).all()
    for row, out in zip(kept, grouped, strict=True):
        assert len(set(out.tolist())) <= -(-len(row) // size)
        assert out.max() == row.max()
        if order == "adjacent":
            assert out.tolist() == [row[i // size * size :][:size].max() for i in range(len(row))]
    if kept.shape[1] % size == 0:
        assert group_largest(kept, size).sum() <= group_largest(kept, size, "adjacent").sum()


@pytest.mark.parametrize(("size", "order"), [(0, "clustered"), (2, "random")])
def test_bad_groups(size, order):
    with pytest.raises(RaggedConfigError):
        group_largest(np.ones((1, 4)), size, order)
