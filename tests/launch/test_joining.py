"""Features of several packages that cannot join together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ragged import rank_sizes
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch import joining
from sgl_ragged.launch.feature import LaunchFeature
from sgl_ragged.launch.joining import refuse_flags_without_effect, settle_features
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import FeatureSettings, Joined
from sgl_ragged.launch.start import Start
from tests.other_package.ballast import Ballast, BallastFlags


class Tree(LaunchFeature):
    radix_cache = "mine"

    def __init__(self, name: str) -> None:
        self.name, self.case = name, f"--{name}"

    def asked(self, start):
        return True

    def require(self):
        return


class SideSettings(FeatureSettings):
    def side_pages(self, rank, prefill):
        return SimpleNamespace(what="pages")


@pytest.fixture
def join(monkeypatch):
    def install(*features):
        monkeypatch.setattr(joining, "launch_features", lambda: features)

    return install


def test_a_server_has_one_radix_cache(join):
    one, other = Tree("one"), Tree("other")
    join(one)
    assert settle_features(None) == {one: None}
    join(one, other)
    for known in ((), (one,)):
        with pytest.raises(RaggedConfigError, match="--one and --other both bring a radix cache"):
            settle_features(None, known=known)


def test_slabs_have_one_second_pool(monkeypatch):
    monkeypatch.setattr(rank_sizes, "side_bytes", lambda *_: 0)
    monkeypatch.setattr(rank_sizes, "open_pages", lambda *_: None)

    def needs(*names):
        plan = SimpleNamespace(
            features=tuple(Joined(name, SideSettings()) for name in names),
            scorer="keydiff",
            q_per_kv=1,
            slab_layouts=[],
        )
        plan.stage, plan.layout = lambda _: plan, lambda _: None
        return rank_sizes.rank_needs(plan, 0, 0, None, torch.float32, torch.float32)

    assert needs("one").side_pages.what == "pages"
    assert needs().side_pages is None
    with pytest.raises(RaggedConfigError, match="one and other both need pages of a second pool"):
        needs("one", "other")


def test_flags_without_their_feature_are_named(join):
    join(Ballast())
    plain = RaggedOptions(kv_pool="ragged")
    refuse_flags_without_effect(Start(plain, None))
    refuse_flags_without_effect(
        Start(RaggedOptions(of_features=(BallastFlags(ballast=1, ballast_colour="red"),)), None)
    )
    with pytest.raises(RaggedConfigError, match=r"^--ragged-ballast-colour paints ballast"):
        refuse_flags_without_effect(Start(RaggedOptions(of_features=(BallastFlags(ballast_colour="red"),)), None))
