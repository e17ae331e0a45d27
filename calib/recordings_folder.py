"""The folder of a calibration's recordings: files that exist as a whole or not at all, and one owner."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sgl_ragged.errors import RaggedConfigError

RECORDINGS = 6
"""Version of what the folder holds: recordings, and the gates that were trained on them."""

_SETTINGS_FILE = "settings.json"

_PLACE = ("base_gpu_id",)
"""Arguments of the engine that change where it runs, and nothing that is recorded."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is recorded; recordings of other settings in the same folder are refused."""

    model: str
    model_fingerprint: str
    scorers: tuple[str, ...]
    segment: int
    dataset_hash: str
    dtype: str
    scorer_weights: str | None
    tp: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)
    recordings: int = RECORDINGS

    def text(self) -> str:
        """Settings by which folders are told apart."""
        engine = {name: value for name, value in self.engine_args.items() if name not in _PLACE}
        return json.dumps(asdict(self) | {"engine_args": engine}, indent=2)


def claim(folder: Path, settings: Settings, abandoned: Sequence[Path] = ()) -> None:
    """Mark the folder as that of this calibration.

    Args:
        abandoned: folders of runs that have ended. What they recorded with these settings moves here; then they are
            deleted.

    Raises:
        RaggedConfigError: the folder belongs to another calibration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / _SETTINGS_FILE, settings.text()
    if path.is_file() and path.read_text() != wanted:
        raise RaggedConfigError(
            f"{folder} holds recordings made with other settings or data: delete it, or choose another --work folder"
        )
    path.write_text(wanted)
    for other in abandoned:
        of_other = other / _SETTINGS_FILE
        if of_other.is_file() and of_other.read_text() == wanted:
            for file in sorted(other.glob("*.safetensors")):
                if not (folder / file.name).exists():
                    file.replace(folder / file.name)
        shutil.rmtree(other, ignore_errors=True)


def save(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file so that it exists as a whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), str(partial), metadata=metadata)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def readable(path: Path) -> bool:
    """True if a file is there and whole."""
    try:
        load_file(path)
    except (OSError, SafetensorError):
        return False
    return True
