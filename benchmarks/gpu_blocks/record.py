"""The results file: written anew after every block, so that a run that is interrupted keeps the blocks before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.files import write_whole

MEASURED = "measured"
COMPUTED = "computed, not measured"


class Record:
    """`gpu.json` of one output folder: {"kind", "machine", "blocks": {name: {"status", ...}}}.

    Several processes may write it one after the other, never at once: each reads it first.
    """

    def __init__(self, folder: Path, name: str = "gpu.json") -> None:
        self.path = folder / name
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, kind: str, **settings: Any) -> None:
        """Begin anew: drops what an earlier run left."""
        self._write({"kind": kind, "settings": settings, "machine": {}, "blocks": {}})

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def set_machine(self, machine: dict[str, Any]) -> None:
        self._write({**self.read(), "machine": machine})

    def set_block(self, name: str, block: dict[str, Any]) -> None:
        document = self.read()
        document["blocks"][name] = block
        self._write(document)

    def _write(self, document: dict[str, Any]) -> None:
        write_whole(self.path, json.dumps(document, indent=1) + "\n")
