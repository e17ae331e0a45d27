"""Scorers against closed forms, their registry, and the choice of what is kept."""

from __future__ import annotations

import math
import re
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calib.query_moments import FUTURE, before_rope, rope_of, seen_from_the_end
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers import (
    ALL_QUERIES,
    BUILT_IN,
    ENTRY_POINTS,
    Scorer,
    SegmentData,
    get_scorer,
    keep_positions,
    rank_positions,
    scorer_names,
)
from sgl_ragged.scorers.gate import STEP
from sgl_ragged.scorers.statistics import scorer_statistics
from tests.examples import examples
from tests.oracle import Tokens, kept_tokens
from tests.rounded import unrounded

KEYS = torch.tensor([[3.0, 0.0], [0.0, 4.0], [-5.0, 0.0], [1.0, 0.0]])
VALUES = torch.tensor([[6.0, 8.0], [0.0, 2.0], [0.0, 0.0], [0.5, 0.0]])


def one_head(keys: torch.Tensor, values: torch.Tensor | None = None, **rest) -> SegmentData:
    """A single segment of a single head from [S, d] keys and values and [q_per_kv, W, d] queries."""
    queries = rest.pop("queries", None)
    return SegmentData(
        keys=keys[None, None],
        values=(keys if values is None else values)[None, None],
        queries=None if queries is None else queries[None, None],
        **rest,
    )


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
def test_closed_forms_of_keys_and_values(name, expected):
    torch.testing.assert_close(get_scorer(name).score(one_head(KEYS, VALUES))[0, 0], torch.tensor(expected))


def test_tova_is_the_attention_of_the_last_query():
    """One query head sees logits log 1 .. log 4, the other is indifferent."""
    keys = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()[:, None]
    data = one_head(2 * keys, queries=torch.tensor([[[1.0]], [[0.0]]]), scale=0.5)
    expected = (torch.tensor([0.1, 0.2, 0.3, 0.4]) + 0.25) / 2
    torch.testing.assert_close(get_scorer("tova").score(data)[0, 0], expected)


def test_h2o_is_the_mean_over_the_queries_that_could_see_the_token():
    """Indifferent queries: query i pays 1 / (i + 1) to each token up to itself."""
    data = one_head(torch.ones(4, 1), queries=torch.zeros(1, 4, 1))
    torch.testing.assert_close(get_scorer("h2o").score(data)[0, 0], torch.tensor([25 / 48, 13 / 36, 7 / 24, 1 / 4]))


@pytest.mark.parametrize(
    ("peak", "expected"),
    [(5, {3: 1 / 5, 4: 1 / 5, 5: 1 / 5, 6: 1 / 5, 7: 1 / 5}), (0, {0: 1 / 3, 1: 1 / 4, 2: 1 / 5})],
)
def test_snapkv_pools_what_the_window_sees(peak, expected):
    """All attention of the last 16 queries on one token is spread over its neighbours, fewer at the edge."""
    keys = torch.zeros(32, 1)
    keys[peak] = 100.0
    scores = get_scorer("snapkv").score(one_head(keys, queries=torch.ones(2, 16, 1)))[0, 0]
    want = torch.zeros(32)
    want[list(expected)] = torch.tensor(list(expected.values()))
    torch.testing.assert_close(scores, want)


@pytest.mark.parametrize(
    ("mean", "variance", "expected"),
    # E[exp(q k)] = exp(mean k + variance k^2 / 2) for k = 0, 1, -2 and |v| = 1, 2, 1.
    [(math.log(2), 0.0, [4 / 13, 16 / 13, 1 / 13]), (0.0, 2 * math.log(2), [1 / 19, 4 / 19, 16 / 19])],
)
def test_expected_attention_of_gaussian_queries(mean, variance, expected):
    """Nothing is rotated; in a sequence's first segment the sinks are left out."""
    statistics = {"query_mean": torch.tensor([[[mean]]]), "query_covariance": torch.tensor([[[[variance]]]])}
    statistics |= {"rope_frequencies": torch.zeros(1, 0), "rope_order": torch.zeros(1, 1)}
    keys, values = torch.tensor([[0.0], [1.0], [-2.0]]), torch.tensor([[1.0], [-2.0], [1.0]])
    later = one_head(keys, values, statistics=statistics, segment_indices=torch.tensor([1]))
    torch.testing.assert_close(get_scorer("expected_attention").score(later)[0, 0], torch.tensor(expected))
    sinks = torch.full((4, 1), 9.0)
    first = one_head(
        torch.cat([sinks, keys]), torch.cat([sinks, values]), statistics=statistics, segment_indices=torch.tensor([0])
    )
    scores = get_scorer("expected_attention").score(first)[0, 0]
    torch.testing.assert_close(scores, torch.tensor([0.0] * 4 + expected))


@pytest.mark.parametrize("neox", [True, False])
def test_expected_attention_is_that_of_queries_behind_the_segment(neox):
    """Without spread, the logit is the mean over the next positions of the mean query, rotated to each of them."""
    size, rotated, length, number = 10, 8, 16, 3
    frequencies = 10.0 ** -torch.arange(rotated // 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    query, values = torch.randn(size, generator=generator).double(), torch.ones(length, 1)
    plain = torch.randn(length, size, generator=generator).double()

    def rotate(row: torch.Tensor, position: int) -> torch.Tensor:
        turned = row.clone()
        for pair, frequency in enumerate(frequencies):
            a, b = (pair, pair + rotated // 2) if neox else (2 * pair, 2 * pair + 1)
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            turned[a], turned[b] = row[a] * cos - row[b] * sin, row[a] * sin + row[b] * cos
        return turned

    start, end = number * length, (number + 1) * length
    keys = torch.stack([rotate(row, start + place) for place, row in enumerate(plain)])
    later = torch.stack([rotate(query, end + step) for step in range(FUTURE)])
    want = (keys @ later.T).mean(dim=1).softmax(dim=0)

    table = torch.cat([frequencies.cos(), frequencies.sin()])[None].repeat(2, 1)
    rotary = torch.nn.Module()
    rotary.cos_sin_cache, rotary.rotary_dim, rotary.is_neox_style = table, rotated, neox
    rope = rope_of(rotary, size)
    seen = torch.stack([rotate(query, position) for position in (5, 6)])
    before = before_rope(seen[:, None], 5, rope)[:, 0]
    torch.testing.assert_close(before[0], before[1])
    mean, covariance = seen_from_the_end(before[:1], torch.zeros(1, size, size).double(), rope.frequencies)
    statistics = {"query_mean": mean[None].float(), "query_covariance": covariance[None].float()}
    statistics |= {"rope_frequencies": rope.frequencies[None].float(), "rope_order": rope.order[None].float()}
    data = one_head(keys.float(), values, statistics=statistics, segment_indices=torch.tensor([number]))
    found = get_scorer("expected_attention").score(data)[0, 0]
    torch.testing.assert_close(found, want.float(), atol=1e-5, rtol=1e-3)


def test_models_that_rotate_in_several_ways_are_refused():
    model = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for number, module in enumerate(model):
        angle = torch.tensor([[1.0 + number]])
        module.cos_sin_cache, module.rotary_dim = torch.cat([angle.cos(), angle.sin()], dim=1).repeat(2, 1), 2
        module.is_neox_style = True
    with pytest.raises(RaggedConfigError, match="one rotary embedding for all layers, and the model has 2"):
        rope_of(model, 2)


def test_fastkvzip_gate():
    """Rank 1: normalised query and key are 1, so the token's own logit is 1 + bias, against sinks 0 and log 2."""
    gate = {
        "q_proj": torch.full((1, 1, 1, 2), 3.0),
        "q_bias": torch.full((1, 1, 1), 0.5),
        "k_proj": torch.full((1, 1, 2), 7.0),
        "q_norm": torch.ones(1, 1),
        "k_norm": torch.ones(1, 1),
        "sink_keys": torch.tensor([[[0.0], [math.log(2)]]]),
        "bias": torch.tensor([[math.log(3) - 1]]),
    }
    scorer = get_scorer("fastkvzip")
    assert set(gate) == set(scorer.statistics)
    # own = log 3: 1 / (1 + exp(-log 3) + exp(log 2 - log 3)) = 1 / 2.
    scores = scorer.token_scores(torch.tensor([[1.0, 2.0], [5.0, 1.0]]), gate)
    torch.testing.assert_close(scores, torch.tensor([[0.5], [0.5]]))
    data = one_head(torch.zeros(2, 1), token_scores=scores.T[None])
    torch.testing.assert_close(scorer.score(data)[0, 0], torch.tensor([0.5, 0.5]))


def test_gate():
    """Two hidden units, one of them shut; two heads that share them."""
    gate = {
        "input_mean": torch.tensor([[1.0, 0.0]]),
        "input_scale": torch.tensor([[2.0, 1.0]]),
        "hidden": torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]),
        "hidden_bias": torch.tensor([[0.0, -1e4]]),
        "skip": torch.tensor([[0.0, 1.0], [0.5, 0.0]]),
        "output": torch.tensor([[1.0, 9.0], [-2.0, 9.0]]),
    }
    scorer = get_scorer("gate")
    assert set(gate) == set(scorer.statistics)
    # z = (4, 5): the open unit gives gelu(4).
    unit = 4 * 0.5 * (1 + math.erf(4 / math.sqrt(2)))
    scores = scorer.token_scores(torch.tensor([[3.0, 5.0]]), gate)
    expected = np.array([[5 + unit, 2 - 2 * unit]])
    np.testing.assert_allclose(unrounded(scores.numpy(), expected, STEP), expected, rtol=0, atol=1e-6)
    assert torch.equal(scores, (scores / STEP).round() * STEP)
    # Tokens that are the same but for the last bits tie, and the earlier ones are kept.
    nudged = torch.tensor([[3.0, 5.0]]).repeat(64, 1) * (1 + 1e-7 * torch.arange(-32, 32))[:, None]
    assert len(nudged.unique()) > 2
    repeated = scorer.token_scores(nudged, gate)
    assert (repeated == scores).all()
    order = rank_positions(repeated.T[None], torch.tensor([False]))
    assert keep_positions(order, 32)[0, 0].tolist() == [*range(16), *range(48, 64)]
    data = one_head(torch.zeros(1, 1), token_scores=scores[:, :1].T[None])
    torch.testing.assert_close(scorer.score(data)[0, 0], scores[0, :1])


def random_segments(name: str, segments: int, heads: int, seed: int, length: int = 32) -> SegmentData:
    """Random segments with everything that the scorer needs; 2 query heads per head, d = 8."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    window = min(get_scorer(name).queries, length)
    root = rand(heads, 2, 8, 8)
    return SegmentData(
        keys=rand(segments, heads, length, 8),
        values=rand(segments, heads, length, 8),
        queries=rand(segments, heads, 2, window, 8) if window else None,
        token_scores=rand(segments, heads, length).sigmoid() if get_scorer(name).reads_hidden_states else None,
        scale=8**-0.5,
        statistics={
            "query_mean": rand(heads, 2, 8),
            "query_covariance": root @ root.mT,
            "rope_frequencies": rand(1, 3),
            "rope_order": torch.arange(8.0)[None],
        },
        segment_indices=torch.arange(segments),
    )


def pick(data: SegmentData, segment: int, head: int) -> SegmentData:
    one = (slice(segment, segment + 1), slice(head, head + 1))
    return SegmentData(
        keys=data.keys[one],
        values=data.values[one],
        queries=None if data.queries is None else data.queries[one],
        token_scores=None if data.token_scores is None else data.token_scores[one],
        scale=data.scale,
        statistics={n: t if len(t) == 1 else t[one[1]] for n, t in data.statistics.items()},
        segment_indices=data.segment_indices[one[0]],
    )


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_segments_and_heads_are_independent_and_arguments_unchanged(name):
    data, before = (random_segments(name, 2, 3, seed=0) for _ in range(2))
    scores = get_scorer(name).score(data)
    assert scores.shape == (2, 3, 32)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[1:, 2:], get_scorer(name).score(pick(data, 1, 2)))
    for field in ("keys", "values", "queries", "token_scores"):
        if getattr(data, field) is not None:
            assert torch.equal(getattr(data, field), getattr(before, field))


POISONS = ("nan", "inf", "-inf", "zero", "equal", "huge")


@examples(150)
@given(
    name=st.sampled_from(sorted(BUILT_IN)),
    where=st.sampled_from(("keys", "values", "queries")),
    poison=st.sampled_from(POISONS),
    tokens=st.lists(st.integers(0, 31), min_size=1, max_size=32, unique=True),
    first=st.booleans(),
)
def test_any_input_gives_a_defined_choice(name, where, poison, tokens, first):
    """NaN, infinities, zeros, equal and huge entries: a permutation, twice the same, other heads untouched."""
    data, clean = (random_segments(name, 1, 2, seed=1) for _ in range(2))
    tensor = getattr(data, where)
    if tensor is not None:
        places = [token for token in tokens if token < tensor.shape[-2]]
        filling = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "zero": 0.0, "equal": 0.5, "huge": 3e38}
        tensor[0, 0, ..., places, :] = filling[poison]
    first_segment = torch.tensor([first])
    scorer = get_scorer(name)
    order = rank_positions(scorer.score(data), first_segment)
    assert torch.equal(order, rank_positions(scorer.score(data), first_segment))
    assert torch.equal(order.sort(dim=-1).values, torch.arange(32).expand(1, 2, 32))
    assert torch.equal(order[:, 1], rank_positions(scorer.score(clean), first_segment)[:, 1])


@pytest.mark.parametrize("name", ["keydiff", "key_norm", "value_key_norm"])
def test_equal_tokens_keep_the_earliest(name):
    data = one_head(torch.ones(64, 4), torch.ones(64, 4))
    kept = keep_positions(rank_positions(get_scorer(name).score(data), torch.tensor([False])), 32)[0, 0].tolist()
    assert kept == [*range(16), *range(48, 64)]


def test_unknown_scorer_lists_the_known():
    with pytest.raises(RaggedConfigError, match="expected_attention, fastkvzip, gate, h2o, key_norm, keydiff, snapkv"):
        get_scorer("nonsense")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_scorers_say_they_need(name):
    scorer = get_scorer(name)
    places, elements = scorer.input_shape(segment=64, q_per_kv=3, head_dim=8)
    assert (places, elements) == {
        "snapkv": (16, 24),
        "tova": (1, 24),
        "h2o": (64, 24),
        "fastkvzip": (64, 1),
        "gate": (64, 1),
    }.get(name, (0, 0))
    assert (scorer.queries == ALL_QUERIES) == (name == "h2o")


# Statistics


def test_statistics_are_refused_with_the_reason(tmp_path):
    from safetensors.torch import save_file

    expected, gated, plain = (get_scorer(name) for name in ("expected_attention", "fastkvzip", "keydiff"))
    with pytest.raises(RaggedConfigError, match="python -m calib run --scorer expected_attention"):
        scorer_statistics(expected, None, None, 2, 4)
    with pytest.raises(RaggedConfigError, match="pass --ragged-scorer-weights"):
        scorer_statistics(gated, None, None, 2, 4)
    with pytest.raises(RaggedConfigError, match="has no weights"):
        scorer_statistics(plain, None, "x.safetensors", 2, 4)
    with pytest.raises(RaggedConfigError, match="cannot be read"):
        scorer_statistics(gated, None, tmp_path / "none.safetensors", 2, 4)
    path = tmp_path / "moments.safetensors"
    save_file({"query_mean": torch.ones(2, 4, 1, 8)}, str(path))
    with pytest.raises(RaggedConfigError, match="lacks query_covariance"):
        scorer_statistics(expected, None, path, 2, 4)
    rope = {"rope_frequencies": torch.ones(2, 1, 4), "rope_order": torch.ones(2, 1, 8)}
    moments = {"query_mean": torch.ones(3, 4, 1, 8), "query_covariance": torch.ones(2, 4, 1, 8, 8)}
    save_file(moments | rope, str(path))
    with pytest.raises(RaggedConfigError, match=r"must be \[2 layers, 4 heads"):
        scorer_statistics(expected, None, path, 2, 4)
    save_file(
        {n: torch.full((2, 1 if n.startswith("rope") else 4, 1), torch.nan) for n in expected.statistics}, str(path)
    )
    with pytest.raises(RaggedConfigError, match="non-finite"):
        scorer_statistics(expected, None, path, 2, 4)


# The registry


def test_a_third_party_scorer_as_the_documentation_shows_it(tmp_path, monkeypatch):
    """The two files of docs/scorers.md, installed as a package of their own."""
    page = (Path(__file__).parents[2] / "docs" / "scorers.md").read_text()
    (code,) = re.findall(r"```python\n(# far_keys.py.*?)```", page, flags=re.DOTALL)
    (section,) = re.findall(r'```toml\n.*?(\[project.entry-points."(.*?)"\]\n(.*?))```', page, flags=re.DOTALL)
    assert section[1] == ENTRY_POINTS
    (tmp_path / "far_keys.py").write_text(code)
    info = tmp_path / "far_keys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-keys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{section[2].replace(chr(34), '')}")
    monkeypatch.syspath_prepend(tmp_path)
    assert "far_keys" in {point.name for point in entry_points(group=ENTRY_POINTS)}
    assert "far_keys" in scorer_names()
    scorer = get_scorer("far_keys")
    assert isinstance(scorer, Scorer)
    keys = torch.tensor([[0.0], [1.0], [5.0]])
    # Distances to the mean key, 2.
    torch.testing.assert_close(scorer.score(one_head(keys))[0, 0], torch.tensor([2.0, 1.0, 3.0]))


@pytest.mark.parametrize(("code", "words"), [("raise OSError('gone')", "cannot be loaded"), ("Bad = 3", "no subclass")])
def test_a_broken_third_party_scorer_is_refused(tmp_path, monkeypatch, code, words):
    name = f"broken_{words.split()[-1]}"
    (tmp_path / f"{name}.py").write_text(code)
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {name}:Bad\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RaggedConfigError, match=words):
        get_scorer(name)


# The choice of what is kept


@examples(60)
@given(
    name=st.sampled_from(["keydiff", "key_norm", "value_key_norm", "streaming"]),
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
    scores = get_scorer(name).score(one_head(torch.tensor(keys), torch.tensor(values)))
    found = keep_positions(rank_positions(scores, torch.tensor([first])), 16 * units)[0, 0].tolist()
    if name == "streaming":
        assert found == kept_tokens(name, Tokens(keys, values), 16 * units, first)
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
    kept = keep_positions(rank_positions(scores, torch.tensor([first])), 32)[0, 0].tolist()
    assert len(set(kept)) == 32
    assert kept == sorted(kept)
    assert set(range(48, 64)) <= set(kept)
    assert (20 in kept) == (bad == torch.inf)


def test_all_equal_scores_keep_the_earliest():
    kept = keep_positions(rank_positions(torch.zeros(1, 1, 64), torch.tensor([False])), 32)[0, 0].tolist()
    assert kept == [*range(16), *range(48, 64)]


def test_guard_gives_way_to_sinks():
    kept = keep_positions(rank_positions(torch.zeros(1, 1, 64), torch.tensor([True])), 16)[0, 0].tolist()
    assert kept == [*range(4), *range(52, 64)]
