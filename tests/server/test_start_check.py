"""Servers compare their answers with the uncompressed model's before they are healthy."""

from __future__ import annotations

import json
import os

import httpx
import pytest

from benchmarks.harness.errors import ServerFailed
from benchmarks.harness.launch import LAUNCH_SERVER
from benchmarks.harness.unpinned_launch import UNPINNED_LAUNCH
from sgl_ragged import cli
from tests.draft_heads import make_followed, make_follower
from tests.models import make_adapter, make_llama, make_profile, with_reference
from tests.server.client import server_settings
from tests.server.router import route
from tests.server.test_draft_heads import by_head

pytestmark = pytest.mark.server

SEGMENT = 64
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4")
# Ranks on cores that others use, too, can take minutes.
RAGGED = (*FLAGS, "--kv-pool", "ragged", "--ragged-segment", str(SEGMENT), "--ragged-check-seconds", "600")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def profile(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    with_reference(make_profile(llama, path, segment=SEGMENT), llama, path)
    return path


def verified(monkeypatch, capsys, *arguments: str) -> dict:
    monkeypatch.setattr("sys.argv", ["sgl-ragged", "verify", *arguments, "--json"])
    capsys.readouterr()
    cli.main()
    return json.loads(capsys.readouterr().out)


def test_it_passes_where_nothing_is_dropped_and_verify_finds_the_same(
    llama, profile, servers, tmp_path, capsys, monkeypatch
):
    """On two ranks, and through a router."""
    pytest.importorskip("sglang_router", reason="the router is missing: pip install sglang-router")
    flags = ("--ragged-profile", str(profile), "--ragged-ratio", "1", "--ragged-check", "strict", "--enable-metrics")
    with servers.serve(llama, *RAGGED, *flags, "--tp", "2", log=tmp_path / "log", env=two_cores()) as server:
        found = server_settings(server)["quality"]
        assert "answers checked in " in server.log_text()
        metrics = httpx.get(f"{server.url}/metrics").text
        own = verified(monkeypatch, capsys, "--url", server.url)
        with route("--worker-urls", server.url, servers=1, log=tmp_path / "router.log") as router:
            routed = verified(monkeypatch, capsys, "--url", router.url, "--profile", str(profile))
    assert found["texts"] == ["first", "second"]
    assert found["faults"] == []
    assert len([line for line in metrics.splitlines() if line.startswith("sglang:ragged_check_")]) == 3
    # The check leaves nothing in the cache.
    assert [line.split()[-1] for line in metrics.splitlines() if "ragged_slab_bytes_in_use{" in line] == ["0.0"]
    assert own["against"] == routed["against"] == f"profile {profile}"
    for seen in (own, routed):
        assert [one["name"] for one in seen["prompts"]] == ["first", "second", "third"]
        assert seen["prompts"][0]["to_reference"]["positions"] == 4 * SEGMENT
    for means in (found, own["mean"], routed["mean"]):
        assert_passed(means)


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")
LORA = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "--lora-paths"),
)


@pytest.mark.parametrize(
    "case", ["drafts", *(pytest.param(case, marks=pytest.mark.thorough) for case in ("head", "stages", "adapters"))]
)
def test_it_passes_on_servers_of_other_kinds(llama, profile, servers, tmp_path, case):
    more = {"drafts": NGRAM, "head": ("--kv-bytes", "32MiB"), "stages": ("--pp-size", "2"), "adapters": LORA}[case]
    if case == "head":
        llama, profile = make_followed(tmp_path / "followed"), tmp_path / "p.safetensors"
        with_reference(make_profile(llama, profile, segment=SEGMENT), llama, profile)
        more += by_head("eagle3", make_follower(llama, tmp_path / "head", "eagle3"))
    if case == "adapters":
        more += (f"live={make_adapter(llama, tmp_path / 'adapter', 1)}",)
    flags = ("--ragged-profile", str(profile), "--ragged-ratio", "1", "--ragged-check", "strict")
    env = two_cores() if case == "stages" else None
    launcher = UNPINNED_LAUNCH if case == "adapters" else LAUNCH_SERVER
    with servers.serve(llama, *RAGGED, *flags, *more, log=tmp_path / "log", env=env, launcher=launcher) as server:
        assert_passed(server_settings(server)["quality"])


@pytest.mark.thorough
def test_each_text_asks_one_replica(llama, profile, servers, tmp_path, capsys, monkeypatch):
    """Where they have caches of their own, hits are compared with misses all the same."""
    flags = ("--ragged-profile", str(profile), "--ragged-ratio", "1", "--ragged-check", "strict", "--dp-size", "2")
    with servers.serve(
        llama, *RAGGED, *flags, "--enable-cache-report", log=tmp_path / "log", env=two_cores()
    ) as server:
        assert_passed(server_settings(server)["quality"])
        own = verified(monkeypatch, capsys, "--url", server.url)
    assert_passed(own["mean"])
    cached = [line for line in (tmp_path / "log").read_text().splitlines() if "#cached-token: 256" in line]
    assert len(cached) >= 5


def two_cores() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


def assert_passed(means: dict) -> None:
    for kind in ("to_reference", "hit_to_miss", "decode_to_prefill"):
        assert abs(means[kind]["kl"]) < 1e-5, kind


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


@pytest.mark.thorough
def test_strict_ends_the_start_where_there_is_no_time(llama, profile, servers, tmp_path):
    flags = ("--ragged-profile", str(profile), "--ragged-check", "strict", "--ragged-check-seconds", "0.001")
    with pytest.raises(ServerFailed), servers.serve(llama, *RAGGED, *flags, log=tmp_path / "log"):
        pass
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("sgl_ragged: ")]
    assert line.startswith("sgl_ragged: --ragged-check strict: answers were not compared: a text would take about ")
    assert line.endswith("--ragged-check-seconds is 0.001; use --ragged-check auto")


def test_it_says_why_it_did_not_run(llama, servers, tmp_path):
    with servers.serve(llama, *RAGGED, log=tmp_path / "log") as server:
        found = server_settings(server)["quality"]
        assert f"were not compared with the uncompressed model: {found['skipped']}" in server.log_text()
    assert found["skipped"].startswith("the profile is uniform")
