"""One process for all tests that fork servers from it: they are ready in seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.warm_start import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery
