"""How much sealing a store has done, counted on the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class SealMeter:
    """Adds up sealed segments and the host's time around sealing; never waits for the device.

    Sealing goes layer by layer in prefill and over all layers at once after decode, so what is counted is layers of
    segments. `seconds` is the work itself on a CPU, and the time to launch it on a GPU.

    Args:
        num_layers: layers of one segment.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self._layers = 0

    @property
    def segments(self) -> int:
        """Segments of which every layer has been sealed."""
        return self._layers // self._num_layers

    @contextlib.contextmanager
    def sealing(self, segments: int, layers: int = 1) -> Iterator[None]:
        """Around the sealing of so many segments in so many layers."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self._layers += segments * layers
