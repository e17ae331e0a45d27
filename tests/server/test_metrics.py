"""What an operator sees: Prometheus metrics and /server_info, of a ragged server and of one with the token pool."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgl_ragged.profiles.profile import profile_kept
from tests.models import make_profile
from tests.server.client import flush, generate, ragged_metrics, wait_until

pytestmark = pytest.mark.server

SEGMENT, RATIO, REQUESTS = 64, 0.4, 3
NAMES = {
    *("kept_ratio", "slab_bytes_in_use", "open_bytes_in_use", "kept_open_bytes_in_use", "rank_imbalance"),
    *("profile_of_first_weights", "kv_scales_wait", "weight_updates_total"),
    *("sealed_segments_total", "seal_seconds_total", "reused_open_tokens_total"),
}
LAYERS, HEADS, DIM, ITEM = 2, 4, 32, 4
COMMON = ("--dtype", "float32", "--kv-bytes", "16MiB", "--enable-metrics")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def profile(character_model, folder):
    return make_profile(character_model, folder / "profile.safetensors", segment=SEGMENT)


@pytest.fixture(scope="module")
def server(character_model, folder, profile, servers):
    flags = [
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors"), "--max-running-requests", str(REQUESTS)),
        # Written at every step, so that a scrape sees the step before it.
        *("--decode-log-interval", "1"),
    ]
    with servers.serve(character_model, *COMMON, *flags, log=folder / "ragged.log") as server:
        yield server


def slab_bytes(profile) -> int:
    return int(profile_kept(profile, RATIO, SEGMENT).sum()) * 2 * DIM * ITEM


TOKEN_BYTES = LAYERS * HEADS * 2 * DIM * ITEM


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 100, length).tolist()


def wait_for(server, name: str, value: float) -> None:
    wait_until(lambda: ragged_metrics(server)[name] == value)


def two_cores() -> dict[str, str]:
    """SGLang wants to be told the cores of every rank and replica."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


def test_settings_are_in_server_info(server, profile):
    kept = profile_kept(profile, RATIO, SEGMENT)
    assert kept.min() < kept.max()
    for path in ("server_info", "get_server_info"):
        info = httpx.get(f"{server.url}/{path}", timeout=60).json()
        found = info["ragged"]
        page_tokens = slab_bytes(profile) // TOKEN_BYTES
        rows_bytes = (REQUESTS + 1) * 2 * -(-SEGMENT // page_tokens) * 4
        slots = (16 * 2**20 - rows_bytes) // slab_bytes(profile)
        expected = {
            **{"ratio": RATIO, "segment": SEGMENT, "scorer": "keydiff", "kernel": "torch"},
            **{"kept_min": kept.min(), "kept_max": kept.max(), "rank_imbalance": 1.0, "scorer_weights": None},
            **{"kept_mean": pytest.approx(kept.mean()), "kept_ratio": pytest.approx(kept.mean() / SEGMENT)},
            **{"slots": slots, "virtual_tokens": (slots - 1) * SEGMENT, "slab_bytes": slab_bytes(profile)},
            **{"open_page_tokens": page_tokens, "rows_bytes": rows_bytes, "max_requests": REQUESTS},
            "open_segments_kept": True,
            "total_bytes": slots * slab_bytes(profile) + rows_bytes,
        }
        assert {name: found[name] for name in expected} == expected
        assert profile.digest() in found["profile_source"]
        check = found["self_check"]
        assert 0 < max(check["differences"].values()) <= check["tolerance"] == 1e-4
        assert "checked against dense attention" in server.log_text()
        assert found["profile"].endswith("profile.safetensors")
        assert found["virtual_tokens"] == info["max_total_num_tokens"]


def test_metrics_follow_the_requests(server, profile):
    flush(server)
    before = ragged_metrics(server)
    assert set(before) == NAMES
    assert before["kept_ratio"] == pytest.approx(slab_bytes(profile) / (SEGMENT * TOKEN_BYTES))
    assert before["rank_imbalance"] == 1.0
    # Prefill seals three segments; decode fills two, of which the next step seals the first.
    generate(server, prompt(0, 200), 121)
    after = ragged_metrics(server)
    assert after["sealed_segments_total"] - before["sealed_segments_total"] == 3 + 1
    assert after["seal_seconds_total"] > before["seal_seconds_total"]
    # The last one waits for the next batch, whatever that holds.
    generate(server, prompt(1, 10), 2)
    assert ragged_metrics(server)["sealed_segments_total"] - before["sealed_segments_total"] == 3 + 2
    wait_for(server, "open_bytes_in_use", 0)
    # Five slabs, and the open segments of 8 tokens behind a prompt and of 11 of another are not worth keeping.
    wait_for(server, "slab_bytes_in_use", 5 * slab_bytes(profile))
    # A hit seals nothing again.
    assert generate(server, prompt(0, 200), 2).cached == 3 * SEGMENT
    assert ragged_metrics(server)["sealed_segments_total"] - before["sealed_segments_total"] == 3 + 2


def test_a_flushed_cache_is_said_to_be_empty(server):
    """At once: who reads metrics between two requests would take what was freed for a leak."""
    generate(server, prompt(5, 200), 2)
    wait_until(lambda: ragged_metrics(server)["slab_bytes_in_use"] > 0)
    flush(server)
    assert ragged_metrics(server)["slab_bytes_in_use"] == 0


def test_running_requests_hold_pages(server, profile):
    flush(server)
    body = {"input_ids": prompt(2, 20), "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
        # Kept by name: the connection ends with its iterator, and the request with the connection.
        lines = answer.iter_lines()
        for _ in range(40):
            next(lines)
        # An open segment that was just sealed has its first page alone, which is not counted here; the next tokens
        # take more. The request runs until the connection ends.
        found = ragged_metrics(server)
        for _ in lines:
            if found["open_bytes_in_use"] > 0:
                break
            found = ragged_metrics(server)
    assert 0 < found["open_bytes_in_use"] < SEGMENT * TOKEN_BYTES
    assert found["open_bytes_in_use"] % slab_bytes(profile) == 0
    assert found["slab_bytes_in_use"] >= slab_bytes(profile)
    assert found["slab_bytes_in_use"] % slab_bytes(profile) == 0


def test_the_profiler_starts_and_stops(server, folder):
    """With SGLang's default activities, which name a GPU as well."""
    traces = folder / "traces"
    start = httpx.post(f"{server.url}/start_profile", json={"output_dir": str(traces)}, timeout=60)
    assert start.status_code == 200, start.text
    generate(server, prompt(6, 20), 4)
    stop = httpx.post(f"{server.url}/stop_profile", timeout=120)
    assert stop.status_code == 200, stop.text
    (trace,) = (path for path in traces.rglob("*.trace.json.gz"))
    assert "aten::linear" in {
        event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert len(generate(server, prompt(6, 20), 4).tokens) == 4


def test_memory_is_released_and_resumed(server):
    """Without --enable-memory-saver SGLang frees nothing but the cache, and answers."""
    flush(server)
    asked = prompt(7, 200)
    before = generate(server, asked, 8)
    flush(server)
    for call in ("release", "resume"):
        answer = httpx.post(f"{server.url}/{call}_memory_occupation", json={}, timeout=60)
        assert answer.status_code == 200, answer.text
    after = generate(server, asked, 8)
    assert (after.tokens, after.cached) == (before.tokens, 0)


def test_the_token_pool_has_none_of_it(character_model, folder, servers):
    with servers.serve(character_model, *COMMON, log=folder / "token.log") as server:
        generate(server, prompt(0, 200), 20)
        assert ragged_metrics(server) == {}
        assert "ragged" not in httpx.get(f"{server.url}/metrics", timeout=60).text
        assert "ragged" not in httpx.get(f"{server.url}/server_info", timeout=60).json()


@pytest.mark.thorough
def test_ranks_have_series_of_their_own(character_model, folder, profile, servers):
    kept = profile_kept(profile, RATIO, SEGMENT)
    ranks = [kept[:, : HEADS // 2].mean(), kept[:, HEADS // 2 :].mean()]
    assert ranks[0] != ranks[1]
    flags = ["--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT), "--tp", "2"]
    flags += ["--ragged-profile", str(folder / "profile.safetensors"), "--ragged-fairkv", "none"]
    flags += ["--max-running-requests", "2", "--enable-metrics-for-all-schedulers"]
    with servers.serve(character_model, *COMMON, *flags, log=folder / "ranks.log", env=two_cores()) as server:
        generate(server, prompt(0, 200), 2)
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        found = {
            (sample.name, sample.labels["tp_rank"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("sglang:ragged_")
        }
        settings = httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]
    imbalance = max(ranks) / np.mean(ranks)
    assert settings["rank_imbalance"] == pytest.approx(imbalance)
    assert (settings["kept_min"], settings["kept_max"]) == (kept.min(), kept.max())
    for rank, share in enumerate(ranks):
        assert found["sglang:ragged_kept_ratio", str(rank)] == pytest.approx(share / SEGMENT)
        assert found["sglang:ragged_rank_imbalance", str(rank)] == pytest.approx(imbalance)
        assert found["sglang:ragged_sealed_segments_total", str(rank)] == 3


def test_replicas(character_model, folder, profile, servers, server):
    """Each answers as one process; what /server_info says of one of them, and the metrics of each."""
    asked = prompt(9, 3 * SEGMENT + 20)
    flush(server)
    alone = generate(server, asked, SEGMENT)
    flags = ["--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT), "--dp-size", "2"]
    flags += ["--max-running-requests", "2", "--load-balance-method", "round_robin", "--decode-log-interval", "1"]
    flags += ["--ragged-profile", str(folder / "profile.safetensors")]

    def in_use(server) -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        return {
            sample.labels["dp_rank"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "sglang:ragged_slab_bytes_in_use"
        }

    with servers.serve(character_model, *COMMON, *flags, log=folder / "replicas.log", env=two_cores()) as server:
        for cached in (False, False, True, True):
            found = generate(server, asked, SEGMENT)
            assert (found.cached > 0) == cached, "in turns, each with a cache of its own"
            assert found.tokens == alone.tokens
            np.testing.assert_allclose(found.output_logprobs, alone.output_logprobs, atol=1e-4)
        flush(server)
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()
        assert info["ragged"]["ratio"] == RATIO
        assert info["ragged"]["virtual_tokens"] == info["max_total_num_tokens"]
        for seed in range(4):
            # The last answered token has no keys: three whole segments of each prompt, two prompts on each replica.
            generate(server, prompt(seed, 3 * SEGMENT - 1), 2)
        wait_until(lambda: in_use(server) == dict.fromkeys("01", 6 * info["ragged"]["slab_bytes"]))
        flush(server)
        wait_until(lambda: in_use(server) == {"0": 0, "1": 0})


def test_the_dashboard_shows_every_metric_and_no_other(server):
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    asked = set(re.findall(r"sglang:\w+", shown))
    assert asked <= known
    assert {name for name in asked if "ragged" in name} == {f"sglang:ragged_{name}" for name in NAMES}
