"""Features of several packages that cannot join together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch import joining
from sgl_ragged.launch.feature import Feature
from sgl_ragged.launch.joining import refuse_in_vain, settle_features, side_pages
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import Joined
from sgl_ragged.launch.start import Launch
from tests.other_package.ballast import Ballast, BallastFlags


class Tree(Feature):
    radix_cache = ("mine", "no.such.factory")

    def __init__(self, name: str) -> None:
        self.name, self.case = name, f"--{name}"

    def asked(self, launch):
        return True

    def require(self):
        return

    def side_pages(self, settings, rank, prefill):
        return SimpleNamespace(what=self.name)


@pytest.fixture
def join(monkeypatch):
    def install(*features):
        monkeypatch.setattr(joining, "features", lambda: features)
        monkeypatch.setattr(joining, "joined_features", lambda plan: [(one, True) for one in features])

    return install


def test_a_server_has_one_radix_cache(join):
    one, other = Tree("one"), Tree("other")
    join(one)
    assert settle_features(None) == {one: True}
    join(one, other)
    for known in ((), (one,)):
        with pytest.raises(RaggedConfigError, match="--one and --other both bring a radix cache"):
            settle_features(None, known=known)


def test_slabs_have_one_pool_beside_them(join):
    one, other = Tree("one"), Tree("other")
    rank = SimpleNamespace(plan=SimpleNamespace(features=(Joined("one", True),)))
    join(one)
    feature, pages = side_pages(rank, None)
    assert (feature, pages.what) == (one, "one")
    join()
    assert side_pages(rank, None) == (None, None)
    join(one, other)
    with pytest.raises(RaggedConfigError, match="--one and --other both need pages beside slabs"):
        side_pages(rank, None)


def test_flags_without_their_feature_are_named(join):
    join(Ballast())
    plain = RaggedOptions(kv_pool="ragged")
    refuse_in_vain(Launch(plain, None))
    refuse_in_vain(Launch(RaggedOptions(of_features=(BallastFlags(ballast=1, ballast_colour="red"),)), None))
    with pytest.raises(RaggedConfigError, match=r"^--ragged-ballast-colour paints ballast"):
        refuse_in_vain(Launch(RaggedOptions(of_features=(BallastFlags(ballast_colour="red"),)), None))
