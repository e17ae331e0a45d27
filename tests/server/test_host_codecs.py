"""Slabs come back from the host through a codec that loses something, and no other codec takes its pages."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest

from benchmarks.demo import MODEL
from tests.server.client import generate
from tests.server.test_host_tier import FLAGS, NEW, conversation, fill_device, restored, whole_segments

pytestmark = pytest.mark.server

FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
PROMPT = conversation(1, 1000)


def tier(server) -> tuple[str, float]:
    """The codec, and bytes of a row to those of its slab."""
    found = httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]
    return found["tier"]["codec"], found["tier"]["row_bytes"] / found["slab_bytes"]


@pytest.mark.parametrize(
    ("codec", "share", "most"),
    # The largest logprob that moved did so by .037 with fp8 and by .17 with shared when this was written.
    [("fp8", 0.26, 6e-2), pytest.param("shared", 0.77, 1.0, marks=pytest.mark.thorough)],
)
def test_restored_answers_are_close_and_rows_small(nursery, tmp_path, codec, share, most):
    flags = [*FLAGS, "--ragged-host-codec", codec, "--hicache-storage-backend", "file"]
    storage = tmp_path / "storage"
    storage.mkdir()
    with nursery.serve(MODEL, *flags, log=tmp_path / "log", env={FILES: str(storage)}) as server:
        found, size = tier(server)
        assert found == codec
        assert size < share
        first = generate(server, PROMPT, NEW)
        asked = [*PROMPT, *first.tokens, *conversation(7, 90)]
        warm = generate(server, asked, NEW)
        whole = whole_segments(first, PROMPT)
        assert warm.cached == whole
        fill_device(server)
        before = restored(server)
        back = generate(server, asked, NEW)
        assert back.cached >= whole
        generate(server, conversation(50, 20), 1)
        assert restored(server) > before
        moved = np.abs(back.output_logprobs - warm.output_logprobs).max()
        assert back.tokens == warm.tokens
        assert 0 < moved < most, "exact would not have moved it"
        written = pages(storage)
        assert len(written) >= whole // 64
    if codec != "fp8":
        return
    # The same folder, another codec: its pages have other names.
    exact = [*FLAGS, "--hicache-storage-backend", "file"]
    with nursery.serve(MODEL, *exact, log=tmp_path / "exact.log", env={FILES: str(storage)}) as server:
        assert tier(server) == ("exact", 1.0)
        other = generate(server, asked, NEW)
        assert other.cached == 0
        assert restored(server, "storage") == 0
        np.testing.assert_allclose(other.output_logprobs, warm.output_logprobs, atol=1e-4)


def pages(storage) -> list:
    """Files of pages, once no more are written."""
    found: list = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        again = sorted(storage.rglob("*.bin"))
        if again and len(again) == len(found):
            break
        found = again
        time.sleep(0.5)
    return found
