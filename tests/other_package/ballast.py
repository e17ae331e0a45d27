"""A feature as another package would bring it: one file, joined by an entry point of `sgl_ragged.features`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import Feature, Rank, Worker
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.start import MIXED, Conflict, Launch
from sgl_ragged.mem_pool.sizing import PoolSizes


@dataclass(frozen=True)
class BallastFlags:
    """Values as given."""

    ballast: int | None = flag(None, "Bytes per request row that nobody uses.", shown="none", type=int, metavar="N")
    ballast_colour: str | None = flag(None, "With --ragged-ballast: its colour.", shown="grey")


class Weights:
    """What a worker carries."""

    gauges: ClassVar[dict[str, str]] = {"ballast_bytes": "Bytes of ballast per request row on this rank."}
    counters: ClassVar[dict[str, str]] = {}
    label: ClassVar = ""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    def readings(self) -> dict[tuple[str, str], float]:
        return {("ballast_bytes", ""): float(self._row_bytes)}


class Ballast(Feature):
    """Settings: bytes per request row."""

    name = "ballast"
    case = "--ragged-ballast"
    flags = BallastFlags
    in_vain = "{flags} paints ballast, and there is none: add --ragged-ballast, or drop the flag"
    conflicts = (Conflict(case, MIXED, "ballast would shift"),)

    def asked(self, launch: Launch) -> bool:
        return launch.options.of(BallastFlags).ballast is not None

    def settle(self, launch: Launch) -> int:
        ballast = launch.options.of(BallastFlags).ballast
        if ballast is None or ballast < 1:
            raise RaggedConfigError(f"--ragged-ballast {ballast} must be at least 1")
        return ballast

    def state(self, settings: int) -> tuple[Any, ...]:
        return (settings,)

    def row_bytes(self, settings: int, rank: Rank) -> int:
        return settings

    def attach(self, settings: int, worker: Worker) -> Any:
        worker.pool.attached[self.name] = Weights(settings)
        return worker.given

    def describe(self, settings: int, sizes: PoolSizes) -> str:
        return f"requests carry {settings} bytes of ballast"

    def server_info(self, settings: int | None, pool: Any) -> dict[str, Any]:
        return {"ballast": settings}

    def layout_info(self, settings: int | None, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"ballast": settings}


BALLAST = Ballast()
