"""Cache of calibrated profiles, so that a model is calibrated once: one file per model, scorer and set of samples."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile import FORMAT_VERSION

VARIABLE = "SGLANG_RAGGED_CACHE"
"""Environment variable with the cache folder; the default is ~/.cache/sgl_ragged."""

_ELSEWHERE = f"set {VARIABLE} to another folder, or serve with --ragged-profile uniform or a profile of your own"

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


@dataclass(frozen=True)
class ProfileKey:
    """Everything that decides which profile a model gets.

    Args:
        model: last part of the model's path, for a readable file name.
        weights: identity of the weights (`weights_identity`).
        fingerprint: fingerprint of the attention geometry.
        scorer_weights: path of the scorer's weights file; empty without one.
        samples: identity of the samples.
    """

    model: str
    weights: str
    fingerprint: str
    scorer: str
    scorer_weights: str
    segment: int
    samples: str
    dtype: str

    @property
    def path(self) -> Path:
        """Path of the file in the cache; the file may not exist."""
        content = json.dumps(asdict(self) | {"format_version": FORMAT_VERSION}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        return cache_folder() / f"{self.model}-{self.scorer}-{digest}.safetensors"


def cache_folder() -> Path:
    """Return the absolute path of the cache folder; the folder may not exist.

    Raises:
        RaggedConfigError: the variable is not set, and there is no home folder.
    """
    folder = os.environ.get(VARIABLE)
    try:
        return Path(folder).expanduser().absolute() if folder else Path.home() / ".cache" / "sgl_ragged"
    except RuntimeError as error:
        raise RaggedConfigError(f"there is no folder for the profile cache ({error}): {_ELSEWHERE}") from None


def is_cached(path: Path) -> bool:
    """Return whether the cache has this file.

    Raises:
        RaggedConfigError: the cache folder is not accessible.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RaggedConfigError(
            f"the profile cache {path.parent} cannot be read ({error.strerror}): {_ELSEWHERE}"
        ) from None


def weights_identity(source: Path) -> str:
    """Return 16 hex digits that change with the weights: over names, sizes and times of their files.

    In a snapshot of a hub, the commit is the identity, since it is known before the weights are downloaded. Links
    elsewhere are identified by their targets' names, which hubs derive from the content.

    Args:
        source: the model's folder, or its only file.
    """
    if source.parent.name == "snapshots" and source.parent.parent.name.startswith("models--"):
        return _digest([source.name])
    files = [source] if source.is_file() else (path for pattern in WEIGHTS for path in source.glob(pattern))
    state = []
    for path in sorted(files):
        status = path.stat()
        identity = path.resolve().name if path.is_symlink() else status.st_mtime_ns
        state.append([path.name, status.st_size, identity])
    return _digest(state)


def _digest(state: object) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    """Hold the lock of a file in the cache.

    Args:
        on_wait: called once if another process holds the lock.

    Yields:
        The lock's file descriptor. A child process that inherits it holds the lock until it ends.

    Raises:
        RaggedConfigError: the folder is not writable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise unwritable(path.parent, error) from None
    with file:
        try:
            _lock(file.fileno(), on_wait)
        except OSError as error:
            raise unwritable(path.parent, error) from None
        yield file.fileno()


def _lock(file: int, on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


def unwritable(folder: Path, error: OSError) -> RaggedConfigError:
    """Make the error for a cache that is not writable."""
    return RaggedConfigError(f"the profile cache {folder} cannot be written to ({error.strerror}): {_ELSEWHERE}")
