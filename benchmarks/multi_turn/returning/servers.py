"""The servers of a stage: all of them are up at once, so that variants take turns request by request."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed, ServerFailed, SettingsError
from benchmarks.harness.pools import Started
from benchmarks.multi_turn.gauges import pool_size
from benchmarks.multi_turn.gauges import read as read_gauges
from benchmarks.multi_turn.returning.results import Held
from benchmarks.multi_turn.returning.sizes import RUNNING, PoolPages
from benchmarks.multi_turn.returning.variants import Variant
from benchmarks.multi_turn.verdict import have_same_bytes

WRITTEN_WITHIN_S = 120
"""Until storage has what a host wrote through to it."""


@dataclass(frozen=True)
class Place:
    """A server's name in logs, what it serves, and its host tier: bytes (0: none) and a folder of storage."""

    name: str
    variant: Variant
    pages: PoolPages
    host_bytes: int = 0
    storage: Path | None = None


@contextlib.contextmanager
def running(
    started: Started, places: Sequence[Place], folder: Path, *, on_cpu: bool
) -> Iterator[dict[str, ServerClient]]:
    """Servers by name, for the length of a `with` block. Raises SettingsError where one does not start."""
    with contextlib.ExitStack() as stack:
        clients = {}
        for place in places:
            log, flags = folder / f"{place.name.replace('/', '-')}.log", place.variant.flags
            if place.host_bytes:
                ratio = place.pages.host_ratio(place.host_bytes)
                flags = [*flags, *place.variant.tier_flags(ratio, place.storage, on_cpu=on_cpu)]
            launcher = place.variant.launcher(on_cpu=on_cpu)
            try:
                server = started.client(place.variant.pool, RUNNING, log, flags, launcher=launcher)
                clients[place.name] = stack.enter_context(server)
            except ServerFailed as error:
                raise SettingsError(f"the server {place.name} did not start: {error.reason}") from None
        yield clients


def take_stock(client: ServerClient, stage: str, place: Place) -> Held:
    """What a server has, and what it has restored. Raises ServerLost, SettingsError."""
    # Gauges and counters are brought up to date by the next batch.
    client.generate([10, 11, 12], 1, ignore_eos=True)
    text = client.metrics()
    size = pool_size(read_gauges(text))
    host_tokens, restored = 0, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "sglang:hicache_host_total_tokens":
                host_tokens = int(sample.value)
            elif sample.name == "sglang:ragged_restored_segments_total":
                restored[sample.labels["tier"]] = int(sample.value)
    pages = place.pages
    return Held(
        stage=stage,
        variant=str(place.variant),
        device_bytes=size.kv_bytes,
        host_bytes=host_tokens // pages.page * pages.page_bytes,
        device_tokens=size.tokens,
        host_tokens=host_tokens,
        restored=restored,
    )


def check_bytes(servers: Sequence[Held]) -> None:
    """Raises SettingsError where servers of a stage do not have the same bytes on the device, or on the host."""
    for name in ("device_bytes", "host_bytes"):
        sizes = {one.variant: getattr(one, name) for one in servers if getattr(one, name)}
        if not have_same_bytes(sizes.values()):
            said = ", ".join(f"{variant} {size}" for variant, size in sizes.items())
            raise SettingsError(
                f"servers are compared at the same bytes, but their {name.replace('_', ' ')} are {said}"
            )


def wait_until_written(storage: Path, pages: int) -> None:
    """Return once a folder of storage holds so many pages. Raises PointFailed."""
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while (count := len(list(storage.glob("*.bin")))) < pages:
        if time.monotonic() > deadline:
            raise PointFailed(f"{count} of {pages} pages were written to storage within {WRITTEN_WITHIN_S} s")
        time.sleep(0.2)


def drop_page_cache(storage: Path) -> None:
    """Have files read from the disk next time, not from memory, where the system knows how to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in storage.glob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
