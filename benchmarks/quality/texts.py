"""Real text of six sources, from packages that are installed wherever this benchmark runs; nothing is downloaded.

None of it is in the built-in calibration samples (`calib.built_in`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import BenchmarkError
from sgl_ragged.verify.prompts import BUILT_IN, built_in_texts

SOURCES = {
    "prose": ("apache-tvm-ffi", "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt", "Newton, Opticks"),
    "licence": ("scipy", "dist-info/LICENSE.txt", "licences, the GPL among them"),
    "python": ("transformers", "transformers/generation/stopping_criteria.py", "Python source"),
    "manual": ("torch", "torch/functional.py", "reference documentation in docstrings"),
    "readme": ("openai", "METADATA", "description of a package in Markdown"),
    "c++": ("torch", "torch/include/c10/util/intrusive_ptr.h", "C++ source"),
}
"""Name: distribution, end of the file's path, what it is."""


VERIFIED = {f"verify-{name}": name for name in BUILT_IN}
"""The held-out texts of `sgl-ragged verify`, whose beginnings are read."""


@dataclass(frozen=True)
class Text:
    """Token ids of a piece of a source."""

    source: str
    ids: tuple[int, ...]


class TextMissing(BenchmarkError):
    """A source is not installed, or too short."""


def read(source: str) -> str:
    """A whole source. Raises TextMissing."""
    distribution, ending, _ = SOURCES[source]
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise TextMissing(f"the text {source!r} is in the package {distribution}, which is not installed") from None
    for file in files:
        if str(file).endswith(ending):
            return Path(str(file.locate())).read_text(errors="replace")
    raise TextMissing(f"the package {distribution} has no file {ending}, which holds the text {source!r}")


def pieces(tokenizer: Any, length: int, count: int = 1, sources: Sequence[str] = tuple(SOURCES)) -> list[Text]:
    """`count` pieces of `length` tokens of every one of the sources, evenly over it. Raises TextMissing."""
    found = []
    for source in sources:
        if source in VERIFIED:
            found.append(Text(source, tuple(tokenizer.encode(built_in_texts()[VERIFIED[source]])[:length])))
            continue
        ids = tokenizer.encode(read(source), add_special_tokens=False)
        first = first_token(tokenizer)
        own = length - len(first)
        room = len(ids) - own
        if room < 0:
            raise TextMissing(f"the text {source!r} has {len(ids)} tokens, {own} are wanted")
        for number in range(count):
            start = room * (2 * number + 1) // (2 * count)
            piece = ids[start : start + own]
            found.append(Text(source, (*first, *piece)))
    return found


def first_token(tokenizer: Any) -> tuple[int, ...]:
    """The token that every text of this model begins with, if there is one."""
    return tuple(token for token in tokenizer.encode("") if token == tokenizer.bos_token_id)
