"""A feature as another package would bring it: two entry points, `sgl_ragged.launch_features` and
`sgl_ragged.serve_features`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.conflicts import MIXED
from sgl_ragged.launch.feature import Conflict, LaunchFeature
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.plan import FeatureSettings, Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.serve.feature import ServeFeature, Worker


@dataclass(frozen=True)
class BallastFlags:
    """Values as given."""

    ballast: int | None = flag(None, "Bytes per request row that nobody uses.", shown="none", type=int, metavar="N")
    ballast_colour: str | None = flag(None, "With --ragged-ballast: its colour.", shown="grey")


@dataclass(frozen=True)
class BallastSettings(FeatureSettings):
    """num_bytes: per request row."""

    num_bytes: int

    @property
    def state(self) -> tuple[Any, ...]:
        return (self.num_bytes,)

    def row_bytes(self, rank: Rank) -> int:
        return self.num_bytes

    def describe(self, sizes: PoolSizes) -> str:
        return f"requests carry {self.num_bytes} bytes of ballast"


class Ballast(LaunchFeature):
    """Settings: `BallastSettings`."""

    name = "ballast"
    case = "--ragged-ballast"
    flags = BallastFlags
    in_vain = "{flags} paints ballast, and there is none: add --ragged-ballast, or drop the flag"
    conflicts = (Conflict(case, MIXED, "ballast would shift"),)

    def asked(self, start: Start) -> bool:
        return start.options.of(BallastFlags).ballast is not None

    def settle(self, start: Start) -> BallastSettings:
        ballast = start.options.of(BallastFlags).ballast
        if ballast is None or ballast < 1:
            raise RaggedConfigError(f"--ragged-ballast {ballast} must be at least 1")
        return BallastSettings(ballast)

    def join(self, settings: BallastSettings, plan: ServingPlan, start: BudgetedStart) -> BallastSettings:
        return settings

    def layout_info(self, settings: BallastSettings | None, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"ballast": settings and settings.num_bytes}


class Weights:
    """What a worker carries."""

    gauges: ClassVar[dict[str, str]] = {"ballast_bytes": "Bytes of ballast per request row on this rank."}
    counters: ClassVar[dict[str, str]] = {}
    label: ClassVar = ""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    def readings(self) -> dict[tuple[str, str], float]:
        return {("ballast_bytes", ""): float(self._row_bytes)}


class CarriedBallast(ServeFeature):
    """Settings: `BallastSettings`."""

    name = "ballast"

    def attach(self, settings: BallastSettings, worker: Worker) -> Any:
        worker.pool.attached[self.name] = Weights(settings.num_bytes)
        return worker.outer

    def server_info(self, settings: BallastSettings | None, pool: Any) -> dict[str, Any]:
        return {"ballast": settings and settings.num_bytes}


LAUNCH, SERVE = Ballast(), CarriedBallast()
