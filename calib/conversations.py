"""Built-in sample conversations: synthetic English chats for three tasks that make a model look far back.

Chats are composed from word lists with a seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from calib.facts import COLOURS, NAMES, PLACES, THINGS, pick

Message = dict[str, str]

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


def say(user: str, assistant: str) -> list[Message]:
    """Make the messages of a question and its answer."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _small_talk(rng: np.random.Generator, sentences: int) -> str:
    return " ".join(pick(rng, _CHAT) for _ in range(sentences))


def recall(rng: np.random.Generator) -> Iterator[Message]:
    """Write personal facts and small talk in early turns; later turns ask for the facts."""
    facts = []
    for name in rng.permutation(NAMES)[:14]:
        thing, place, colour, day = (pick(rng, words) for words in (THINGS, PLACES, COLOURS, _DAYS))
        facts.append((str(name), thing, place, colour, day))
        stated = f"{name} {pick(rng, _VERBS)} a {colour} {thing} in {place} on {day}."
        talk = f"{_small_talk(rng, 3)} {stated} {_small_talk(rng, 3)}"
        yield from say(talk, f"Noted: {name}, a {colour} {thing}, {place}, {day}.")
    for name, thing, place, colour, day in (facts[i] for i in rng.permutation(len(facts))):
        yield from say(f"What did I say about {name}?", f"{name}: a {colour} {thing} in {place}, on {day}.")


def records(rng: np.random.Generator) -> Iterator[Message]:
    """Write a long table of records, then look-ups and a summary of a part of it."""
    codes = rng.permutation(9000)[:90] + 1000
    rows = [(f"item-{c}", pick(rng, COLOURS), pick(rng, PLACES), int(rng.integers(10, 990))) for c in codes]
    lines = [f"{item}: colour {colour}, store {place}, stock {stock}" for item, colour, place, stock in rows]
    yield from say("Here is the inventory.\n" + "\n".join(lines), "I have read all ninety records.")
    for index in rng.permutation(len(rows))[:24]:
        item, colour, place, stock = rows[int(index)]
        yield from say(f"Where is {item} and how many are left?", f"{item} is in {place}, {colour}; {stock} left.")
    place = pick(rng, PLACES)
    there = [item for item, _, where, _ in rows if where == place]
    yield from say(f"List everything that is stored in {place}.", ", ".join(there) or "Nothing is stored there.")


def code(rng: np.random.Generator) -> Iterator[Message]:
    """Write small functions in a file, then requests to show a few of them again word for word."""
    functions = []
    for number, name in enumerate(rng.permutation(_FUNCTIONS)):
        for variant in range(2):
            a, b = (int(x) for x in rng.integers(2, 99, 2))
            title = f"{name}_{pick(rng, THINGS)}_{number}{variant}"
            functions.append(
                (
                    title,
                    f"def {title}(values, limit={a}):\n    result = []\n    for index, value in enumerate(values):\n"
                    f"        if value % {b} < limit:\n            result.append(value * {a} + index)\n"
                    f"    return result[:{b}]",
                )
            )
    listing = "\n\n".join(body for _, body in functions)
    yield from say(f"This is my module:\n\n{listing}", "I have read the module.")
    for index in rng.permutation(len(functions))[:10]:
        title, body = functions[int(index)]
        yield from say(f"Show me {title} again.", body)
