"""Hidden states of all samples, as many layers at a time as the disk is to hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from calib.recorder import HIDDEN_STATES, hidden_states_recording
from calib.samples import TokenizedSample


class RecordsHiddenStates(Protocol):
    """An engine that sends a sample through the model; `calib.measure.Engine`."""

    def record(self, sample: TokenizedSample, layers: range, *, alone: bool) -> dict[str, torch.Tensor]: ...


class HiddenStates:
    """Inputs of the attention layers of each sample, read layer by layer, in ascending order.

    The samples go through the model once more for every `at_once` layers, and what was there before is deleted: so
    training sees every token, whatever the model's size.

    Args:
        folder: where files of the layers may be from before.
        layers: how many the model has.
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
        """float16 [tokens, hidden size] per sample, of one layer; tokens are those of its recording."""
        missing = [sample for sample in range(len(self.samples)) if self._file(sample, number) is None]
        for sample in missing:
            for path in _files(self.folder, sample):
                path.unlink()
        span = range(number, min(number + self.at_once, self.layers))
        for sample in missing:
            self.engine.record(self.samples[sample], span, alone=True)
            keep_hidden_states(self.folder, sample, span)
        found = []
        for sample in range(len(self.samples)):
            source = self._file(sample, number)
            assert source is not None, "it was there, or has been recorded"
            with safe_open(str(source), framework="pt") as file:
                found.append(file.get_slice(HIDDEN_STATES)[number - _layers(source).start])
        return found

    def _file(self, sample: int, layer: int) -> Path | None:
        return next((path for path in _files(self.folder, sample) if layer in _layers(path)), None)


def keep_hidden_states(folder: Path, sample: int, layers: range) -> None:
    """Move what the recorder wrote about these layers to where it stays; its name says which they are."""
    name = f"sample-{sample:05d}.hidden-states-{layers.start}-{layers.stop}.safetensors"
    hidden_states_recording(folder).replace(folder / name)


def _files(folder: Path, sample: int) -> list[Path]:
    return sorted(folder.glob(f"sample-{sample:05d}.hidden-states-*.safetensors"))


def _layers(path: Path) -> range:
    start, stop = path.name.removesuffix(".safetensors").split("-")[-2:]
    return range(int(start), int(stop))
