"""Command convert: measured npz files become profiles; the bundled profiles."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import LlamaConfig, Qwen3Config

from calib.__main__ import main
from calib.convert import scale_to_ratio
from calib.measured import load_measured
from sgl_ragged.profiles.fingerprint import config_fingerprint
from sgl_ragged.profiles.profile import load_profile, profile_kept
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER, bundled_paths
from tests.measured import SINKS, WINDOW, write_measured

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "vocab_size": 512,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def convert(tmp_path, measured, *args):
    main(["convert", str(measured), "-o", str(tmp_path / "out.safetensors"), *args])
    return load_profile(tmp_path / "out.safetensors")


def refusal(capsys, *args: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    line = str(ended.value.code)
    assert line.startswith("calib: ")
    assert "\n" not in line
    assert capsys.readouterr().err == ""
    return line


def test_profile_of_the_evictable_region(tmp_path, config, capsys):
    file = write_measured(tmp_path / "m.npz")
    profile = convert(tmp_path, file, "--config", str(config))
    assert "note" not in capsys.readouterr().out
    assert (profile.model_id, profile.scorer, profile.method, profile.scope) == (
        "maker/toy",
        "keydiff",
        "implied",
        "layer",
    )
    assert (profile.ratio, profile.segment, profile.samples, profile.alpha) == (0.3, 256, 6, 0.0)
    assert profile.head_dim == 32
    assert profile.model_fingerprint == config_fingerprint(CONFIG)
    assert profile.tasks == ("one",) * 4 + ("two",) * 2
    assert profile.license == "Apache-2.0"
    assert "aiha-lab/TANGRAM" in profile.provenance
    with np.load(file) as arrays:
        raw = arrays["raw_ratio"][0]
    np.testing.assert_allclose(profile.mu.mean(axis=1), 0.3, atol=1e-6)
    factor = profile.mu / raw.mean(axis=0)
    unclipped = profile.mu < 1
    for layer in range(3):
        np.testing.assert_allclose(factor[layer][unclipped[layer]], factor[layer][unclipped[layer]][0], rtol=1e-5)
    factor = np.broadcast_to(factor, raw.shape)[:, unclipped]
    np.testing.assert_allclose(profile.shares[:, unclipped], np.minimum(factor * raw[:, unclipped], 1), rtol=1e-4)
    np.testing.assert_allclose(
        profile.sigma[unclipped], np.minimum(factor[0] * raw.std(axis=0)[unclipped], 1), rtol=1e-4
    )


def test_profile_of_the_whole_context_is_not_scaled(tmp_path, config):
    file = write_measured(tmp_path / "m.npz")
    profile = convert(tmp_path, file, "--config", str(config), "--share", "whole")
    with np.load(file) as arrays:
        whole = arrays["raw_kept"][0] / arrays["sample_meta"][:, 2, None, None]
    np.testing.assert_allclose(profile.shares, whole, rtol=1e-6)
    np.testing.assert_allclose(profile.mu, whole.mean(axis=0), rtol=1e-6)
    assert profile.mu.min() > (SINKS + WINDOW) / 26_000


def test_profile_over_the_model(tmp_path, config):
    file = write_measured(tmp_path / "m.npz", level="non_uniform", dataset_mix=None, sample_sources=["one"])
    profile = convert(tmp_path, file, "--config", str(config))
    assert profile.scope == "model"
    assert profile.mu.mean() == pytest.approx(0.3, abs=1e-6)
    assert np.ptp(profile.mu.mean(axis=1)) > 0.01
    assert profile.tasks == ("one",) * 6


def test_layers_with_windows_are_not_among_the_measured_ones(tmp_path, config, capsys):
    """A file covers the layers with full attention, by the model's numbers of them."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 64}))
    file = write_measured(tmp_path / "m.npz", layers=2, numbers=(2, 5), num_hidden_layers=6)
    assert convert(tmp_path, file, "--config", str(config)).num_layers == 2
    other = write_measured(tmp_path / "other.npz", layers=2, numbers=(1, 5), num_hidden_layers=6)
    said = refusal(capsys, "convert", str(other), "-o", str(tmp_path / "p"), "--config", str(config))
    assert "in layers [1, 5] with 4 heads each, but by the configuration layers [2, 5] have full attention" in said


def test_means_only(tmp_path, config):
    profile = convert(tmp_path, write_measured(tmp_path / "m.npz"), "--config", str(config), "--means-only")
    assert (profile.sigma == 0).all()
    assert profile.shares is None
    assert profile.tasks == ()
    assert profile.samples == 6


def test_without_config_and_with_unknown_tasks(tmp_path, capsys):
    profile = convert(tmp_path, write_measured(tmp_path / "m.npz", dataset_mix="one:1"))
    assert (profile.model_fingerprint, profile.head_dim) == ("", 0)
    assert profile.tasks == ("unknown",) * 6
    assert "note: no --config" in capsys.readouterr().out


def test_layer_with_too_few_heads_is_explained(tmp_path, config, capsys):
    file = write_measured(tmp_path / "m.npz")
    with np.load(file) as archive:
        arrays = dict(archive)
    arrays["raw_ratio"][:, :, 1, 1:] = 0
    np.savez(file, **arrays)
    profile = convert(tmp_path, file, "--config", str(config))
    assert "layer 1: 1 of 4 heads keep tokens, so its mean share is 0.2500 and not 0.3" in capsys.readouterr().out
    np.testing.assert_allclose(profile.mu[1], [1, 0, 0, 0])
    np.testing.assert_allclose(profile.mu[[0, 2]].mean(axis=1), 0.3, atol=1e-6)


@given(
    mu=arrays(np.float64, st.integers(1, 12), elements=st.just(0.0) | st.floats(1e-6, 1)),
    ratio=st.floats(0.01, 1.0),
)
def test_scaling_reaches_the_ratio_wherever_it_can(mu, ratio):
    factor, reached = scale_to_ratio(mu, ratio)
    assert factor > 0
    mean = np.minimum(1, factor * mu).mean()
    assert reached == ((mu > 0).sum() >= ratio * mu.size)
    assert mean == pytest.approx(ratio if reached else (mu > 0).mean(), rel=1e-9)


def test_refusals(tmp_path, config, capsys):
    good = write_measured(tmp_path / "good.npz")
    out = str(tmp_path / "out.safetensors")

    def line(file, *args):
        return refusal(capsys, "convert", str(file), "-o", out, *args)

    assert "does not exist" in line(tmp_path / "none.npz")
    damaged = tmp_path / "damaged.npz"
    for size in (0, 100, len(good.read_bytes()) // 2):
        damaged.write_bytes(good.read_bytes()[:size])
        assert "damaged or of another kind" in line(damaged)
    flipped = bytearray(good.read_bytes())
    flipped[len(flipped) // 4] ^= 0xFF
    damaged.write_bytes(flipped)
    assert "damaged or of another kind" in line(damaged)
    damaged.write_text("no archive\nat all\n")
    assert "damaged or of another kind" in line(damaged)
    np.savez(damaged, raw_kept=np.zeros((1, 2, 3, 4)))
    assert "lacks raw_ratio" in line(damaged)
    assert "unknown scorer 'h2o'" in line(write_measured(damaged, scorer="h2o"))
    assert "unknown level" in line(write_measured(damaged, level="uniform"))
    assert "model_name is missing" in line(write_measured(damaged, model_name=None))
    with np.load(good) as archive:
        arrays = dict(archive)
    np.savez(damaged, **(arrays | {"sample_meta": arrays["sample_meta"][:3]}))
    assert "do not fit" in line(damaged)
    np.savez(damaged, **(arrays | {"raw_kept": arrays["raw_kept"] * 100}))
    assert "raw_kept has entries outside" in line(damaged)
    np.savez(damaged, **(arrays | {"meta": np.array([{"a": 1}], dtype=object)}))
    assert "damaged or of another kind" in line(damaged)

    assert "cannot read" in line(good, "--config", str(tmp_path / "nowhere.json"))
    (tmp_path / "empty.json").write_text("{}")
    assert "it lacks 'num_hidden_layers'" in line(good, "--config", str(tmp_path / "empty.json"))
    four = write_measured(damaged, layers=4)
    assert "in layers [0, 1, 2, 3] with 4 heads each" in line(four, "--config", str(config))
    some = write_measured(damaged, layers=2, num_hidden_layers=3)
    assert "in layers [0, 1] with 4 heads each" in line(some, "--config", str(config))
    assert "cannot write" in refusal(capsys, "convert", str(good), "-o", str(tmp_path / "no" / "folder"))


# Bundled profiles

MODELS = {"llama-3.1-8b-instruct": (32, LlamaConfig), "qwen3-4b-instruct-2507": (36, Qwen3Config)}


@pytest.mark.parametrize("scorer", ["fastkvzip", "keydiff", "snapkv"])
@pytest.mark.parametrize("model", MODELS)
def test_bundled_profiles(model, scorer):
    layers, config_class = MODELS[model]
    config = json.loads((BUNDLED_FOLDER / "configs" / f"{model}.json").read_text())
    # A server sees the configuration as transformers loads it, not the file.
    assert config_fingerprint(config_class(**config).to_dict()) == config_fingerprint(config)
    path = bundled_paths(config_fingerprint(config))[scorer]
    assert path is not None
    profile = load_profile(path)
    assert profile.mu.shape == (layers, 8)
    assert (profile.head_dim, profile.scope, profile.ratio, profile.alpha) == (128, "layer", 0.3, 0.0)
    assert (profile.sigma == 0).all()
    assert profile.shares is None
    assert profile.license == "Apache-2.0"
    # Where fewer heads than that keep anything, every one of them has its whole share.
    reachable = np.minimum(0.3, (profile.mu > 0).mean(axis=1))
    np.testing.assert_allclose(profile.mu.mean(axis=1), reachable, atol=1e-3)
    assert (reachable < 0.3).sum() == (1 if path.name == "llama-3.1-8b-instruct.fastkvzip.safetensors" else 0)
    assert abs(profile_kept(profile, 0.3, 256).mean(axis=1) - 0.3 * 256).max() <= 16 / 8


def test_every_bundled_file_is_small_and_known():
    files = sorted(path.name for path in BUNDLED_FOLDER.glob("*.safetensors"))
    assert files == sorted(
        f"{model}.{scorer}.safetensors" for model in MODELS for scorer in ("fastkvzip", "keydiff", "snapkv")
    )
    assert all((BUNDLED_FOLDER / name).stat().st_size < 4096 for name in files)


def test_no_bundled_profile_for_expected_attention():
    config = json.loads((BUNDLED_FOLDER / "configs" / "llama-3.1-8b-instruct.json").read_text())
    assert "expected_attention" not in bundled_paths(config_fingerprint(config))


def test_measured_file_is_read_as_written(tmp_path):
    measured = load_measured(write_measured(tmp_path / "m.npz"))
    assert measured.whole.shape == measured.evictable.shape == (6, 3, 4)
    assert (measured.layers, measured.model_layers, measured.ratio) == ((0, 1, 2), 3, 0.3)
