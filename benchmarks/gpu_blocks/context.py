"""What every measuring block needs: where to run, how to time, and how long."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.gpu_blocks.arithmetic import REPLAY_BYTES
from benchmarks.gpu_blocks.timing import Timer


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


@dataclass
class Context:
    """Settings of a run; `skipped` collects {"case", "reason"} of what a block leaves out.

    dtype: of caches, queries, keys and values; 2 bytes an element, which is what bytes are counted with.
    memory: bytes that one case may take. replay_bytes: as `arithmetic.REPLAY_BYTES`.
    residents: resident CTAs of the decode kernel by heads, query heads of each, head dimension and what is stored.
    flashinfer: the module, None where it cannot be imported.
    deadline: on the clock of time.monotonic().
    ceilings: bytes per second of a copy and FLOP per second of a matrix product, measured; empty if they were not.
    """

    device: torch.device
    timer: Timer
    memory: int
    deadline: float = float("inf")
    dtype: torch.dtype = torch.bfloat16
    replay_bytes: int = REPLAY_BYTES
    flashinfer: Any = None
    ceilings: dict[str, float] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)
    residents: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    chunk_residents: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def skip(self, case: str, reason: str) -> None:
        self.skipped.append({"case": case, "reason": reason})

    def within_time(self, cases: Iterable[N]) -> Iterator[N]:
        """The cases as long as there is time; those beyond are skipped. Frees memory between cases."""
        for case in cases:
            if time.monotonic() >= self.deadline:
                self.skip(case.name, "no time left")
                continue
            yield case
            self.release()

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def percent_of_copy(self, bytes_per_second: float) -> float | None:
        ceiling = self.ceilings.get("copy_bytes_per_s")
        return ceiling and 100 * bytes_per_second / ceiling

    def percent_of_matmul(self, flop_per_second: float) -> float | None:
        ceiling = self.ceilings.get("matmul_flop_per_s")
        return ceiling and 100 * flop_per_second / ceiling


def short_error(error: BaseException) -> str:
    """One line for the results file."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


Row = dict[str, Any]
