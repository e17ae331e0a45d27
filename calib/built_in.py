"""Built-in samples: real prose, documentation and code, with facts hidden in them and asked for later.

Texts are those in `calib/texts`, written for this, and what Python itself ships (PSF licence): the documentation behind
its `help()` and the sources of its library. So no download is needed. A seed gives the same samples twice on the same
release of Python. Samples of the real workload are better; `--data` takes them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from importlib import resources

import numpy as np

from calib.conversations import Message, code, recall, records, say
from calib.facts import draw_facts, pick
from sgl_ragged.profiles.built_in_samples import documentation, library_sources

LENGTH = 5000
"""Characters per sample of real text, about 1,250 tokens."""

_READ = ("I have read it.", "Thank you, I have read all of it.", "Noted.", "Done. What would you like to know?")
_GIVE = (
    "Please read this:\n\n{}",
    "Here is a text.\n\n{}",
    "{}\n\nKeep this in mind.",
    "I have some notes for you. {}",
    "The next part:\n\n{}",
)


def built_in_samples(count: int, seed: int) -> Iterator[tuple[str, str | tuple[Message, ...]]]:
    """`count` pairs of a task's name and a text, or the messages of a conversation."""
    for number in range(count):
        task, write = WRITERS[number % len(WRITERS)]
        sample = write(np.random.default_rng([seed, number]))
        yield task, sample if isinstance(sample, str) else tuple(sample)


@functools.cache
def _prose() -> tuple[str, ...]:
    folder = resources.files("calib") / "texts"
    return tuple(path.read_text() for path in sorted(folder.iterdir(), key=lambda path: path.name))


@functools.cache
def _documentation() -> tuple[str, ...]:
    return documentation()


@functools.cache
def _sources() -> tuple[str, ...]:
    return library_sources()


def _excerpt(rng: np.random.Generator, texts: tuple[str, ...], length: int) -> str:
    """About `length` characters of paragraphs that follow one another; further texts are added as needed."""
    paragraphs: list[str] = []
    for number in rng.permutation(len(texts)):
        found = [part for part in texts[int(number)].split("\n\n") if part.strip()]
        for part in found[int(rng.integers(max(len(found) // 2, 1))) :]:
            if sum(map(len, paragraphs)) < length:
                paragraphs.append(part[:1500])
    return "\n\n".join(paragraphs)


def _some(rng: np.random.Generator) -> tuple[str, ...]:
    return (_prose, _prose, _documentation, _sources)[int(rng.integers(4))]()


def _plain(rng: np.random.Generator) -> str:
    return _excerpt(rng, _some(rng), LENGTH)


def _facts(rng: np.random.Generator) -> Iterator[Message]:
    """Two to four parts of text with facts among their sentences, questions behind each part about all before it."""
    parts = int(rng.integers(2, 5))
    asked: list = []
    for _ in range(parts):
        facts = draw_facts(rng, int(rng.integers(3, 8)))
        text = _hide(rng, _excerpt(rng, _some(rng), LENGTH // parts - 500), [fact.statement for fact in facts])
        yield from say(pick(rng, _GIVE).format(text), pick(rng, _READ))
        asked += facts
        order = rng.permutation(len(asked))[: 2 + int(rng.integers(3))]
        for number in order:
            yield from say(asked[int(number)].question, asked[int(number)].answer)
    for number in rng.permutation(len(asked))[:8]:
        yield from say(asked[int(number)].question, asked[int(number)].answer)


def _hide(rng: np.random.Generator, text: str, statements: list[str]) -> str:
    """The text with statements between its sentences, or its lines where it has few sentences."""
    parts = text.split(". ")
    joint = ". "
    if len(parts) < 2 * len(statements):
        parts, joint = text.split("\n"), "\n"
    places = np.sort(rng.choice(np.arange(1, len(parts) + 1), len(statements), replace=len(parts) < len(statements)))
    for place, statement in zip(places[::-1], reversed(statements), strict=True):
        parts.insert(int(place), statement.removesuffix(".") if joint == ". " else statement)
    return joint.join(parts)


@functools.cache
def _functions_of(source: str) -> tuple[str, ...]:
    """Functions of 150 to 900 characters in the source of a module, in the order of `ast.walk`."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    found = (ast.get_source_segment(source, node) or "" for node in nodes)
    return tuple(function for function in found if 150 < len(function) < 900)


def _repeat(rng: np.random.Generator) -> Iterator[Message]:
    """A text, then passages of it word for word."""
    text = _excerpt(rng, _prose() if rng.integers(2) else _documentation(), LENGTH * 2 // 3)
    yield from say(pick(rng, _GIVE).format(text), pick(rng, _READ))
    passages = [part for part in text.split("\n\n") if len(part) > 120]
    for number in rng.permutation(len(passages))[:4]:
        passage = passages[int(number)][:700]
        start = " ".join(passage.split()[:5])
        yield from say(f'Repeat the passage that begins with "{start}".', passage)


def _functions(rng: np.random.Generator) -> Iterator[Message]:
    """A part of a module of Python's library, then some of its functions again."""
    found = _functions_of(pick(rng, _sources()))
    shown: list[str] = []
    for number in rng.permutation(len(found)):
        if sum(map(len, shown)) < LENGTH * 3 // 5:
            shown.append(found[int(number)])
    yield from say("This is my module:\n\n" + "\n\n".join(shown), "I have read the module.")
    for number in rng.permutation(len(shown))[:4]:
        function = shown[int(number)]
        yield from say(f"Show me `{function.split('(')[0].removeprefix('def ')}` again.", function)


WRITERS: tuple[tuple[str, Callable[[np.random.Generator], str | Iterator[Message]]], ...] = (
    ("facts", _facts),
    ("text", _plain),
    ("facts", _facts),
    ("repeat", _repeat),
    ("facts", _facts),
    ("functions", _functions),
    ("facts", _facts),
    ("recall", recall),
    ("text", _plain),
    ("facts", _facts),
    ("records", records),
    ("code", code),
)
"""Tasks in the order in which samples take turns; half of them hide facts of all kinds in real text."""
