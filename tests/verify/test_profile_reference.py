"""A profile's reference in place of a server, and the choice of what to compare with."""

import argparse
from dataclasses import replace

import numpy as np
import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.command import choose_reference
from sgl_ragged.verify.distributions import distance
from sgl_ragged.verify.profile_reference import ProfileReference
from tests.profiles.test_reference import make_profile, make_text


class Asked:
    """A server that says where its profile is, and tokenizes nothing."""

    def __init__(self, profile: str) -> None:
        self.profile = profile

    def info(self) -> dict:
        return {"ragged": {"profile": self.profile}}

    def tokens(self, prompt: str) -> list[int]:
        return [len(prompt)]


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"against": None, "prompts": None, "profile": None} | given)


def test_recorded_predictions_are_those_of_the_text():
    text = make_text()
    reference = ProfileReference((make_text("code", 30, 3), text), 8, "p")
    read = reference.read(text.tokens.tolist(), 10)
    assert (read.first, len(read)) == (11, 9)
    np.testing.assert_array_equal(read.tokens, text.tokens[11:])
    np.testing.assert_array_equal(read.logprobs, text.logprobs[3:])
    assert read.top1.tolist() == text.likeliest[3:, 0].tolist()
    assert distance(read, reference.read(text.tokens.tolist(), 0)).kl == pytest.approx(0, abs=1e-9)


def test_the_servers_profile_is_the_reference_where_it_has_one(tmp_path, capsys):
    path = tmp_path / "p.safetensors"
    make_profile(reference=(make_text(),)).save(path)
    reference, prompts = choose_reference(Asked(str(path)), options())
    assert isinstance(reference, ProfileReference)
    assert [one.name for one in prompts] == ["prose"]
    reference, prompts = choose_reference(Asked("elsewhere"), options(profile=path))
    assert reference.url == f"profile {path}"
    make_profile().save(path)
    reference, prompts = choose_reference(Asked(str(path)), options())
    assert reference is None
    assert len(prompts) == 4
    assert "has no reference for sgl-ragged verify: calibrate again" in capsys.readouterr().err
    assert choose_reference(Asked("uniform"), options())[0] is None
    with pytest.raises(RaggedConfigError, match="calibrate again"):
        choose_reference(Asked("uniform"), options(profile=path))


@pytest.mark.parametrize("given", [dict(against="http://a"), dict(prompts="file")])
def test_a_profile_excludes_other_texts_and_servers(tmp_path, given):
    with pytest.raises(RaggedConfigError, match=f"--{next(iter(given))} has no effect"):
        choose_reference(Asked("uniform"), options(profile=tmp_path, **given))


def test_predictions_of_another_vocabulary_are_refused():
    text = make_text()
    other = replace(text, tokens=(text.tokens + 1).astype(np.int32))
    one, two = (ProfileReference((each,), 8, "p").read(each.tokens.tolist()) for each in (text, other))
    with pytest.raises(ValueError, match="different tokens"):
        distance(one, two)
