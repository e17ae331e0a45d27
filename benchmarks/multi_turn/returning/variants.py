"""What is compared: a pool, its page size or its way to restore, and the flags of its server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.launch import LAUNCH_SERVER
from benchmarks.harness.pools import Pool
from sgl_ragged.features.host_tier.restore_schedule import AUTO, MODES

TOKEN_SERVER = (sys.executable, "-m", "benchmarks.multi_turn.returning.token_server")
TOKEN_SERVER_FLAGS = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct")
"""The launcher of the token pool's server on CPUs, and the transfers that it replaces."""

COMMON = ("--skip-tokenizer-init", "--sleep-on-idle")
"""Of all servers: prompts are token ids, and servers that wait for their turn leave the cores to the others."""


@dataclass(frozen=True)
class Variant:
    """A pool; `page`: tokens per page or segment; `restore`: of the ragged pool; `marked`: what its name adds."""

    pool: Pool
    page: int
    restore: str = AUTO
    marked: str = ""

    def __str__(self) -> str:
        return self.pool.name + self.marked

    @classmethod
    def parse(cls, text: str, segment: int) -> Variant:
        """'token', 'token/64' with pages of its own, 'ragged@0.3' or 'ragged@0.3/recompute'. Raises SettingsError."""
        name, slash, rest = text.partition("/")
        pool = Pool.parse(name)
        if not slash:
            return cls(pool, segment)
        if pool.ratio is None and rest.isdecimal() and int(rest):
            return cls(pool, int(rest), marked=f"/{rest}")
        if pool.ratio is not None and rest in MODES and rest != AUTO:
            return cls(pool, segment, rest, f"/{rest}")
        ways = "|".join(mode for mode in MODES if mode != AUTO)
        raise SettingsError(f"{text!r} is not known: write token, token/PAGE, ragged@RATIO or ragged@RATIO/{ways}")

    @property
    def flags(self) -> list[str]:
        """What the server needs beside the pool's own flags."""
        if self.pool.ratio is None:
            return ["--page-size", str(self.page)]
        return ["--ragged-segment", str(self.page)]

    def tier_flags(self, host_ratio: float, storage: Path | None, *, on_cpu: bool) -> list[str]:
        """A host tier of `host_ratio` times the device's tokens, and storage in a folder."""
        flags = ["--enable-hierarchical-cache", "--hicache-ratio", repr(host_ratio)]
        flags += ["--hicache-write-policy", "write_through"]
        if self.pool.ratio is not None:
            flags += ["--ragged-restore", self.restore]
        elif on_cpu:
            flags += TOKEN_SERVER_FLAGS
        if storage is not None:
            flags += ["--hicache-storage-backend", "file", "--file-storage-path", str(storage)]
            flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        return flags

    def launcher(self, *, on_cpu: bool) -> Sequence[str]:
        return TOKEN_SERVER if self.pool.ratio is None and on_cpu else LAUNCH_SERVER
