"""Where calibrated profiles are kept, so that a model is calibrated once: a file per model, scorer and samples."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profile import FORMAT_VERSION

VARIABLE = "SGL_RAGGED_CACHE"
"""Environment variable that names the folder to use instead of ~/.cache/sgl_ragged."""

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


@dataclass(frozen=True)
class ProfileKey:
    """Everything that decides which profile a model gets.

    model: last part of its path, for people. weights: `weights_identity`. fingerprint: of its attention geometry.
    samples: hash of the samples and their version.
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
        """Path of the file in the cache, which need not exist."""
        content = json.dumps(asdict(self) | {"format_version": FORMAT_VERSION}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        return cache_folder() / f"{self.model}-{self.scorer}-{digest}.safetensors"


def cache_folder() -> Path:
    """Path of the cache's folder, which need not exist."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "sgl_ragged"


def weights_identity(folder: Path) -> str:
    """16 hex digits that change with the weights: names, sizes and times of their files, or the hub's names for them.

    The files of a hub's snapshot are links to files that are named by their content.
    """
    state = []
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        status = path.stat()
        identity = path.resolve().name if path.is_symlink() else status.st_mtime_ns
        state.append([path.name, status.st_size, identity])
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file of the cache; `on_wait` is called once if another process holds it.

    Raises:
        RaggedConfigError: the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise RaggedConfigError(
            f"the profile cache {path.parent} cannot be written to ({error.strerror}): set {VARIABLE} to another "
            f"folder, or serve with --ragged-profile uniform or a profile of your own"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
