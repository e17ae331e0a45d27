"""Built-in samples: real prose, documentation and code, with hidden facts and later questions about them.

Texts come from `calib/texts`, written for this purpose, and from Python itself (PSF licence): the documentation of its
`help()` and the sources of its library. So no download is needed. A seed gives the same samples on the same release of
Python. Samples of the real workload are better (`--data`).
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
    """Yield `count` pairs of a task's name and its sample, a text or the messages of a conversation."""
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
    """Join consecutive paragraphs to about `length` characters; further texts are added as needed."""
    paragraphs: list[str] = []
    for number in rng.permutation(len(texts)):
        candidates = [paragraph for paragraph in texts[int(number)].split("\n\n") if paragraph.strip()]
        for paragraph in candidates[int(rng.integers(max(len(candidates) // 2, 1))) :]:
            if sum(map(len, paragraphs)) < length:
                paragraphs.append(paragraph[:1500])
    return "\n\n".join(paragraphs)


def _draw_texts(rng: np.random.Generator) -> tuple[str, ...]:
    return (_prose, _prose, _documentation, _sources)[int(rng.integers(4))]()


def _write_text(rng: np.random.Generator) -> str:
    return _excerpt(rng, _draw_texts(rng), LENGTH)


def _write_facts(rng: np.random.Generator) -> Iterator[Message]:
    """Write two to four texts with facts between their sentences; questions after each ask for any earlier fact."""
    num_texts = int(rng.integers(2, 5))
    stated: list = []
    for _ in range(num_texts):
        facts = draw_facts(rng, int(rng.integers(3, 8)))
        excerpt = _excerpt(rng, _draw_texts(rng), LENGTH // num_texts - 500)
        text = _hide(rng, excerpt, [fact.statement for fact in facts])
        yield from say(pick(rng, _GIVE).format(text), pick(rng, _READ))
        stated += facts
        order = rng.permutation(len(stated))[: 2 + int(rng.integers(3))]
        for number in order:
            yield from say(stated[int(number)].question, stated[int(number)].answer)
    for number in rng.permutation(len(stated))[:8]:
        yield from say(stated[int(number)].question, stated[int(number)].answer)


def _hide(rng: np.random.Generator, text: str, statements: list[str]) -> str:
    """Insert statements between the sentences of a text, or between its lines if it has few sentences."""
    parts = text.split(". ")
    joint = ". "
    if len(parts) < 2 * len(statements):
        parts, joint = text.split("\n"), "\n"
    indices = np.sort(rng.choice(np.arange(1, len(parts) + 1), len(statements), replace=len(parts) < len(statements)))
    for index, statement in zip(indices[::-1], reversed(statements), strict=True):
        parts.insert(int(index), statement.removesuffix(".") if joint == ". " else statement)
    return joint.join(parts)


@functools.cache
def _source_functions(source: str) -> tuple[str, ...]:
    """List the functions of 150 to 900 characters in a module's source, in the order of `ast.walk`."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    functions = (ast.get_source_segment(source, node) or "" for node in nodes)
    return tuple(function for function in functions if 150 < len(function) < 900)


def _write_repeat(rng: np.random.Generator) -> Iterator[Message]:
    """Write a text, then passages of it word for word."""
    text = _excerpt(rng, _prose() if rng.integers(2) else _documentation(), LENGTH * 2 // 3)
    yield from say(pick(rng, _GIVE).format(text), pick(rng, _READ))
    passages = [paragraph for paragraph in text.split("\n\n") if len(paragraph) > 120]
    for number in rng.permutation(len(passages))[:4]:
        passage = passages[int(number)][:700]
        start = " ".join(passage.split()[:5])
        yield from say(f'Repeat the passage that begins with "{start}".', passage)


def _write_functions(rng: np.random.Generator) -> Iterator[Message]:
    """Write functions of a module of Python's library, then a few of them again."""
    functions = _source_functions(pick(rng, _sources()))
    shown: list[str] = []
    for number in rng.permutation(len(functions)):
        if sum(map(len, shown)) < LENGTH * 3 // 5:
            shown.append(functions[int(number)])
    yield from say("This is my module:\n\n" + "\n\n".join(shown), "I have read the module.")
    for number in rng.permutation(len(shown))[:4]:
        function = shown[int(number)]
        yield from say(f"Show me `{function.split('(')[0].removeprefix('def ')}` again.", function)


WRITERS: tuple[tuple[str, Callable[[np.random.Generator], str | Iterator[Message]]], ...] = (
    ("facts", _write_facts),
    ("text", _write_text),
    ("facts", _write_facts),
    ("repeat", _write_repeat),
    ("facts", _write_facts),
    ("functions", _write_functions),
    ("facts", _write_facts),
    ("recall", recall),
    ("text", _write_text),
    ("facts", _write_facts),
    ("records", records),
    ("code", code),
)
"""Tasks in the order in which samples alternate; half of them hide facts of all kinds in real text."""
