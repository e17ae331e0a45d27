"""SGLang's own benchmark client against a ragged server, by the command lines of docs/operate.md."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.server

GROUPS, PROMPTS, SYSTEM, QUESTION, OUTPUT, SEGMENT = 2, 3, 200, 40, 16, 64


def bench(servers, server, model, folder, *flags: object) -> dict:
    """One run of `python -m sglang.bench_serving`; what it writes to its output file."""
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--base-url", server.url, "--model", model),
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", GROUPS, "--gsp-prompts-per-group", PROMPTS),
        *("--gsp-system-prompt-len", SYSTEM, "--gsp-question-len", QUESTION, "--gsp-output-len", OUTPUT),
        *("--num-prompts", GROUPS * PROMPTS, "--max-concurrency", 2, "--flush-cache", "--disable-tqdm"),
        *("--output-file", folder / "result.jsonl", "--output-details", "--cache-report", *flags),
    ]
    # It keeps generated prompts in the home folder.
    done = servers.run(list(map(str, command)), timeout=300, env={"HOME": str(folder)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads((folder / "result.jsonl").read_text().splitlines()[-1])


def test_shared_prefixes(servers, character_server, character_model, tmp_path):
    found = bench(servers, character_server, character_model, tmp_path, "--backend", "sglang")
    assert found["completed"] == GROUPS * PROMPTS
    assert found["total_output_tokens"] == GROUPS * PROMPTS * OUTPUT
    assert found["server_info"]["ragged"]["segment"] == SEGMENT
    # Two requests run at a time, so at most two of each group come before their prefix is in the cache.
    cached = found["cache_report"]["total_cached_tokens"]
    assert cached >= GROUPS * (PROMPTS - 2) * (SYSTEM // SEGMENT * SEGMENT)


def test_multi_turn(servers, character_server, character_model, tmp_path):
    turns = 3
    flags = ("--backend", "sglang-oai-chat", "--gsp-num-turns", turns)
    found = bench(servers, character_server, character_model, tmp_path, *flags)
    assert found["completed"] == GROUPS * PROMPTS * turns
    assert found["total_output_tokens"] == GROUPS * PROMPTS * turns * OUTPUT
    # Each turn after the first finds at least the whole segments of the first one's prompt.
    first = (SYSTEM + QUESTION) // SEGMENT * SEGMENT
    assert found["cache_report"]["total_cached_tokens"] >= GROUPS * PROMPTS * (turns - 1) * first


@pytest.mark.thorough
def test_the_token_pool_takes_the_same_traffic(servers, character_model, tmp_path):
    flags = ("--dtype", "float32", "--kv-pool", "token", "--kv-bytes", "32MiB", "--max-running-requests", "8")
    more = ("--attention-backend", "torch_native", "--enable-cache-report")
    with servers.serve(character_model, *flags, *more, log=tmp_path / "server.log") as server:
        found = bench(servers, server, character_model, tmp_path, "--backend", "sglang")
    assert found["completed"] == GROUPS * PROMPTS
    assert found["total_output_tokens"] == GROUPS * PROMPTS * OUTPUT
    assert "ragged" not in found["server_info"]
    assert found["cache_report"]["total_cached_tokens"] >= GROUPS * (PROMPTS - 2) * (SYSTEM - 1)
