"""Results by the name of a pool, in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from benchmarks.harness.result_file import ResultFile

TOKEN = "token"
"""The name of SGLang's pool, which others are compared with."""

Measured = TypeVar("Measured")


class PoolResults(ResultFile, Generic[Measured]):
    """`pools`: what was measured, by the pool's name. `kind`: the dataclass of that."""

    kind: ClassVar[type]

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        super().__init__(path, settings, about)
        self.pools: dict[str, Measured] = {}

    def read_entries(self, document: dict[str, Any]) -> None:
        self.pools = {name: self.kind(**found) for name, found in document["pools"].items()}

    def entries(self) -> dict[str, Any]:
        return {"pools": {name: asdict(found) for name, found in self.pools.items()}}  # type: ignore[call-overload]

    @property
    def known(self) -> set[str]:
        return set(self.pools)
