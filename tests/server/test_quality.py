"""`python -m calib quality`: what it measures is what a server shows, and it is written into the profile."""

from __future__ import annotations

import json
import sys

import pytest

from sgl_ragged.profiles.profile import load_profile
from tests.models import make_llama, make_profile, with_reference
from tests.server.client import server_settings

pytestmark = pytest.mark.server

SEGMENT = 64
RATIO = "0.4"


def test_it_equals_the_check_at_the_start(servers, tmp_path):
    llama = make_llama(tmp_path / "llama")
    path = tmp_path / "p.safetensors"
    profile = make_profile(llama, path, segment=SEGMENT)
    command = [sys.executable, "-m", "calib", "quality", str(path), "--model", str(llama), "--dtype", "float32"]
    refused = servers.run([*command, "--ratios", RATIO], timeout=400)
    assert refused.returncode == 1
    assert "has no reference for sgl-ragged verify: calibrate again" in refused.stderr
    profile = with_reference(profile, llama, path)
    done = servers.run(
        [*command, "--ratios", "1", RATIO, "--plot", str(tmp_path / "quality.svg"), "--json"], timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    full, low = load_profile(path).quality
    assert [(row["ratio"], row["kl"]) for row in json.loads(done.stdout)] == [(1, full.kl), (0.4, low.kl)]
    assert (full.slab_dtype, full.token_share) == ("wide", 1)
    assert abs(full.kl) < 1e-5 < low.kl
    assert (tmp_path / "quality.svg").read_text().startswith("<?xml")
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4"]
    flags += ["--kv-pool", "ragged", "--ragged-segment", str(SEGMENT), "--ragged-profile", str(path)]
    with servers.serve(
        llama, *flags, "--ragged-ratio", RATIO, "--ragged-slab-dtype", "auto", log=tmp_path / "log"
    ) as server:
        settings = server_settings(server)
    assert settings["quality"]["texts"] == ["first", "second"]
    mean = sum(low.kl_by_text[name] for name in ("first", "second")) / 2
    assert settings["quality"]["to_reference"]["kl"] == pytest.approx(mean, rel=1e-3)
    assert settings["slab_dtype"] == low.slab_dtype
