"""The codebook: what is recorded of queries, against a dense computation, and what the profile has of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from calib.codebook import FARTHEST, NEAREST, PER_QUERY_HEAD, choose_queries, codebook, queries_per_sample
from calib.engine import join_ranks
from calib.query_moments import rope_of
from calib.recorder import CODEBOOK_QUERIES, Recorder
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.retrieval.launch import RetrievalFlags
from sgl_ragged.launch.decide import why_not_to_fit
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import choose_budgets, why_unfitted
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.profiles.codebook import CODEBOOK, MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile_choice import ProfileFile, ReadableProfile, Uniform
from tests.calib.test_recorder import DIM, HEADS, LAYERS, LENGTH, PER_HEAD, SEGMENT, content, record
from tests.models import make_profile
from tests.rounded import unrounded

ANGLES = torch.arange(1.0, DIM // 2 + 1) / 9


def recorder(folder, asked: list[int], neox: bool = True) -> Recorder:
    """One that knows the model's rotary embedding and is asked for these queries."""
    model = torch.nn.Module()
    model.cos_sin_cache = torch.cat([ANGLES.cos(), ANGLES.sin()]).expand(2, DIM)
    model.rotary_dim, model.is_neox_style = DIM, neox
    (folder / CODEBOOK_QUERIES).write_text(json.dumps(asked))
    made = Recorder(str(folder), ())
    made.prepare(model, SimpleNamespace(layout=SimpleNamespace(head_dim=DIM)))
    return made


def unturned(query: np.ndarray, position: int, neox: bool) -> np.ndarray:
    """Before RoPE, first ones of pairs, then second ones."""
    first, second = (query[: DIM // 2], query[DIM // 2 :]) if neox else (query[::2], query[1::2])
    pairs = (first + 1j * second) * np.exp(-1j * position * ANGLES.double().numpy())
    return np.concatenate([pairs.real, pairs.imag])


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("chunks", [[], [SEGMENT], [2 * SEGMENT, 3 * SEGMENT]])
def test_what_queries_were_and_saw(tmp_path, chunks, neox):
    queries, keys, values = content(seed=4)
    asked = [SEGMENT, 2 * SEGMENT - 1, 3 * SEGMENT + 5, LENGTH - 1]
    found = record(recorder(tmp_path, asked, neox), [queries, keys, values], chunks)
    assert found[QUERIES].shape == (LAYERS, HEADS, PER_HEAD, len(asked), DIM)
    for layer, head, query in np.ndindex(LAYERS, HEADS, PER_HEAD):
        own_keys, own_values = (x[:, layer, head].double().numpy() for x in (keys, values))
        for place, position in enumerate(asked):
            own = queries[position, layer, head, query].double().numpy()
            before = found[QUERIES][layer, head, query, place].numpy()
            wanted = unturned(own, position, neox)
            np.testing.assert_allclose(unrounded(before, wanted), wanted, rtol=0, atol=3e-5)
            powers = np.exp(own_keys[: position + 1] @ own * DIM**-0.5)
            for kind, first in enumerate((0, SEGMENT)):
                mass = found[MASSES][layer, head, kind, query, place].numpy()
                np.testing.assert_allclose(mass, np.log(powers[first:].sum()), rtol=0, atol=1e-4)
                output = powers[first:] @ own_values[first : position + 1] / powers[first:].sum()
                stored = found[OUTPUTS][layer, head, kind, query, place].numpy()
                np.testing.assert_allclose(unrounded(stored, output), output, rtol=0, atol=1e-4)


def test_models_without_one_rotary_embedding_have_none(tmp_path):
    made = Recorder(str(tmp_path), ())
    made.prepare(torch.nn.Module(), SimpleNamespace(layout=SimpleNamespace(head_dim=DIM)))
    (tmp_path / CODEBOOK_QUERIES).write_text(json.dumps([SEGMENT]))
    found = record(made, content(seed=4), [])
    assert not set(CODEBOOK) & set(found)
    assert codebook([found], 4096, SEGMENT) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_exact_whatever_the_tables_precision(dtype):
    exact = 1e6 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2))
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * exact
    model = torch.nn.Module()
    model.cos_sin_cache = (1.2 * torch.cat([angles.cos(), angles.sin()], dim=1)).to(dtype)
    model.rotary_dim, model.is_neox_style = DIM, True
    # Angles 2,048 positions away.
    found = rope_of(model, DIM).frequencies
    torch.testing.assert_close(2048 * found, 2048 * exact, atol=1e-2, rtol=0)


def test_statistics_of_the_profile(tmp_path):
    """Side by side over samples and ranks; each query turned to a distance of its own."""
    recordings = [record(recorder(tmp_path, [SEGMENT + n, LENGTH - 1]), content(seed=n), []) for n in range(3)]
    found = codebook(recordings, 10**6, SEGMENT)
    count = 6 * PER_HEAD
    assert set(found) == {*CODEBOOK, *ROPE}
    assert found[QUERIES].shape == (LAYERS, HEADS, count, DIM)
    assert found[MASSES].shape == (LAYERS, HEADS, 2, count)
    assert found[OUTPUTS].shape == (LAYERS, HEADS, 2, count, DIM)
    both = codebook([join_ranks([one, one]) for one in recordings], 10**6, SEGMENT)
    assert torch.equal(both[QUERIES][:, HEADS:], found[QUERIES])
    assert torch.equal(both[ROPE[0]], found[ROPE[0]])
    # Distances are where a pair has been turned to.
    before = torch.cat([one[QUERIES] for one in recordings], dim=3)[0, 0, 0].double()
    after = found[QUERIES][0, 0, :6].double()
    angle = torch.atan2(after[:, DIM // 2], after[:, 0]) - torch.atan2(before[:, DIM // 2], before[:, 0])
    spread = (torch.arange(6) * ((5**0.5 - 1) / 2)) % 1
    distances = NEAREST * (FARTHEST / NEAREST) ** spread.double()
    turns = (distances * ANGLES[0].double() - angle) / (2 * torch.pi)
    torch.testing.assert_close(turns, turns.round(), atol=2e-3, rtol=0)
    assert codebook(recordings, SEGMENT + 100, SEGMENT)[QUERIES].shape == found[QUERIES].shape


def test_so_many_queries_behind_the_first_segment():
    assert queries_per_sample(28) * 28 >= PER_QUERY_HEAD > (queries_per_sample(28) - 1) * 28
    for length in (SEGMENT + 1, SEGMENT + 4, 40 * SEGMENT):
        chosen = choose_queries(length, SEGMENT, 5)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(5, length - SEGMENT)
        assert SEGMENT <= chosen[0] <= chosen[-1] < length
        assert chosen == choose_queries(length, SEGMENT, 5)


@pytest.mark.parametrize(
    ("given", "sinks", "rope", "words"),
    [
        ({}, False, {}, None),
        ({"fit": "none"}, False, {}, "--ragged-fit none"),
        ({"of_features": (RetrievalFlags(reservoir=1 << 20),)}, False, {}, "count twice"),
        ({}, True, {}, "sinks"),
        ({}, False, {"mrope_section": [2, 3, 3]}, "M-RoPE"),
    ],
)
def test_options_and_models_say_why_not(given, sinks, rope, words):
    config = SimpleNamespace(has_attention_sinks=sinks, hf_text_config=SimpleNamespace(rope_parameters=rope))
    options = RaggedOptions(kv_pool="ragged", **given)
    reason = why_not_to_fit(ModelStart(options, None, None, config, torch.float32))
    assert reason is None if words is None else words in reason


def test_profiles_say_whether_they_can_fit(tmp_path):
    from benchmarks.recall import MODEL

    path = tmp_path / "p.safetensors"
    profile = make_profile(MODEL, path, segment=SEGMENT, codebook=True)
    geometry = ModelGeometry.from_config(json.loads((MODEL / "config.json").read_text()), MODEL.name)

    def reason(budgets: ReadableProfile, ratio: float) -> str | None:
        asked = dict(scorer="keydiff", ratio=ratio, segment=SEGMENT)
        return why_unfitted(choose_budgets(geometry, profile=budgets, **asked), SEGMENT)

    assert reason(ProfileFile(path), 0.3) is None
    assert reason(ProfileFile(path), 1.0) == "every token is kept"
    assert reason(Uniform(), 0.3) == "fitting needs a calibrated profile"
    make_profile(MODEL, path, segment=SEGMENT)
    assert "the profile has no codebook; python -m calib run makes one" in reason(ProfileFile(path), 0.3)
    statistics = dict(profile.statistics)
    for name, broken in (
        (QUERIES, statistics[QUERIES][:, :, :-1]),
        (MASSES, statistics[MASSES][:, :, :1]),
        (OUTPUTS, statistics[OUTPUTS][..., :-1]),
        (ROPE[1], statistics[ROPE[1]] * 0),
        (ROPE[0], np.tile(statistics[ROPE[0]], 3)),
        (QUERIES, statistics[QUERIES] * np.float16("nan")),
    ):
        with pytest.raises(RaggedConfigError, match=r"statistic|rope"):
            replace(profile, statistics=MappingProxyType(statistics | {name: broken}))
    del statistics[MASSES]
    with pytest.raises(RaggedConfigError, match="the codebook lacks codebook_masses"):
        replace(profile, statistics=MappingProxyType(statistics))
