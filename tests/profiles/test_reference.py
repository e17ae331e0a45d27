"""The reference in a profile: stored, read back, and refused where it is damaged."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile import Profile, load_profile
from sgl_ragged.profiles.reference import LIKELIEST, ReferenceText


def make_text(name: str = "prose", tokens: int = 20, predicted: int = 12) -> ReferenceText:
    rng = np.random.default_rng(0)
    logprobs = np.log(rng.dirichlet(np.ones(LIKELIEST + 1), predicted)).astype(np.float32)
    return ReferenceText(
        name,
        rng.integers(0, 1000, tokens).astype(np.int32),
        logprobs[:, -1].copy(),
        rng.integers(0, 1000, (predicted, LIKELIEST)).astype(np.int32),
        -np.sort(-logprobs[:, :-1], axis=1).astype(np.float16),
    )


def make_profile(**more: object) -> Profile:
    shares = np.full((2, 2), 0.3, np.float32)
    settings = dict(model_id="m", model_fingerprint="f", head_dim=64, scorer="keydiff", method="implied", samples=1)
    return Profile(mu=shares, sigma=shares, scope="model", ratio=0.3, segment=256, **settings, **more)


def test_it_is_read_back_and_part_of_the_digest(tmp_path):
    without, texts = make_profile(), (make_text(), make_text("code", 30, 3))
    profile = replace(without, reference=texts)
    profile.save(tmp_path / "p.safetensors")
    found = load_profile(tmp_path / "p.safetensors").reference
    assert sorted(text.name for text in found) == ["code", "prose"]
    for text in found:
        original = next(one for one in texts if one.name == text.name)
        assert text.first == original.first == len(original.tokens) - len(original.logprobs)
        for part in ("tokens", "logprobs", "likeliest", "likeliest_logprobs"):
            np.testing.assert_array_equal(getattr(text, part), getattr(original, part))
            assert getattr(text, part).dtype == getattr(original, part).dtype
    assert profile.digest() != without.digest()


def test_profiles_without_one_are_read(tmp_path):
    make_profile().save(tmp_path / "p.safetensors")
    assert load_profile(tmp_path / "p.safetensors").reference == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(name="Prose."), "must be named by"),
        (dict(logprobs=np.zeros(11, np.float32)), "likeliest .* must be"),
        (dict(tokens=np.zeros(12, np.int32)), "12 predictions do not fit"),
        (dict(likeliest=np.full((12, LIKELIEST), -1, np.int32)), "likeliest must be token ids"),
        (dict(likeliest_logprobs=np.full((12, LIKELIEST), np.nan, np.float16)), "must be log-probabilities"),
        (dict(logprobs=np.ones(12, np.float32)), "logprobs must be log-probabilities"),
        (dict(tokens=np.zeros(20, np.float32)), "tokens must be int32"),
    ],
)
def test_damaged_ones_are_refused(change, reason):
    with pytest.raises(RaggedConfigError, match=reason):
        make_profile(reference=(replace(make_text(), **change),))


def test_an_incomplete_file_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    profile = make_profile(reference=(make_text(),))
    profile.save(tmp_path / "p.safetensors")
    tensors = load_file(tmp_path / "p.safetensors")
    del tensors["reference.prose.likeliest"]
    save_file(tensors, tmp_path / "p.safetensors", metadata=profile._metadata())
    with pytest.raises(RaggedConfigError, match="incomplete or damaged"):
        load_profile(tmp_path / "p.safetensors")
