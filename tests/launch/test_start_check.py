"""Which starts check their answers, and what ends a start."""

from types import SimpleNamespace

import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch import start_check
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import StartCheck
from tests.profiles.test_reference import make_profile, make_text


def choose(path: object, check: str = "auto", **more: object) -> StartCheck | str:
    options = RaggedOptions(kv_pool="ragged", check=check, from_command_line=True)
    start = SimpleNamespace(options=options, view=SimpleNamespace(**{"tokenizer_worker_num": 1, "node_rank": 0} | more))
    return start_check.choose_check(start, SimpleNamespace(profile=str(path)))


@pytest.fixture(autouse=True)
def nothing_conflicts(monkeypatch):
    monkeypatch.setattr(start_check, "against", lambda case, start: None)


@pytest.fixture
def path(tmp_path):
    make_profile(reference=(make_text(),)).save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


@pytest.mark.parametrize(
    ("check", "tested", "strict", "required"),
    [("auto", True, False, False), ("auto", False, True, False), ("strict", True, True, True)],
)
def test_an_untested_release_is_checked_strictly(path, monkeypatch, check, tested, strict, required):
    monkeypatch.setattr(start_check, "is_tested", lambda release: tested)
    assert choose(path, check) == StartCheck(path, strict, required, 20.0)


@pytest.mark.parametrize("check", ["auto", "strict"])
def test_other_nodes_leave_it_to_the_first(check):
    """They may not have the profile's file."""
    assert choose("/missing/p.safetensors", check, node_rank=1) == "the first node does that"


def test_reasons_against_it(path, tmp_path):
    make_profile().save(tmp_path / "none.safetensors")
    for reason, chosen in {
        "--ragged-check off": choose(path, "off"),
        "--tokenizer-worker-num is above 1": choose(path, tokenizer_worker_num=2),
        "the profile is uniform, which has no reference of the uncompressed model": choose("uniform"),
    }.items():
        assert chosen == reason
    assert "calibrate again to record one" in choose(tmp_path / "none.safetensors")
    with pytest.raises(RaggedConfigError, match="--ragged-check strict cannot be honoured: the profile is uniform"):
        choose("uniform", "strict")
