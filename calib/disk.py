"""What calibration writes to disk: how much of it at a time, and whether that fits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calib.attended import MOST_WINDOWS, TOP
from calib.codebook import queries_per_sample
from calib.gate import FEATURES
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry

AT_A_TIME = 4 << 30
"""Bytes of hidden states that are on disk at a time, unless somebody says otherwise."""

SHARE = 0.5
"""Share of what is free that they take at most, unless somebody says otherwise."""


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a calibration writes.

    recordings: everything but hidden states, to the end. hidden_states: of all layers. layers_at_once: of how many
    layers they are on disk at a time. needed: at most at any time. free: on that disk, with what the folder holds.
    """

    recordings: int
    hidden_states: int
    layers: int
    layers_at_once: int
    needed: int
    free: int

    def __str__(self) -> str:
        text = f"calibration writes up to {_shown(self.needed)}, and {_shown(self.free)} are free"
        if self.layers_at_once < self.layers:
            passes = -(-self.layers // self.layers_at_once)
            text += (
                f"; hidden states of all layers would take {_shown(self.hidden_states)}, so the samples go through the "
                f"model {passes} times, for {self.layers_at_once} layers each (--hidden-states BYTES for more at once)"
            )
        return text


def disk_need(
    folder: Path,
    geometry: ModelGeometry,
    hidden_size: int,
    samples: Sequence[TokenizedSample],
    segment: int,
    *,
    scores: int,
    trained: bool,
    at_a_time: int | None,
) -> DiskNeed:
    """Bytes that will be written to a folder that exists; those that it holds count as free.

    Args:
        hidden_size: elements of a hidden state.
        scores: how many scorers' scores are recorded.
        trained: whether gates are trained, for which hidden states are recorded.
        at_a_time: bytes of hidden states on disk at a time; None for AT_A_TIME, and no more than SHARE of what is free.

    Raises:
        RaggedConfigError: it does not fit.
    """
    tokens = sum((len(sample.input_ids) - 1) // segment * segment for sample in samples)
    heads = geometry.num_layers * geometry.num_heads
    # Scores and two kinds of peaks in float32; of windows, a position and a float16 for each of the best tokens.
    recordings = heads * (4 * tokens * (scores + 2) + 6 * TOP * MOST_WINDOWS * len(samples))
    # The codebook: a query and two outputs in float16, two masses in float32.
    queries = heads * geometry.q_per_kv * queries_per_sample(len(samples)) * len(samples)
    recordings += queries * (6 * geometry.head_dim + 8)
    if trained:
        # Scores of gates, and their weights.
        recordings += 4 * heads * tokens
        recordings += 2 * geometry.num_layers * hidden_size * (FEATURES + geometry.num_heads + 2)
    of_layer = 2 * hidden_size * tokens if trained else 0
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.iterdir())
    bound = min(AT_A_TIME, SHARE * max(free - recordings, 0)) if at_a_time is None else at_a_time
    if at_a_time is not None and at_a_time < of_layer:
        raise RaggedConfigError(
            f"--hidden-states {at_a_time}: those of one layer take {of_layer} bytes ({_shown(of_layer)}); allow that "
            f"much, or use fewer --samples or a smaller --max-tokens"
        )
    at_once = min(max(int(bound // of_layer), 1), geometry.num_layers) if of_layer else geometry.num_layers
    # One more sample: it is written before it is moved, and replaced by the next.
    longest = max(len(sample.input_ids) for sample in samples)
    in_flight = (2 * hidden_size * at_once if trained else 0) * longest + recordings // len(samples)
    needed = recordings + at_once * of_layer + in_flight
    if needed > free:
        raise RaggedConfigError(
            f"calibration needs {needed} bytes ({_shown(needed)}) on the disk of {folder}, where {free} bytes "
            f"({_shown(free)}) are free: make room, name a folder on another disk (with --work, or "
            f"SGLANG_RAGGED_CACHE where a server calibrates), or use fewer --samples or a smaller --max-tokens"
        )
    return DiskNeed(recordings, of_layer * geometry.num_layers, geometry.num_layers, at_once, needed, free)


def _shown(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
