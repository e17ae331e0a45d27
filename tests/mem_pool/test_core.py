"""Profile, budgets, layout and sizing: the core that needs neither SGLang nor a GPU."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import isotonic_regression

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.plan import choose_budgets
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes, fit_pool, parse_bytes
from sgl_ragged.profiles.budgets import (
    GUARD,
    UNIT,
    _never_rising,
    check_budgets,
    coverage_kept,
    fit_kept,
    uniform_kept,
)
from sgl_ragged.profiles.fingerprint import config_fingerprint
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import Profile, load_profile, profile_kept
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER as BUNDLED
from sgl_ragged.profiles.profile_choice import ProfileFile, named_profile

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "rope_theta": 500000.0,
    "vocab_size": 512,
}


def profile() -> Profile:
    rng = np.random.default_rng(0)
    return Profile(
        mu=rng.uniform(0, 1, (3, 4)).astype(np.float32),
        sigma=rng.uniform(0, 0.1, (3, 4)).astype(np.float32),
        model_id="toy",
        model_fingerprint=config_fingerprint(CONFIG),
        head_dim=32,
        scorer="keydiff",
        method="implied",
        scope="model",
        ratio=0.3,
        segment=256,
        samples=50,
    )


def test_core_imports_neither_sglang_nor_torch():
    code = (
        "import sys, sgl_ragged.profiles.budgets, sgl_ragged.mem_pool.layout, sgl_ragged.mem_pool.sizing\n"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_serving_needs_nothing_that_only_calibration_and_reports_need():
    root = Path(__file__).parents[2]
    reports = re.compile(r"^\s*(import|from) (matplotlib|rich|scipy)\b", re.MULTILINE)
    assert [path.name for path in (root / "sgl_ragged").rglob("*.py") if reports.search(path.read_text())] == []


# Budgets


@given(
    weights=arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.floats(0, 1)),
    ratio=st.floats(0.01, 1.0),
    units=st.integers(2, 32),
)
def test_fitted_budgets_meet_the_ratio(weights, ratio, units):
    segment = units * UNIT
    kept = fit_kept(weights, ratio, segment)
    assert (kept % UNIT == 0).all()
    assert (kept >= GUARD).all()
    assert (kept <= segment).all()
    target = max(ratio * segment * weights.size, GUARD * weights.size)
    assert abs(int(kept.sum()) - target) <= UNIT


@given(st.integers(1, 6), st.integers(1, 9), st.floats(0.001, 1.0), st.integers(2, 64))
def test_what_is_accepted_is_served_and_what_is_refused_cannot_be(layers, heads, ratio, units):
    """To within a unit; and the advice of a refusal is accepted."""
    segment = units * UNIT
    try:
        check_budgets(ratio, segment)
    except RaggedConfigError as error:
        served = uniform_kept(layers, heads, ratio, segment).mean() / segment
        assert served > ratio
        least, enough = map(float, re.findall(r"ratio of ([\d.]+);.* of (\d+) tokens", str(error))[0])
        assert least >= served
        check_budgets(least, segment)
        check_budgets(ratio, int(enough))
    else:
        served = uniform_kept(layers, heads, ratio, segment).sum()
        assert abs(served - ratio * segment * layers * heads) <= UNIT


@given(st.integers(1, 80), st.integers(1, 16), st.floats(0.07, 1.0))
def test_uniform_budgets_differ_by_one_unit_at_most(layers, heads, ratio):
    kept = uniform_kept(layers, heads, ratio, 256)
    assert kept.max() - kept.min() <= UNIT


@given(
    weights=arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.floats(0, 1)),
    ratios=st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
)
def test_no_head_loses_when_the_ratio_grows(weights, ratios):
    low, high = (fit_kept(weights, ratio, 256) for ratio in sorted(ratios))
    assert (low <= high).all()


@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.7])
def test_uniform_budgets_are_spread_over_layers(ratio):
    """Layers of a uniform budget differ by few units, so that tensor-parallel ranks do, too."""
    sums = uniform_kept(32, 8, ratio, 256).sum(axis=1)
    assert sums.max() - sums.min() <= 2 * UNIT


def test_a_bigger_share_never_keeps_less():
    p = profile()
    kept = profile_kept(p, 0.3, 256)
    weights = (p.mu + 2 * p.sigma).ravel()
    order = np.argsort(weights)
    assert (np.diff(kept.ravel()[order]) >= 0).all()
    assert kept.max() >= 4 * kept.min()


CURVES = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6), st.just(8)), elements=st.floats(0, 5))


@given(CURVES, st.floats(0.13, 1.0), st.floats(0.13, 1.0), st.sampled_from(["layer", "model"]))
def test_coverage_budgets_meet_the_ratio_and_grow_with_it(gains, one, other, scope):
    coverage = gains.cumsum(axis=-1)
    low, high = (coverage_kept(coverage, ratio, 128, scope) for ratio in sorted((one, other)))
    assert (low <= high).all()
    assert (low >= GUARD).all()
    assert (high <= 128).all()
    for kept, ratio in ((low, min(one, other)), (high, max(one, other))):
        rows = kept.sum(axis=1) if scope == "layer" else kept.sum()[None]
        size = kept.shape[1] if scope == "layer" else kept.size
        assert (np.abs(rows - max(ratio * 128, GUARD) * size) <= UNIT).all()
        assert abs(kept.sum() - max(ratio * 128, GUARD) * kept.size) <= UNIT


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.2, 0.1])
def test_layers_of_two_heads_meet_the_ratio_together(ratio):
    """Each alone is off by up to half a unit, all of them together are not."""
    kept = fit_kept(np.ones((28, 2)), ratio, 256, "layer")
    assert kept.mean() / 256 == pytest.approx(ratio, abs=UNIT / 256 / 28)
    assert np.ptp(kept.sum(axis=1)) <= UNIT


@given(
    arrays(np.float64, (2, 2, 4), elements=st.floats(0, 5)),
    st.integers(4, 16),
)
def test_coverage_budgets_cover_most_of_concave_curves(gains, units):
    """Against every other way of handing out the same units."""
    coverage = np.sort(gains, axis=-1)[..., ::-1].cumsum(axis=-1)
    kept = coverage_kept(coverage, units / 16, 64) // UNIT
    assert kept.sum() == units

    def covered(counts: np.ndarray) -> float:
        return sum(coverage.reshape(4, 4)[head, n - 1] for head, n in enumerate(counts.ravel()))

    ways = (np.array(way) for way in itertools.product(range(1, 5), repeat=4) if sum(way) == units)
    assert covered(kept) == pytest.approx(max(covered(way) for way in ways))


@given(arrays(np.float64, st.integers(1, 20), elements=st.floats(-1, 1)))
def test_gains_are_averaged_as_isotonic_regression_does(values):
    want = isotonic_regression(values, increasing=False).x
    np.testing.assert_allclose(_never_rising(values), want, atol=1e-12)


def test_units_that_only_pay_off_together_are_bought_together():
    """Head 0 covers nothing with its second unit and 10 with its third; head 1 covers 4 with each."""
    coverage = np.array([[[1.0, 1.0, 11.0], [1.0, 5.0, 9.0]]])
    assert coverage_kept(coverage, 4 / 6, 48).tolist() == [[48, 16]]


def test_curves_of_another_segment_length():
    coverage = np.array([[[4.0, 8.0, 8.0, 8.0], [0.0, 0.0, 1.0, 2.0]]])
    assert coverage_kept(coverage, 0.5, 64).tolist() == [[32, 32]]
    assert coverage_kept(coverage, 0.5, 128).tolist() == [[64, 64]]
    assert coverage_kept(coverage, 0.375, 128).tolist() == [[64, 32]]


# The choice


def llama() -> ModelGeometry:
    return ModelGeometry.from_config(json.loads((BUNDLED / "configs" / "llama-3.1-8b-instruct.json").read_text()), "m")


def test_budgets_come_from_the_named_profile():
    fits = dict(scorer="keydiff", ratio=0.3, segment=256)
    chosen = choose_budgets(llama(), profile=named_profile("bundled", llama(), "keydiff"), **fits)
    assert chosen.source.startswith("budgets from bundled profile")
    assert "Llama-3.1-8B-Instruct" in chosen.source
    assert chosen.kept.shape == (32, 8)
    assert chosen.kept.max() > 4 * chosen.kept.min()
    equal = choose_budgets(llama(), profile=named_profile("uniform", llama(), "keydiff"), **fits)
    assert equal.profile is None
    assert "every head keeps the same share" in equal.source
    with pytest.raises(RaggedConfigError, match="does not exist"):
        choose_budgets(llama(), profile=named_profile("/no/such/file", llama(), "keydiff"), **fits)
    path = BUNDLED / "llama-3.1-8b-instruct.keydiff.safetensors"
    with pytest.raises(RaggedConfigError, match="--ragged-scorer is 'tova'"):
        choose_budgets(llama(), profile=ProfileFile(path), **fits | {"scorer": "tova"})


@pytest.mark.parametrize(
    ("geometry", "scorer", "words"),
    [
        (llama(), "tova", "for this model there are profiles of fastkvzip, keydiff, snapkv"),
        (replace(llama(), fingerprint="0" * 16), "keydiff", "none has its geometry"),
    ],
)
def test_a_bundled_profile_that_does_not_fit_is_refused(geometry, scorer, words):
    """Equal budgets in its place would be a silent fallback."""
    with pytest.raises(RaggedConfigError, match="use --ragged-profile auto") as refused:
        named_profile("bundled", geometry, scorer)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("word", ["uniform", "bundled", "auto"])
def test_files_named_like_a_word_are_given_with_their_folder(word):
    named = named_profile(f"./{word}", llama(), "keydiff")
    assert named == ProfileFile(Path.cwd() / word)


# Layout


@given(
    kept=arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 8)), elements=st.integers(1, 8)),
    dim=st.sampled_from([2, 64]),
)
def test_layout_covers_the_slab_without_overlap(kept, dim):
    layout = SlabLayout(kept=kept * UNIT, head_dim=dim, segment=8 * UNIT)
    used = np.zeros(layout.slab_elems, dtype=int)
    for layer, head in np.ndindex(*kept.shape):
        for offset in (layout.key_offset, layout.value_offset):
            begin = offset[layer, head]
            used[begin : begin + layout.kept[layer, head] * dim] += 1
    assert (used == 1).all()
    heads = [sorted(h for band in bands for h in band.heads) for bands in layout.bands]
    assert heads == [list(range(kept.shape[1]))] * kept.shape[0]


@given(
    kept=arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 8)), elements=st.integers(1, 16)),
    itemsize=st.sampled_from([2, 4]),
)
def test_slab_bytes_are_the_mean_share_exactly(kept, itemsize):
    layout = SlabLayout(kept=kept * UNIT, head_dim=64, segment=256)
    full = 256 * layout.full_bytes_per_token(itemsize)
    assert layout.slab_bytes(itemsize) * kept.size * 256 == full * int(layout.kept.sum())
    assert layout.slab_bytes(itemsize) / full == pytest.approx(layout.mean_kept_share, rel=1e-12)


@pytest.mark.parametrize("shape", [(32, 8), (36, 8), (8, 8), (4, 8), (28, 4)])
@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.5])
def test_start_up_line_is_within_two_percent_of_the_ratio(shape, ratio):
    layout = SlabLayout(kept=uniform_kept(*shape, ratio, 256), head_dim=128, segment=256)
    plan = fit_pool(layout, 2, OpenPages(256, 64), 2**33, None)
    assert f"(mean share {layout.mean_kept_share:.4f})" in plan.describe()[3]
    assert f"pages of {plan.slab_bytes / 2**20:.2f} MiB" in plan.describe()[0]
    assert plan.uncompressed_tokens(2) == plan.full_tokens
    assert (
        f"uncompressed {plan.full_tokens} tokens in 16 bits, {plan.uncompressed_tokens(1)} in FP8" in plan.describe()[1]
    )
    assert plan.slab_bytes / (256 * layout.full_bytes_per_token(2)) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("segment", [0, 16, 100, 250, -256])
def test_bad_segments_are_refused(segment):
    with pytest.raises(RaggedConfigError, match="multiple of 16"):
        SlabLayout(kept=np.full((1, 1), 16), head_dim=4, segment=segment)


# Sizing


@given(budget=st.integers(10**7, 10**11), requests=st.one_of(st.none(), st.integers(1, 300)))
def test_plan_never_exceeds_the_budget_and_wastes_less_than_a_slab(budget, requests):
    layout = SlabLayout(kept=uniform_kept(4, 8, 0.3, 256), head_dim=32, segment=256)
    try:
        plan = fit_pool(layout, 4, OpenPages(256, 76), budget, requests)
    except RaggedConfigError as error:
        assert "too small" in str(error)  # noqa: PT017 (either outcome is right, depending on the budget)
        return
    assert plan.total_bytes <= budget < plan.total_bytes + plan.slab_bytes
    assert plan.max_requests == (requests or plan.max_requests)
    if requests is None and plan.max_requests > 1:
        assert plan.rows_bytes <= budget / 8
        assert plan.warning is None
        assert plan.max_requests * 5 < plan.num_slots


@given(
    ratio=st.sampled_from([0.05, 0.3, 0.5, 0.75, 0.9, 0.97]),
    budget=st.integers(2**24, 2**37),
    max_tokens=st.none() | st.integers(16384, 10**7),
)
def test_the_default_number_of_requests_never_eats_the_gain(ratio, budget, max_tokens):
    layout = SlabLayout(kept=uniform_kept(4, 8, ratio, 256), head_dim=32, segment=256)
    pages = OpenPages.of(256, layout.slab_bytes(4), 4 * 2 * 8 * 32 * 4)
    plan = fit_pool(layout, 4, pages, budget, None, max_tokens=max_tokens)
    assert plan.total_bytes <= budget
    assert plan.max_total_tokens <= (max_tokens or plan.max_total_tokens)
    if plan.max_requests > 1:
        assert plan.warning is None
        assert plan.max_total_tokens + 256 >= plan.full_tokens
        assert plan.rows_bytes <= plan.total_bytes / 7
    # What the budget still holds with the next larger number of requests is not left unused without a reason.
    if plan.max_requests == 1 and max_tokens is None:
        assert plan.num_slots == (budget - plan.rows_bytes) // plan.slab_bytes


@pytest.mark.parametrize(("requests", "tokens"), [(0, None), (-1, None), (None, 255), (None, 0)])
def test_limits_that_nothing_fits_are_refused(requests, tokens):
    layout = SlabLayout(kept=uniform_kept(4, 8, 0.3, 256), head_dim=32, segment=256)
    with pytest.raises(RaggedConfigError, match="must be at least"):
        fit_pool(layout, 2, OpenPages(256, 76), 2**33, requests, max_tokens=tokens)


def test_plan_counts_padding_slot_and_row():
    layout = SlabLayout(kept=uniform_kept(4, 8, 0.5, 256), head_dim=32, segment=256)
    plan = PoolSizes(layout, 2, OpenPages(256, 128), num_slots=11, num_rows=5, side_bytes=100)
    assert plan.max_total_tokens == 10 * 256
    assert plan.max_requests == 4
    assert plan.total_bytes == 11 * layout.slab_bytes(2) + 5 * (100 + 2 * 2 * 4)


def test_what_lies_beside_pages_is_counted():
    """As many tokens as the budget holds of both; an uncompressed cache would have it beside it, too."""
    layout = SlabLayout(kept=uniform_kept(4, 8, 0.5, 256), head_dim=32, segment=256)
    pages, beside = OpenPages(256, 128), 256 * 1000
    plan = fit_pool(layout, 2, pages, 2**26, 3, beside_bytes=beside)
    assert plan.total_bytes == plan.num_slots * (layout.slab_bytes(2) + beside) + plan.rows_bytes <= 2**26
    assert plan.total_bytes + layout.slab_bytes(2) + beside > 2**26
    assert plan.full_tokens == plan.total_bytes // (4 * 8 * 2 * 32 * 2 + 1000)
    assert f"{plan.num_slots * beside / 2**20:.2f} MiB beside the pages" in plan.describe()[0]
    chosen = fit_pool(layout, 2, pages, 2**26, None, beside_bytes=beside)
    assert chosen.rows_bytes <= chosen.total_bytes * chosen.freed_share / 2
    with pytest.raises(RaggedConfigError, match=f"pages of {layout.slab_bytes(2) + beside} bytes"):
        fit_pool(layout, 2, pages, 2**20, 3, beside_bytes=beside)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("1KiB", 1024), ("2k", 2000), ("24GiB", 24 * 2**30), ("512M", 512 * 10**6), ("1e9", 10**9)],
)
def test_byte_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-5", "12Q", "lots", "1.2.3G"])
def test_bad_byte_sizes(text):
    with pytest.raises(RaggedConfigError):
        parse_bytes(text)


# Profiles


def test_profile_round_trip(tmp_path):
    path = tmp_path / "p.safetensors"
    profile().save(path)
    loaded = load_profile(path)
    np.testing.assert_array_equal(loaded.mu, profile().mu)
    assert loaded.digest() == profile().digest()
    assert (loaded.model_id, loaded.samples, loaded.ratio) == ("toy", 50, 0.3)


def test_missing_profile(tmp_path):
    with pytest.raises(RaggedConfigError, match="does not exist"):
        load_profile(tmp_path / "none.safetensors")


@given(cut=st.floats(0.0, 0.999))
def test_truncated_profile(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "p.safetensors"
    profile().save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(RaggedConfigError):
        load_profile(path)


@given(place=st.floats(0.0, 0.999), flip=st.integers(1, 255))
def test_a_changed_byte_is_noticed(tmp_path_factory, place, flip):
    """Any changed byte is refused, or is one that changes nothing that is read (such as padding of the header)."""
    path = tmp_path_factory.mktemp("flip") / "p.safetensors"
    profile().save(path)
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= flip
    path.write_bytes(bytes(data))
    try:
        loaded = load_profile(path)
    except RaggedConfigError:
        return
    assert loaded.digest() == profile().digest()


def test_foreign_safetensors_file(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "p.safetensors"
    save_file({"mu": np.zeros((2, 2), dtype=np.float32)}, str(path))
    with pytest.raises(RaggedConfigError, match="not an sgl_ragged profile"):
        load_profile(path)


def test_profile_of_another_model():
    fits = ModelGeometry.from_config(CONFIG, "toy")
    assert (fits.num_layers, fits.num_heads, fits.q_per_kv, fits.head_dim) == (3, 4, 2, 32)
    profile().require_model(fits)
    with pytest.raises(RaggedConfigError, match="fingerprint"):
        profile().require_model(ModelGeometry.from_config(CONFIG | {"rope_theta": 10000.0}, "other"))
    with pytest.raises(RaggedConfigError, match="layers, heads, head_dim"):
        profile().require_model(replace(fits, num_layers=5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "guess"}, "unknown method"),
        ({"scope": "head"}, "unknown scope"),
        ({"method": "coverage"}, "do not go together"),
        ({"method": "coverage", "coverage": np.zeros((3, 5, 16), np.float32)}, "must be .3 layers, 4 heads, 16 units"),
        ({"shares": np.zeros((2, 3, 4), np.float32)}, "do not fit 0 tasks"),
        ({"statistics": {"query_mean": np.zeros((4, 3), np.float32)}}, "statistic query_mean"),
        ({"mu": np.full((3, 4), 1.5, np.float32)}, "outside .0, 1.; it is a share"),
        ({"sigma": np.full((3, 4), np.nan, np.float32)}, "non-finite"),
    ],
)
def test_profiles_that_make_no_sense(changes, words):
    with pytest.raises(RaggedConfigError, match=words):
        replace(profile(), **changes)


def test_everything_in_a_profile_comes_back(tmp_path):
    rng = np.random.default_rng(1)
    full = replace(
        profile(),
        method="coverage",
        queries="answers",
        coverage=rng.uniform(0, 9, (3, 4, 16)).cumsum(axis=2).astype(np.float32),
        shares=rng.uniform(0, 1, (2, 3, 4)).astype(np.float32),
        tasks=("a", "b, c"),
        statistics={"query_mean": rng.normal(size=(3, 4, 2, 8)).astype(np.float32)},
        provenance="somewhere",
    )
    full.save(tmp_path / "p.safetensors")
    loaded = load_profile(tmp_path / "p.safetensors")
    assert loaded.digest() == full.digest() != profile().digest()
    assert (loaded.tasks, loaded.queries, loaded.provenance) == (full.tasks, full.queries, full.provenance)
    np.testing.assert_array_equal(loaded.coverage, full.coverage)
    np.testing.assert_array_equal(loaded.statistics["query_mean"], full.statistics["query_mean"])
