"""The reference: what the uncompressed model predicts for held-out texts, recorded at the end of a calibration.

`sgl-ragged verify` and the check at a server's start compare a server's predictions with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

PREFIX = "reference."
"""Prefix of the reference's tensors in a profile."""

LIKELIEST = 128
"""Tokens per position whose log-probabilities are recorded; all of them in smaller vocabularies."""

SEGMENTS = 5
"""Segments of each text; the predictions after the first one are recorded."""

_NAME = re.compile(r"[a-z0-9_-]{1,32}")


DTYPES = {"tokens": np.int32, "logprobs": np.float32, "likeliest": np.int32, "likeliest_logprobs": np.float16}
"""Dtype of each array of a text."""

_PARTS = tuple(DTYPES)


@dataclass(frozen=True)
class ReferenceText:
    """Predictions for one text of n tokens, of which the last m were recorded.

    tokens: int32 [n]. logprobs: float32 [m], log-probabilities (nats) of the last m tokens. likeliest: int32 [m, k],
    the k likeliest tokens, likeliest first; likeliest_logprobs: float16 [m, k].
    """

    name: str
    tokens: np.ndarray
    logprobs: np.ndarray
    likeliest: np.ndarray
    likeliest_logprobs: np.ndarray

    @property
    def first(self) -> int:
        """Position of the first token whose prediction was recorded."""
        return len(self.tokens) - len(self.logprobs)


def to_tensors(texts: tuple[ReferenceText, ...]) -> dict[str, np.ndarray]:
    """Return the tensors that a profile stores."""
    return {f"{PREFIX}{text.name}.{part}": getattr(text, part) for text in texts for part in _PARTS}


def from_tensors(tensors: Mapping[str, np.ndarray]) -> tuple[ReferenceText, ...]:
    """Read what `to_tensors` returned from all tensors of a profile. Raises KeyError if a text is incomplete."""
    names = dict.fromkeys(name.split(".")[1] for name in tensors if name.startswith(PREFIX))
    return tuple(ReferenceText(name, *(tensors[f"{PREFIX}{name}.{part}"] for part in _PARTS)) for name in names)


def reference_faults(texts: tuple[ReferenceText, ...]) -> Iterator[str]:
    """Yield what is wrong with a reference, one reason each."""
    for text in texts:
        if not _NAME.fullmatch(text.name):
            yield f"reference {text.name!r} must be named by at most 32 small letters, digits, - and _"
        count, known = len(text.logprobs), text.likeliest.shape[-1]
        shapes = {"logprobs": (count,), "likeliest": (count, known), "likeliest_logprobs": (count, known)}
        for part, shape in shapes.items():
            if getattr(text, part).shape != shape:
                yield f"reference {text.name}: {part} {getattr(text, part).shape} must be {list(shape)}"
        if text.tokens.ndim != 1 or not 0 < count < len(text.tokens):
            yield f"reference {text.name}: {count} predictions do not fit {text.tokens.shape} tokens"
        for part, dtype in DTYPES.items():
            if getattr(text, part).dtype != dtype:
                yield f"reference {text.name}: {part} must be {np.dtype(dtype)}"
        for part in ("tokens", "likeliest"):
            if (getattr(text, part) < 0).any():
                yield f"reference {text.name}: {part} must be token ids"
        for part in ("logprobs", "likeliest_logprobs"):
            # The negation refuses NaN, too. Sums of floats may exceed 0 a little.
            if not (getattr(text, part) <= 1e-3).all() or not np.isfinite(getattr(text, part)).all():
                yield f"reference {text.name}: {part} must be log-probabilities"
