"""Slabs that were evicted come back from the host or from storage, and nobody can tell from the answers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.harness.launch import Server
from benchmarks.harness.server_pool import ServerPool
from benchmarks.recall import MODEL, task
from tests.models import make_profile
from tests.server.client import Answer, flush, found_of, generate, generate_all, ragged_metrics

pytestmark = pytest.mark.server

SEGMENT, RATIO, NEW = 64, 0.3, 16
OBSERVED = 16
DEVICE_TOKENS = 40 * SEGMENT


def conversation(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), max(length, 128), "chat").tolist()[:length]


# With its answer, the last one ends on a border: SGLang counts that page as full before its segment is sealed.
CONVERSATIONS = [conversation(seed, length) for seed, length in enumerate((700, 1001, 20 * SEGMENT - 15))]


@dataclass(frozen=True)
class Variant:
    policy: str = "write_through"
    scorer: str = "keydiff"
    overlap: bool = True
    tp: int = 1
    ratio: float = RATIO
    restore: str = "load"

    def __str__(self) -> str:
        return f"{self.policy}-{self.scorer}-{'overlap' if self.overlap else 'serial'}-tp{self.tp}-{self.restore}"

    @property
    def flags(self) -> list[str]:
        return [
            *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4", "--enable-metrics"),
            *("--kv-pool", "ragged", "--ragged-ratio", str(self.ratio), "--ragged-segment", str(SEGMENT)),
            *("--max-total-tokens", str(DEVICE_TOKENS), "--kv-bytes", "256MiB", "--chunked-prefill-size", "512"),
            *("--tp", str(self.tp), "--enable-hierarchical-cache", "--hicache-ratio", "6"),
            *("--hicache-write-policy", self.policy, "--ragged-restore", self.restore),
            *(() if self.overlap else ("--disable-overlap-schedule",)),
        ]


@contextlib.contextmanager
def serve(servers: ServerPool, folder: Path, variant: Variant, *more: str) -> Iterator[Server]:
    profile = folder / f"{variant.scorer}.safetensors"
    make_profile(MODEL, profile, segment=SEGMENT, scorer=variant.scorer)
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(variant.tp))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": bound} if variant.tp > 1 else {}
    flags = [*variant.flags, "--ragged-profile", str(profile), *more]
    with servers.serve(MODEL, *flags, log=folder / "server.log", env=env) as server:
        yield server


def fill_device(server: Server) -> None:
    """Push everything else out of the device's pool: twice as many tokens as it has."""
    for seed in range(100, 104):
        generate(server, conversation(seed, DEVICE_TOKENS // 2), 1)


def restored(server: Server, tier: str = "host") -> float:
    generate(server, conversation(50, 20), 1)
    return ragged_metrics(server)[f"restored_segments_total/{tier}"]


def second_turn(first: Answer, prompt: list[int]) -> list[int]:
    return [*prompt, *first.tokens, *conversation(7, 90)]


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.output_logprobs, expected.output_logprobs, atol=1e-4)


def cold_turns(server: Server) -> tuple[list[Answer], list[Answer]]:
    """First and second turns with an empty cache."""
    firsts, seconds = [], []
    for prompt in CONVERSATIONS:
        forget(server)
        firsts.append(generate(server, prompt, NEW))
        forget(server)
        seconds.append(generate(server, second_turn(firsts[-1], prompt), NEW))
        assert seconds[-1].cached == 0
    forget(server)
    return firsts, seconds


def forget(server: Server) -> None:
    """Empty all tiers; a server without storage answers 400."""
    flush(server)
    assert httpx.post(f"{server.url}/hicache/storage-backend/clear", timeout=60).status_code in (200, 400)


def held(first: Answer, prompt: list[int]) -> int:
    """Tokens of a first turn that a cache can hold: the last one that was generated has no keys yet."""
    return (len(prompt) + len(first.tokens) - 1) // SEGMENT * SEGMENT


THOROUGH = [
    Variant(policy, scorer, overlap, tp, restore=restore)
    for policy in ("write_through", "write_through_selective", "write_back")
    for scorer in ("keydiff", "snapkv")
    for overlap in (True, False)
    for tp in (1, 2)
    for restore in ("load", "recompute")
]
ALWAYS = [
    Variant("write_back", "snapkv", overlap=False),
    Variant("write_through_selective", tp=2, restore="recompute"),
]


@pytest.mark.parametrize(
    "variant",
    [
        *ALWAYS,
        *(pytest.param(one, marks=pytest.mark.thorough) for one in THOROUGH if one not in ALWAYS),
    ],
    ids=str,
)
def test_conversations_come_back_from_the_host(servers, tmp_path, variant):
    with serve(servers, tmp_path, variant) as server:
        firsts, seconds = cold_turns(server)
        for prompt, first in zip(CONVERSATIONS, firsts, strict=True):
            # The selective policy backs up what was asked for twice.
            for _ in range(2):
                assert_same(generate(server, prompt, NEW), first)
        fill_device(server)
        before, recomputed_before = restored(server), restored(server, "recomputed")
        for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
            found = generate(server, second_turn(first, prompt), NEW)
            # What was open went to the host, too. SnapKV needs queries of a segment's last tokens, which did not.
            most = held(first, prompt) + SEGMENT - (OBSERVED if variant.scorer == "snapkv" else 1)
            assert found.cached == min(found_of(len(prompt) + NEW - 1, SEGMENT), most)
            assert_same(found, second)
        come_back = restored(server) - before
        if variant.restore == "recompute":
            computed = restored(server, "recomputed")
            assert computed >= len(CONVERSATIONS), "of each conversation one segment at least"
            come_back += computed - recomputed_before
        assert come_back == sum(map(held, firsts, CONVERSATIONS)) // SEGMENT


@pytest.mark.thorough
def test_slabs_of_an_fp8_cache_come_back_as_they_were(servers, tmp_path):
    prompt = CONVERSATIONS[1]
    with serve(servers, tmp_path, Variant(), "--kv-cache-dtype", "fp8_e4m3") as server:
        first = generate(server, prompt, NEW)
        asked = second_turn(first, prompt)
        warm = generate(server, asked, NEW)
        assert warm.cached == found_of(len(prompt) + NEW - 1, SEGMENT)
        fill_device(server)
        before = restored(server)
        back = generate(server, asked, NEW)
        assert restored(server) - before >= held(first, prompt) // SEGMENT
        assert_same(back, warm)


@pytest.mark.thorough
def test_500_requests_over_40_conversations(servers, tmp_path):
    """On a device with room for a tenth of them: every answer is a quiet server's."""
    rng = np.random.default_rng(3)
    prompts = [conversation(200 + seed, int(rng.integers(500, 800))) for seed in range(40)]
    # Three turns each: prefixes of one token sequence, at whatever the server answered alone.
    turns = [[prompt[: len(prompt) // 3 * turn] for turn in (1, 2, 3)] for prompt in prompts]
    with serve(servers, tmp_path, Variant(), "--hicache-ratio", "14") as server:
        quiet = {}
        for tokens in (tuple(turn) for conversation_turns in turns for turn in conversation_turns):
            forget(server)
            quiet[tokens] = generate(server, tokens, 8)
        forget(server)
        asked = [tuple(turns[rng.integers(40)][rng.integers(3)]) for _ in range(500)]
        for start in range(0, 500, 8):
            batch = asked[start : start + 8]
            for tokens, found in zip(batch, generate_all(server, batch, 8), strict=True):
                assert_same(found, quiet[tokens])
        assert restored(server) > 100
        flush(server)


STORED = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")


def wait_until(holds: Callable[[], bool]) -> None:
    """Storage is written by a thread of its own."""
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.2)


def pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.bin"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(tp=2),
        Variant("write_through_selective", "snapkv"),
        Variant("write_back", "snapkv", overlap=False, tp=2),
        Variant("write_back", restore="recompute"),
    ],
    ids=str,
)
def test_conversations_come_back_from_storage(servers, tmp_path, variant):
    """After a restart; write_back has written what was evicted."""
    flags = (*STORED, "--file-storage-path", str(tmp_path / "pages"))
    with serve(servers, tmp_path, variant, *flags) as server:
        firsts, seconds = cold_turns(server)
        for prompt in CONVERSATIONS:
            for _ in range(2):
                generate(server, prompt, NEW)
        fill_device(server)
        # write_back gives to storage what leaves the host, or has been evicted from the device.
        fill_device(server)
    with serve(servers, tmp_path, variant, *flags) as server:
        for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
            found = generate(server, second_turn(first, prompt), NEW)
            assert_same(found, second)
            assert found.cached == held(first, prompt)
        assert restored(server, "storage") > 0


def test_storage_is_never_read_as_anything_else_than_it_was(servers, tmp_path):
    """Damaged pages, what a killed server left, another ratio; and weights stay what they were."""
    folder = tmp_path / "pages"
    flags = (*STORED, "--file-storage-path", str(folder))
    with serve(servers, tmp_path, Variant(), *flags) as server:
        body = {"model_path": str(MODEL)}
        answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60)
        assert answer.status_code == 400
        assert "slabs of the ones before" in answer.json()["message"]
        firsts, seconds = cold_turns(server)
        assert not pages(folder)
        for prompt, first in zip(CONVERSATIONS, firsts, strict=True):
            assert_same(generate(server, prompt, NEW), first)
        written = sum(map(held, firsts, CONVERSATIONS)) // SEGMENT
        wait_until(lambda: len(pages(folder)) == written)

    # Killed while it wrote, another time: part of a page, bytes of something else, and what it had not renamed yet.
    before = {path: path.read_bytes() for path in pages(folder)}
    names = list(before)
    names[3].write_bytes(before[names[3]][: len(before[names[3]]) // 2])
    names[7].write_bytes(bytes(len(before[names[7]])))
    unfinished = folder / ".killed.tmp"
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    with serve(servers, tmp_path, Variant(), *flags) as server:
        cached = []
        for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
            found = generate(server, second_turn(first, prompt), NEW)
            assert_same(found, second)
            cached.append(found.cached == held(first, prompt))
        assert sum(cached) >= len(cached) - 2, "two pages at most are not there"
        assert restored(server, "storage") > 0
        assert not unfinished.exists()
        # What was damaged is written anew.
        wait_until(lambda: {path: path.read_bytes() for path in pages(folder) if path in before} == before)

    with serve(servers, tmp_path, Variant(ratio=0.5), *flags) as server:
        for prompt, first in zip(CONVERSATIONS, firsts, strict=True):
            assert generate(server, second_turn(first, prompt), 1).cached == 0
        assert restored(server, "storage") == 0
    assert {path: path.read_bytes() for path in pages(folder) if path in before} == before


@pytest.mark.thorough
def test_two_servers_share_a_folder(servers, tmp_path):
    """At the same time: each finds what the other wrote, and both answer as alone."""
    folder = tmp_path / "pages"
    flags = (*STORED, "--file-storage-path", str(folder))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        serve(servers, tmp_path / "one", Variant(), *flags) as one,
        serve(servers, tmp_path / "other", Variant(), *flags) as other,
    ):
        firsts, seconds = cold_turns(one)
        forget(other)
        for _ in range(2):
            with ThreadPoolExecutor(2) as threads:
                asked = [threads.submit(generate_all, server, CONVERSATIONS, NEW) for server in (one, other)]
            for found in asked:
                for answer, first in zip(found.result(), firsts, strict=True):
                    assert_same(answer, first)
        for server in (one, other):
            flush(server)
            for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
                found = generate(server, second_turn(first, prompt), NEW)
                # The other one's second turn may be there as well.
                assert found.cached >= held(first, prompt)
                assert_same(found, second)


@pytest.mark.thorough
def test_a_full_disk_costs_nothing_but_what_it_would_have_held(servers, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system of two MiB")
    try:
        with serve(servers, tmp_path, Variant(), *STORED, "--file-storage-path", str(folder)) as server:
            firsts, seconds = cold_turns(server)
            for prompt, first in zip(CONVERSATIONS, firsts, strict=True):
                assert_same(generate(server, prompt, NEW), first)
            assert 0 < len(pages(folder)) < sum(map(held, firsts, CONVERSATIONS)) // SEGMENT
            for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
                assert_same(generate(server, second_turn(first, prompt), NEW), second)
        # What fitted is whole.
        with serve(servers, tmp_path, Variant(), *STORED, "--file-storage-path", str(folder)) as server:
            for prompt, first, second in zip(CONVERSATIONS, firsts, seconds, strict=True):
                assert_same(generate(server, second_turn(first, prompt), NEW), second)
            assert restored(server, "storage") > 0
    finally:
        subprocess.run(["umount", str(folder)], check=True)
