"""LoRA adapters beside a tier on disk: nothing that one adapter left is read as another's."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from benchmarks.harness.launch import Server
from benchmarks.harness.unpinned_launch import UNPINNED_LAUNCH
from benchmarks.recall import MODEL
from tests.models import make_adapter
from tests.server.client import ask, flush, wait_until
from tests.server.test_host_tier import STORED, assert_same, conversation, pages

pytestmark = pytest.mark.server

SEGMENT, NEW = 64, 8
PROMPT = conversation(0, 10 * SEGMENT - 30)
HELD = 9 * SEGMENT


@pytest.fixture
def folders(tmp_path):
    """An adapter, another one of the same name, and where pages are."""
    return make_adapter(MODEL, tmp_path / "live", seed=1), make_adapter(MODEL, tmp_path / "new", seed=2), tmp_path


def generate(server: Server, adapter: str | None):
    prompt = {"input_ids": PROMPT} | ({} if adapter is None else {"lora_path": adapter})
    return ask(server, prompt, NEW)


@pytest.fixture
def serve(servers, folders):
    live, _, folder = folders

    @contextlib.contextmanager
    def start() -> Iterator[Server]:
        flags = [
            *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4"),
            *("--kv-pool", "ragged", "--ragged-ratio", "0.3", "--ragged-segment", str(SEGMENT), "--kv-bytes", "64MiB"),
            *("--enable-hierarchical-cache", "--hicache-ratio", "2", *STORED, "--file-storage-path"),
            *(str(folder / "pages"), "--enable-lora", "--lora-paths", f"live={live}"),
            *("--lora-backend", "torch_native", "--max-lora-rank", "4"),
            *("--lora-target-modules", "q_proj", "k_proj", "v_proj"),
        ]
        with servers.serve(MODEL, *flags, log=folder / "server.log", launcher=UNPINNED_LAUNCH) as server:
            yield server

    return start


def test_an_adapter_that_was_replaced_reads_nothing_of_the_one_before(serve, folders):
    """Between two starts, and while a server runs; the base model's own slabs, and an adapter's that is back, stay."""
    live, new, folder = folders
    with serve() as server:
        base, old = generate(server, None), generate(server, "live")
        assert not np.allclose(old.output_logprobs, base.output_logprobs, atol=0.01)
        wait_until(lambda: len(pages(folder / "pages")) == 2 * HELD // SEGMENT)
    kept = folder / "kept"
    shutil.copytree(live, kept)
    shutil.copytree(new, live, dirs_exist_ok=True)
    with serve() as server:
        found = generate(server, "live")
        assert found.cached == 0
        assert generate(server, None).cached == HELD
        flush(server)
        url = f"{server.url}/hicache/storage-backend/clear"
        # A new id: what is loaded while serving has nothing on disk.
        assert httpx.post(f"{server.url}/unload_lora_adapter", json={"lora_name": "live"}, timeout=60).is_success
        loaded = {"lora_name": "live", "lora_path": str(kept)}
        assert httpx.post(f"{server.url}/load_lora_adapter", json=loaded, timeout=60).is_success
        again = generate(server, "live")
        assert again.cached == 0
        assert_same(again, old)
        assert httpx.post(f"{server.url}/unload_lora_adapter", json={"lora_name": "live"}, timeout=60).is_success
        assert httpx.post(
            f"{server.url}/load_lora_adapter", json=loaded | {"lora_path": str(new)}, timeout=60
        ).is_success
        cold = generate(server, "live")
        assert cold.cached == 0
        assert_same(found, cold)
        assert httpx.post(url, timeout=60).is_success
    shutil.copytree(kept, live, dirs_exist_ok=True)
    with serve() as server:
        assert_same(generate(server, "live"), old)
