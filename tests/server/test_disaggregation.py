"""Prefill and decode in servers of their own, real processes on loopback, against one process that does both.

SGLang's own strict checks run after every batch: no page is lost on either side.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.recall import MODEL, task
from sgl_ragged import cli
from sgl_ragged.mem_pool.open_pages import OpenPages
from tests.models import make_profile
from tests.server.client import flush, found_of, generate, ragged_metrics, server_settings, wait_until
from tests.server.pair import serve_pair
from tests.server.test_bounded_history import STRICT

pytestmark = pytest.mark.server
pytest.importorskip("nixl", reason="the transfer engine is missing: pip install nixl")

SEGMENT, RATIO, NEW = 64, 0.3, 40
LENGTHS = (1, 20, 63, 64, 65, 192, 193, 700)
"""Shorter than a segment, and on, just before and just behind borders; with NEW tokens most go across one."""


def document(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), max(length, 64), "chat").tolist()[:length]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def flags(folder):
    make_profile(MODEL, folder / "profile.safetensors", segment=SEGMENT)
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "10", "--enable-metrics"),
        *("--chunked-prefill-size", "256", "--kv-bytes", "24MiB"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors")),
    ]


@pytest.fixture(scope="module")
def prompts():
    return [document(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def longer(prompts):
    """Prompts that go on where others have been cached."""
    return [prompt + document(100 + len(prompt), 70) for prompt in prompts if len(prompt) in (20, 64, 193, 700)]


@pytest.fixture(scope="module")
def together(folder, flags, prompts, longer, servers):
    """What one process answers that does both, each with an empty cache."""
    with servers.serve(MODEL, *flags, log=folder / "together.log", env=STRICT) as server:
        answers = {}
        for prompt in (*prompts, *longer):
            flush(server)
            answers[tuple(prompt)] = generate(server, prompt, NEW)
        return answers


@pytest.fixture(scope="module")
def pair(folder, flags, together, servers):
    with serve_pair(servers, MODEL, *flags, folder=folder, env=STRICT) as pair:
        yield pair


def assert_same(found, prompts, expected):
    for prompt, have in zip(prompts, found, strict=True):
        want = expected[tuple(prompt)]
        assert have.tokens == want.tokens, len(prompt)
        np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4, err_msg=str(len(prompt)))


def test_apart_equals_together(pair, prompts, longer, together):
    """All at once, cold; then again, with all but what the last token needs from the prefill server's cache, within
    segments; then with more behind them."""
    sent = ragged_metrics(pair.prefill)["sent_bytes_total"]
    cold = pair.generate_all(prompts, NEW)
    assert [answer.cached for answer in cold] == [0] * len(prompts)
    assert_same(cold, prompts, together)
    again = pair.generate_all(prompts, NEW)
    for prompt, answer in zip(prompts, again, strict=True):
        # What ends with its segment leaves nothing open.
        border, rest = divmod(len(prompt) - 1, SEGMENT)
        assert answer.cached >= (found_of(len(prompt) - 1, SEGMENT) if rest < SEGMENT - 2 else border * SEGMENT)
    assert sum(answer.cached % SEGMENT > 0 for answer in again) >= 2
    assert_same(again, prompts, together)
    on = pair.generate_all(longer, NEW)
    assert all(answer.cached > 0 for answer in on)
    assert_same(on, longer, together)
    # What was sent of them is what arithmetic says, and little beside what the token pool would send.
    said = server_settings(pair.prefill)
    pages = OpenPages(SEGMENT, said["open_page_tokens"])
    of_all = sum(pages.pages(len(prompt)) for prompt in (*prompts, *prompts, *longer)) * said["slab_bytes"]

    def all_sent() -> bool:
        return ragged_metrics(pair.prefill)["sent_bytes_total"] - sent == of_all

    # SGLang writes metrics with the next batch.
    pair.generate(document(50, 16), 1)
    of_all += pages.pages(16) * said["slab_bytes"]
    wait_until(all_sent)


def test_what_is_sent_is_said(pair):
    said = {name: server_settings(server) for name, server in (("prefill", pair.prefill), ("decode", pair.decode))}
    for mode, one in said.items():
        apart = one["disaggregation"]
        assert apart["mode"] == mode
        pages = OpenPages(SEGMENT, one["open_page_tokens"])
        every = [pages.pages(1024 - SEGMENT // 2 + n) for n in range(SEGMENT)]
        assert apart["sent_bytes"]["1024"]["pages"] == sum(every) * one["slab_bytes"] // SEGMENT
        # 4 layers of 8 heads of dimension 32, keys and values in float32.
        assert apart["sent_bytes"]["1024"]["token_pool"] == (1024 * 2 - 1) * 4 * 8 * 2 * 32 * 4 // 2
        assert f"{mode} server, share of the token pool's bytes that is sent" in one["summary"]
    assert said["prefill"]["disaggregation"]["agreement"] == said["decode"]["disaggregation"]["agreement"]
    assert said["prefill"]["plan_digest"] == said["decode"]["plan_digest"]


def test_verify_asks_both(pair, prompts, monkeypatch, capsys, tmp_path):
    """Hits equal misses, and what was decoded on one server a prefill on the other."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"input_ids": prompts[-1]}))
    flags = ("--url", pair.prefill.url, "--decode", pair.decode.url, "--prompts", str(path), "--json")
    monkeypatch.setattr("sys.argv", ["sgl-ragged", "verify", *flags])
    capsys.readouterr()
    cli.main()
    mean = json.loads(capsys.readouterr().out)["mean"]
    assert mean["hit_to_miss"]["positions"] == len(prompts[-1]) - (len(prompts[-1]) - 2) // SEGMENT * SEGMENT - 1
    for kind in ("hit_to_miss", "decode_to_prefill"):
        assert abs(mean[kind]["kl"]) < 1e-6, kind
