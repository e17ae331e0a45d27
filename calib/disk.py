"""Disk space of a calibration: how many bytes it writes, how many layers' hidden states at a time, and if they fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calib.attended import MAX_WINDOWS, TOP
from calib.codebook import queries_per_sample
from calib.gate import FEATURES
from calib.samples import TokenizedSample
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry

MAX_HIDDEN_STATES_BYTES = 4 << 30
"""Default maximum of hidden states on disk at a time."""

MAX_FREE_SHARE = 0.5
"""Maximum share of the free space that hidden states take by default."""


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a calibration writes.

    Args:
        recordings_bytes: everything but hidden states, kept until the end.
        hidden_states_bytes: hidden states of all layers.
        num_layers: layers of the model.
        layers_at_once: layers whose hidden states are on disk at a time.
        needed_bytes: maximum at any time.
        free_bytes: free space on the disk, including what the folder holds.
    """

    recordings_bytes: int
    hidden_states_bytes: int
    num_layers: int
    layers_at_once: int
    needed_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        needed, free = _format_bytes(self.needed_bytes), _format_bytes(self.free_bytes)
        text = f"calibration writes up to {needed}, and {free} are free"
        if self.layers_at_once < self.num_layers:
            passes = -(-self.num_layers // self.layers_at_once)
            text += (
                f"; hidden states of all layers would take {_format_bytes(self.hidden_states_bytes)}, so the samples "
                f"go through the model {passes} times, for {self.layers_at_once} layers each (--hidden-states BYTES "
                f"for more at once)"
            )
        return text


def disk_need(
    folder: Path,
    geometry: ModelGeometry,
    hidden_size: int,
    samples: Sequence[TokenizedSample],
    segment: int,
    *,
    num_scorers: int,
    trained: bool,
    max_hidden_states_bytes: int | None,
) -> DiskNeed:
    """Compute the bytes that will be written to an existing folder; bytes that the folder holds count as free.

    Args:
        hidden_size: elements of a hidden state.
        num_scorers: number of scorers whose scores are recorded.
        trained: whether gates are trained, for which hidden states are recorded.
        max_hidden_states_bytes: maximum of hidden states on disk at a time; None for MAX_HIDDEN_STATES_BYTES, and at
            most MAX_FREE_SHARE of the free space.

    Raises:
        RaggedConfigError: the bytes do not fit.
    """
    tokens = sum((len(sample.input_ids) - 1) // segment * segment for sample in samples)
    num_heads = geometry.num_layers * geometry.num_heads
    # Scores and two kinds of peaks in float32; in windows, a position and a float16 for each of the best tokens.
    recordings = num_heads * (4 * tokens * (num_scorers + 2) + 6 * TOP * MAX_WINDOWS * len(samples))
    # The codebook: a query and two outputs in float16, two masses in float32.
    queries = num_heads * geometry.q_per_kv * queries_per_sample(len(samples)) * len(samples)
    recordings += queries * (6 * geometry.head_dim + 8)
    if trained:
        # Scores of gates, and their weights.
        recordings += 4 * num_heads * tokens
        recordings += 2 * geometry.num_layers * hidden_size * (FEATURES + geometry.num_heads + 2)
    layer_bytes = 2 * hidden_size * tokens if trained else 0
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.iterdir())
    if max_hidden_states_bytes is None:
        limit = min(MAX_HIDDEN_STATES_BYTES, MAX_FREE_SHARE * max(free - recordings, 0))
    else:
        limit = max_hidden_states_bytes
        if limit < layer_bytes:
            raise RaggedConfigError(
                f"--hidden-states {limit}: one layer's hidden states take {layer_bytes} bytes "
                f"({_format_bytes(layer_bytes)}); allow that much, or use fewer --samples or a smaller --max-tokens"
            )
    at_once = min(max(int(limit // layer_bytes), 1), geometry.num_layers) if layer_bytes else geometry.num_layers
    # One more sample: it is written before it is moved, and replaced by the next.
    longest = max(len(sample.input_ids) for sample in samples)
    in_flight = (2 * hidden_size * at_once if trained else 0) * longest + recordings // len(samples)
    needed = recordings + at_once * layer_bytes + in_flight
    if needed > free:
        raise RaggedConfigError(
            f"calibration needs {needed} bytes ({_format_bytes(needed)}) on the disk of {folder}, where {free} bytes "
            f"({_format_bytes(free)}) are free: make room, name a folder on another disk (with --work, or "
            f"SGLANG_RAGGED_CACHE where a server calibrates), or use fewer --samples or a smaller --max-tokens"
        )
    return DiskNeed(recordings, layer_bytes * geometry.num_layers, geometry.num_layers, at_once, needed, free)


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
