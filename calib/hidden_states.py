"""Hidden states of all samples, a group of layers at a time, so that they fit on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from calib.recorder import hidden_states_recording
from calib.recording import HIDDEN_STATES
from calib.samples import TokenizedSample


class RecordsHiddenStates(Protocol):
    """An engine that sends a sample through the model; `calib.engine.Engine`."""

    def record(self, sample: TokenizedSample, layers: range, *, alone: bool) -> dict[str, torch.Tensor]: ...


class HiddenStates:
    """Inputs of the attention layers in each sample, read layer by layer, in ascending order.

    The samples go through the model once for every `at_once` layers, and the files of the last group are deleted first.
    So training sees every token, whatever the model's size.

    Args:
        folder: folder of the files; files that it already holds are read.
        at_once: layers whose hidden states are on disk at a time.
        layers: layers of the model.
    """

    def __init__(
        self,
        engine: RecordsHiddenStates,
        samples: Sequence[TokenizedSample],
        folder: Path,
        at_once: int,
        layers: int,
    ) -> None:
        self.engine, self.samples, self.folder = engine, samples, folder
        self.at_once, self.layers = at_once, layers

    def layer(self, number: int) -> list[torch.Tensor]:
        """Read one layer: float16 [tokens, hidden size] per sample, for the tokens of its recording."""
        missing = [sample for sample in range(len(self.samples)) if self._find_file(sample, number) is None]
        for sample in missing:
            for path in _layer_files(self.folder, sample):
                path.unlink()
        span = range(number, min(number + self.at_once, self.layers))
        for sample in missing:
            self.engine.record(self.samples[sample], span, alone=True)
            keep_hidden_states(self.folder, sample, span)
        states = []
        for sample in range(len(self.samples)):
            source = self._find_file(sample, number)
            assert source is not None, "the file existed, or has been recorded"
            with safe_open(str(source), framework="pt") as file:
                states.append(file.get_slice(HIDDEN_STATES)[number - _file_layers(source).start])
        return states

    def _find_file(self, sample: int, layer: int) -> Path | None:
        return next((path for path in _layer_files(self.folder, sample) if layer in _file_layers(path)), None)


def keep_hidden_states(folder: Path, sample: int, layers: range) -> None:
    """Move the recorder's hidden states of these layers to a file that is named after the sample and the layers."""
    name = f"sample-{sample:05d}.hidden-states-{layers.start}-{layers.stop}.safetensors"
    hidden_states_recording(folder).replace(folder / name)


def _layer_files(folder: Path, sample: int) -> list[Path]:
    return sorted(folder.glob(f"sample-{sample:05d}.hidden-states-*.safetensors"))


def _file_layers(path: Path) -> range:
    start, stop = path.name.removesuffix(".safetensors").split("-")[-2:]
    return range(int(start), int(stop))
