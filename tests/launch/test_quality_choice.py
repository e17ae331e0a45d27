"""--ragged-quality: the ratio that it chooses, and why it may not."""

import json
import re
import sys
from dataclasses import replace

import pytest

from sgl_ragged import cli
from sgl_ragged.launch.plan import ATTRIBUTE
from tests.launch.test_plugin import refusal, resolved
from tests.models import make_llama, make_profile
from tests.profiles.test_quality import ROWS

FLAGS = ("--kv-pool", "ragged", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def profiles(llama, tmp_path_factory):
    """Profiles with and without measured quality."""
    folder = tmp_path_factory.mktemp("profiles")
    plain = make_profile(llama, folder / "plain.safetensors", codebook=True)
    replace(plain, quality=ROWS).save(folder / "measured.safetensors")
    return folder


def test_the_least_measured_ratio_below_it_serves(llama, profiles, monkeypatch, capsys):
    flags = (*FLAGS, "--ragged-profile", str(profiles / "measured.safetensors"))
    plan = getattr(resolved(llama, *flags, "--ragged-quality", "0.004"), ATTRIBUTE).plan
    assert plan.ratio == pytest.approx(0.2, abs=1e-9)
    asked = ["--model", str(llama), *flags, "--kv-bytes", "16MiB", "--quality", "0.004"]
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", *asked, "--json"])
    capsys.readouterr()
    cli.main()
    shown = json.loads(capsys.readouterr().out)
    assert [one["kl"] for one in shown["quality"]] == [0.001, 0.016]
    assert "ratio 0.2," in shown["summary"]
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", *asked])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("measured ratio"))
    ratios, tokens = zip(*((float(line.split()[0]), int(line.split()[2])) for line in lines[start + 1 :]), strict=True)
    assert ratios == (0.4, 0.1)
    assert tokens[0] < tokens[1]


@pytest.mark.parametrize(
    ("profile", "flags", "reason"),
    [
        ("measured", ("--ragged-ratio", "0.3"), "--ragged-ratio has no effect; remove one of them"),
        ("measured", ("--ragged-slab-dtype", "int8"), "formats and fit as auto picks them"),
        ("measured", ("--ragged-fit", "none"), "formats and fit as auto picks them"),
        ("measured", ("--kv-cache-dtype", "fp8_e4m3"), "holds for slabs in codes, and what is FP8"),
        ("plain", (), "nothing was measured for profile .*; run python -m calib quality .* --model "),
        ("uniform", (), "needs a profile whose quality was measured"),
    ],
)
def test_what_it_cannot_answer_is_refused(llama, profiles, profile, flags, reason):
    path = profile if profile == "uniform" else str(profiles / f"{profile}.safetensors")
    line = refusal(llama, *FLAGS, "--ragged-profile", path, "--ragged-quality", "0.004", *flags)
    assert re.search(reason, line), line


def test_a_kl_that_nothing_reaches_is_refused(llama, profiles):
    flags = (*FLAGS, "--ragged-profile", str(profiles / "measured.safetensors"))
    line = refusal(llama, *flags, "--ragged-quality", "0.0005")
    assert "the best that was measured is 0.001, at ratio 0.4; measure higher ratios with" in line
    assert "must be a positive number" in refusal(llama, *flags, "--ragged-quality", "-1")
