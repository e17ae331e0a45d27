"""Folder of a calibration's recordings: it belongs to one calibration, and files exist as a whole or not at all."""

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
"""Version of the folder's contents: recordings, and the gates that were trained on them."""

_SETTINGS_FILE = "settings.json"

_PLACEMENT_ARGS = ("base_gpu_id",)
"""Arguments of the engine that change where it runs, but not what is recorded."""


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
        """Return the text by which folders are compared."""
        engine = {name: value for name, value in self.engine_args.items() if name not in _PLACEMENT_ARGS}
        return json.dumps(asdict(self) | {"engine_args": engine}, indent=2)


def claim(folder: Path, settings: Settings, abandoned: Sequence[Path] = ()) -> None:
    """Mark the folder as belonging to this calibration.

    Args:
        abandoned: folders of ended runs. Recordings with these settings move here, then the folders are deleted.

    Raises:
        RaggedConfigError: the folder belongs to another calibration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / _SETTINGS_FILE, settings.text()
    if path.is_file() and path.read_text() != text:
        raise RaggedConfigError(
            f"{folder} holds recordings made with other settings or data: delete it, or choose another --work folder"
        )
    path.write_text(text)
    for source in abandoned:
        source_settings = source / _SETTINGS_FILE
        if source_settings.is_file() and source_settings.read_text() == text:
            for file in sorted(source.glob("*.safetensors")):
                if not (folder / file.name).exists():
                    file.replace(folder / file.name)
        shutil.rmtree(source, ignore_errors=True)


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
    """Return whether a file exists and is whole."""
    try:
        load_file(path)
    except (OSError, SafetensorError):
        return False
    return True
