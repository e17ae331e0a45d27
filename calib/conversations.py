"""Built-in sample conversations: synthetic English chats of three tasks that make a model look far back.

They are composed from word lists by a seed, so that calibration needs no download and gives the same twice. Samples
of the real workload are better; `--data` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Message = dict[str, str]

_NAMES = [
    "Ada",
    "Bruno",
    "Chen",
    "Dora",
    "Emil",
    "Farah",
    "Goran",
    "Hana",
    "Igor",
    "Jana",
    "Kofi",
    "Lena",
    "Milo",
    "Nora",
    "Omar",
    "Petra",
    "Quinn",
    "Rosa",
    "Sven",
    "Tara",
]
_THINGS = [
    "bicycle",
    "garden",
    "kitchen",
    "laptop",
    "piano",
    "camera",
    "kayak",
    "bookshelf",
    "lantern",
    "printer",
    "tent",
    "violin",
]
_PLACES = [
    "Lisbon",
    "Oslo",
    "Kyoto",
    "Nairobi",
    "Quito",
    "Prague",
    "Hobart",
    "Tunis",
    "Riga",
    "Lima",
    "Cork",
    "Utrecht",
]
_COLOURS = ["amber", "blue", "crimson", "green", "indigo", "ivory", "olive", "silver", "teal", "violet"]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_VERBS = ["bought", "sold", "repaired", "painted", "lent", "borrowed", "cleaned", "packed"]
_CHAT = (
    "The weather has been odd, with fog in the morning and bright sun by noon.",
    "I spent the evening reading about old lighthouses and how their lamps were kept turning.",
    "Our neighbour is rebuilding the wall, stone by stone, and it takes longer than anyone thought.",
    "On the train I overheard two students argue about whether maps can ever be honest.",
    "The bakery on the corner has changed hands, yet the bread tastes just the same.",
    "Somebody left a chessboard in the park and strangers keep finishing each other's games.",
    "I keep meaning to sort the photographs, but there are more of them every year.",
    "There was a long talk at work about which meetings could simply be dropped.",
)
_FUNCTIONS = ["parse", "merge", "rotate", "filter", "encode", "count", "split", "normalise", "lookup", "schedule"]


def built_in_conversations(count: int, seed: int) -> Iterator[tuple[str, tuple[Message, ...]]]:
    """`count` pairs of task ('recall', 'records' or 'code', in turns) and messages, about 2,000 tokens each."""
    writers = (("recall", _recall), ("records", _records), ("code", _code))
    for number in range(count):
        task, write = writers[number % len(writers)]
        yield task, tuple(write(np.random.default_rng([seed, number])))


def _say(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _pick(rng: np.random.Generator, words: tuple[str, ...] | list[str]) -> str:
    return words[int(rng.integers(len(words)))]


def _small_talk(rng: np.random.Generator, sentences: int) -> str:
    return " ".join(_pick(rng, _CHAT) for _ in range(sentences))


def _recall(rng: np.random.Generator) -> Iterator[Message]:
    """Personal facts in early turns among small talk; later turns ask for them."""
    facts = []
    for name in rng.permutation(_NAMES)[:14]:
        thing, place, colour, day = (_pick(rng, words) for words in (_THINGS, _PLACES, _COLOURS, _DAYS))
        facts.append((str(name), thing, place, colour, day))
        stated = f"{name} {_pick(rng, _VERBS)} a {colour} {thing} in {place} on {day}."
        talk = f"{_small_talk(rng, 3)} {stated} {_small_talk(rng, 3)}"
        yield from _say(talk, f"Noted: {name}, a {colour} {thing}, {place}, {day}.")
    for name, thing, place, colour, day in (facts[i] for i in rng.permutation(len(facts))):
        yield from _say(f"What did I say about {name}?", f"{name}: a {colour} {thing} in {place}, on {day}.")


def _records(rng: np.random.Generator) -> Iterator[Message]:
    """A long table of records, then look-ups and a summary of parts of it."""
    codes = rng.permutation(9000)[:90] + 1000
    rows = [(f"item-{c}", _pick(rng, _COLOURS), _pick(rng, _PLACES), int(rng.integers(10, 990))) for c in codes]
    lines = [f"{code}: colour {colour}, store {place}, stock {stock}" for code, colour, place, stock in rows]
    yield from _say("Here is the inventory.\n" + "\n".join(lines), "I have read all ninety records.")
    for index in rng.permutation(len(rows))[:24]:
        code, colour, place, stock = rows[int(index)]
        yield from _say(f"Where is {code} and how many are left?", f"{code} is in {place}, {colour}; {stock} left.")
    place = _pick(rng, _PLACES)
    there = [code for code, _, where, _ in rows if where == place]
    yield from _say(f"List everything that is stored in {place}.", ", ".join(there) or "Nothing is stored there.")


def _code(rng: np.random.Generator) -> Iterator[Message]:
    """Small functions in a file, then requests to show some of them again word for word."""
    functions = []
    for number, name in enumerate(rng.permutation(_FUNCTIONS)):
        for variant in range(2):
            a, b = (int(x) for x in rng.integers(2, 99, 2))
            title = f"{name}_{_pick(rng, _THINGS)}_{number}{variant}"
            functions.append(
                (
                    title,
                    f"def {title}(values, limit={a}):\n    result = []\n    for index, value in enumerate(values):\n"
                    f"        if value % {b} < limit:\n            result.append(value * {a} + index)\n"
                    f"    return result[:{b}]",
                )
            )
    listing = "\n\n".join(body for _, body in functions)
    yield from _say(f"This is my module:\n\n{listing}", "I have read the module.")
    for index in rng.permutation(len(functions))[:10]:
        title, body = functions[int(index)]
        yield from _say(f"Show me {title} again.", body)
