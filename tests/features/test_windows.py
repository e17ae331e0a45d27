"""Sliding-window layers without a server: which they are, and how many pages they get."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged import cli
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.history.launch import with_lag
from sgl_ragged.features.windows.sizes import TOKENS_PER_WINDOW, WindowNeeds
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import fit_pool
from sgl_ragged.profiles.budgets import uniform_kept
from sgl_ragged.profiles.geometry import ModelGeometry

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GEMMA_3_12B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}


@pytest.mark.parametrize(
    ("config", "full"),
    [
        (GPT_OSS, range(1, 24, 2)),
        (GEMMA_3_12B, range(5, 48, 6)),
        (GEMMA_3_12B | {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"}, range(3, 48, 4)),
        (GPT_OSS | {"sliding_window": None}, range(24)),
        # SGLang serves these without their windows.
        (GPT_OSS | {"architectures": ["Qwen2ForCausalLM"]}, range(24)),
    ],
)
def test_layers_in_slabs_are_those_that_attend_to_everything(config, full):
    geometry = ModelGeometry.from_config(config, "model")
    assert geometry.layer_numbers == tuple(full)
    assert geometry.num_layers == len(full)
    assert geometry.all_layers == config["num_hidden_layers"]


@given(
    budget=st.integers(10**6, 10**11),
    requests=st.none() | st.integers(1, 300),
    per_prefix=st.integers(1, 5),
    in_flight=st.integers(1, 33),
    page_bytes=st.integers(1, 10**7),
    share=st.none() | st.floats(0.01, 1),
)
def test_both_pools_fit_the_budget_and_no_other_slab_would(budget, requests, per_prefix, in_flight, page_bytes, share):
    layout = SlabLayout(kept=uniform_kept(4, 8, 0.3, 256), head_dim=32, segment=256)
    windows = WindowNeeds(page_bytes, per_prefix, per_prefix + 3, in_flight, share)
    try:
        plan = fit_pool(layout, 4, OpenPages(256, 76), budget, requests, side_pages=windows)
    except RaggedConfigError as error:
        assert "too small" in str(error) or "sliding-window layers get" in str(error)  # noqa: PT017 (either is right)
        return
    running = plan.max_requests if requests else windows.running(plan.max_requests, budget)
    assert plan.side_pages == windows.pages(plan.num_slots, running, 256)
    assert 1 < plan.side_pages <= plan.num_slots
    assert plan.total_bytes <= budget
    more = windows.pages(plan.num_slots + 1, running, 256) - plan.side_pages
    assert budget < plan.total_bytes + plan.slab_bytes + more * page_bytes


def test_there_is_a_window_for_every_running_request_and_so_many_cached_tokens():
    windows = WindowNeeds(page_bytes=1, per_prefix=2, per_request=5, in_flight=9)
    slabs = 100 * TOKENS_PER_WINDOW // 256
    assert windows.pages(1 + slabs, 16, 256) == 1 + 9 + 16 * 5 + 100 * 2
    # Each segment has one page at most.
    assert windows.pages(11, 16, 256) == 11


@pytest.mark.parametrize("windows", [WindowNeeds(10**6, 2, 5, 9, share=0.001), WindowNeeds(10**6, 5, 10**4, 1)])
def test_a_pool_that_admits_no_request_is_refused(windows):
    layout = SlabLayout(kept=uniform_kept(4, 8, 0.3, 256), head_dim=32, segment=256)
    with pytest.raises(RaggedConfigError, match=r"the sliding-window layers get \d+ pages, and one request needs"):
        fit_pool(layout, 4, OpenPages(256, 76), 10**9, 4, side_pages=windows)


@pytest.mark.parametrize(("config", "bytes_per_token"), [(GPT_OSS, 7373), (GEMMA_3_12B, 19661)])
def test_layout_of_hybrids_from_their_configs(tmp_path, monkeypatch, capsys, config, bytes_per_token):
    """KV bytes per cached token at ratio 0.3, in bf16."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["sgl-ragged", "layout", "--model", str(tmp_path), "--kv-bytes", "40GiB", "--ratio", "0.3", "--json"]
    monkeypatch.setattr(sys, "argv", [*command, "--max-running-requests", "16", "--profile", "uniform"])
    cli.main()
    said = json.loads(capsys.readouterr().out)
    assert said["slab_bytes"] / 256 == pytest.approx(bytes_per_token, rel=1e-3)
    assert len(said["kept"]) == (12 if config is GPT_OSS else 8)
    elements = 2 * (12 if config is GPT_OSS else 40) * 8 * config["head_dim"]
    assert said["windows_bytes"] == said["window_pages"] * elements * 2 * 256
    assert said["max_total_tokens"] > 3 * said["full_tokens"]


def test_layout_of_a_bounded_history_counts_what_windows_hold(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_12B))
    command = [
        "sgl-ragged",
        "layout",
        "--model",
        str(tmp_path),
        "--kv-bytes",
        "40GiB",
        "--json",
        "--profile",
        "uniform",
    ]

    def shown(*flags: str) -> dict:
        monkeypatch.setattr(sys, "argv", [*command, "--max-running-requests", "4", *flags])
        cli.main()
        return json.loads(capsys.readouterr().out)

    long, short, none = shown("--history", "8192"), shown("--history", "2048"), shown()
    page = long["windows_bytes"] // long["window_pages"]
    tail = -(-256 // long["open_page_tokens"]) * long["slab_bytes"] + long["rows_bytes"] // 5
    # Windows of 1,024 tokens, and 128 that SGLang frees at once: six pages and the open one. Of eight segments in view
    # four never leave, so two more are held.
    assert long["most_request_bytes"] == 33 * long["slab_bytes"] + tail + 7 * page
    assert short["most_request_bytes"] == (9 + 2) * short["slab_bytes"] + tail + 7 * page
    # A prompt that waits for its next chunk holds a window.
    cached = [plan["num_slots"] - 1 for plan in (long, none)]
    pages = [-(-slabs * 256 * 4 // TOKENS_PER_WINDOW) for slabs in cached]
    assert long["window_pages"] - pages[0] == none["window_pages"] - pages[1] + 4


def test_windows_that_are_kept_through_prefill_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS", "0")
    geometry = ModelGeometry.from_config(GEMMA_3_12B, "model")
    bound = HistoryBound(4, "recency")
    with pytest.raises(RaggedConfigError, match="_FREE_OUT_OF_WINDOW_SLOTS=0 keeps the windows of a whole prompt"):
        with_lag(bound, geometry, 256)
    assert with_lag(bound, replace(geometry, windowed=None), 256) == bound


@pytest.mark.parametrize("wrong", [("--swa-full-tokens-ratio", "2"), ("--chunked-prefill-size", "0")])
def test_layout_refuses_sizes_that_make_no_sense(tmp_path, monkeypatch, wrong):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", "--model", str(tmp_path), "--kv-bytes", "1GiB", *wrong])
    with pytest.raises(SystemExit, match=wrong[0]):
        cli.main()
