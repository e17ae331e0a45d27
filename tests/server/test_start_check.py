"""Servers compare their answers with the uncompressed model's before they are healthy."""

from __future__ import annotations

import json

import httpx
import pytest

from benchmarks.harness.errors import ServerFailed
from sgl_ragged import cli
from tests.models import make_llama, make_profile, with_reference
from tests.server.client import server_settings

pytestmark = pytest.mark.server

SEGMENT = 64
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4")
RAGGED = (*FLAGS, "--kv-pool", "ragged", "--ragged-segment", str(SEGMENT))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def profile(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    with_reference(make_profile(llama, path, segment=SEGMENT), llama, path)
    return path


def test_it_passes_where_nothing_is_dropped_and_verify_finds_the_same(
    llama, profile, servers, tmp_path, capsys, monkeypatch
):
    flags = ("--ragged-profile", str(profile), "--ragged-ratio", "1", "--ragged-check", "strict", "--enable-metrics")
    with servers.serve(llama, *RAGGED, *flags, log=tmp_path / "log") as server:
        found = server_settings(server)["quality"]
        assert found["texts"] == ["first", "second"]
        assert found["faults"] == []
        for kind in ("to_reference", "hit_to_miss", "decode_to_prefill"):
            assert abs(found[kind]["kl"]) < 1e-5, kind
        assert "answers checked in " in server.log_text()
        metrics = httpx.get(f"{server.url}/metrics").text
        gauges = [line for line in metrics.splitlines() if line.startswith("sglang:ragged_check_")]
        assert len(gauges) == 3
        # The check leaves nothing in the cache.
        assert "sglang:ragged_slab_bytes_in_use" in metrics
        monkeypatch.setattr("sys.argv", ["sgl-ragged", "verify", "--url", server.url, "--json"])
        cli.main()
        seen = json.loads(capsys.readouterr().out)
    assert seen["against"] == f"profile {profile}"
    assert [one["name"] for one in seen["prompts"]] == ["first", "second", "third"]
    assert seen["prompts"][0]["to_reference"]["positions"] == 4 * SEGMENT
    assert abs(seen["mean"]["to_reference"]["kl"]) < 1e-5


def test_beyond_the_limits_it_warns_or_ends_the_start(llama, profile, servers, tmp_path):
    flags = ("--ragged-profile", str(profile), "--ragged-ratio", "0.3")
    with servers.serve(llama, *RAGGED, *flags, log=tmp_path / "log") as server:
        found = server_settings(server)["quality"]
        assert "ANSWERS OF THIS SERVER ARE FAR FROM THE UNCOMPRESSED MODEL'S: KL to the" in server.log_text()
    assert found["to_reference"]["kl"] > 0.05
    assert abs(found["hit_to_miss"]["kl"]) < 1e-5
    with (
        pytest.raises(ServerFailed, match="server ended"),
        servers.serve(llama, *RAGGED, *flags, "--ragged-check", "strict", log=tmp_path / "strict"),
    ):
        pass
    assert "sgl_ragged: --ragged-check strict: KL to the reference is" in (tmp_path / "strict").read_text()


def test_it_says_why_it_did_not_run(llama, servers, tmp_path):
    with servers.serve(llama, *RAGGED, log=tmp_path / "log") as server:
        found = server_settings(server)["quality"]
        assert f"were not compared with the uncompressed model: {found['skipped']}" in server.log_text()
    assert found["skipped"].startswith("the profile is uniform")
