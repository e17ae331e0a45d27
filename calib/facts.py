"""Synthetic facts of many kinds and questions about them, which the built-in samples hide in real text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NAMES = (
    *("Ada", "Bruno", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Igor", "Jana", "Kofi", "Lena", "Milo"),
    *("Nora", "Omar", "Petra", "Quinn", "Rosa", "Sven", "Tara", "Ulla", "Viktor", "Wanda", "Yusuf", "Zelda"),
)
SURNAMES = (
    *("Abara", "Brandt", "Castell", "Duarte", "Eriksen", "Fontaine", "Grewal", "Hoffman", "Ivanova", "Jansen"),
    *("Kimura", "Lindqvist", "Moreau", "Novak", "Okafor", "Pereira", "Rossi", "Sharma", "Tanaka", "Vargas"),
)
PLACES = (
    *("Lisbon", "Oslo", "Kyoto", "Nairobi", "Quito", "Prague", "Hobart", "Tunis", "Riga", "Lima", "Cork", "Utrecht"),
    *("Bergen", "Malaga", "Tbilisi", "Osaka", "Halifax", "Dakar", "Graz", "Leeds", "Perth", "Bilbao", "Davao", "Turin"),
)
THINGS = (
    *("bicycle", "garden", "kitchen", "laptop", "piano", "camera", "kayak", "bookshelf", "lantern", "printer", "tent"),
    *("violin", "telescope", "ladder", "carpet", "generator", "microscope", "sledge", "compass", "barrel", "anvil"),
)
WORDS = (
    *("thimble", "orchard", "granite", "whistle", "saffron", "puzzle", "harvest", "velvet", "lobster", "canyon"),
    *("pepper", "glacier", "button", "falcon", "marzipan", "tulip", "hammer", "cinder", "walnut", "feather"),
    *("island", "copper", "dragonfly", "parsnip", "meadow", "ribbon", "anchor", "cobweb", "quartz", "magnet"),
    *("basket", "comet", "turnip", "violet", "badger", "pebble", "cactus", "teapot", "rooster", "mustard"),
)
COLOURS = (
    "amber",
    "blue",
    "crimson",
    "green",
    "indigo",
    "ivory",
    "olive",
    "silver",
    "teal",
    "violet",
    "scarlet",
    "grey",
)
MONTHS = ("January", "March", "April", "June", "July", "August", "September", "October", "November", "December")
ANIMALS = ("heron", "otter", "beetle", "gecko", "raven", "moth", "newt", "stork")
ROOMS = (
    "cellar",
    "attic",
    "workshop",
    "library",
    "boathouse",
    "archive",
    "greenhouse",
    "laboratory",
    "pantry",
    "tower",
)


@dataclass(frozen=True)
class Fact:
    """A sentence that states a fact, a question about it, and the answer."""

    statement: str
    question: str
    answer: str


def pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Draw one of the words."""
    return words[int(rng.integers(len(words)))]


def _digits(rng: np.random.Generator, count: int) -> str:
    return "".join(str(int(d)) for d in rng.integers(0, 10, count))


def _person(rng: np.random.Generator) -> str:
    return f"{pick(rng, NAMES)} {pick(rng, SURNAMES)}"


def _code(rng: np.random.Generator) -> Fact:
    room, value = pick(rng, ROOMS), _digits(rng, int(rng.integers(3, 7)))
    town = pick(rng, PLACES)
    return Fact(
        f"Whoever wants to open the {room} in {town} has to enter {value}.",
        f"What does one have to enter at the {room} in {town}?",
        f"{value}.",
    )


def _number(rng: np.random.Generator) -> Fact:
    thing, value = pick(rng, THINGS), int(rng.integers(11, 9999))
    owner = _person(rng)
    return Fact(
        f"The {thing} of {owner} carries the serial number {value}.",
        f"Which serial number is on the {thing} of {owner}?",
        f"The serial number is {value}.",
    )


def _count(rng: np.random.Generator) -> Fact:
    animal, place, value = pick(rng, ANIMALS), pick(rng, PLACES), int(rng.integers(12, 980))
    return Fact(
        f"Near {place}, they counted {value} {animal}s that year.",
        f"How many {animal}s did they count near {place}?",
        f"{value} {animal}s.",
    )


def _price(rng: np.random.Generator) -> Fact:
    thing, colour = pick(rng, THINGS), pick(rng, COLOURS)
    value = f"{int(rng.integers(3, 900))}.{_digits(rng, 2)}"
    return Fact(
        f"Buyers of a {colour} {thing} pay {value} euros.",
        f"What do buyers of a {colour} {thing} pay?",
        f"{value} euros.",
    )


def _date(rng: np.random.Generator) -> Fact:
    who, value = _person(rng), f"{int(rng.integers(1, 29))} {pick(rng, MONTHS)} {int(rng.integers(1850, 2020))}"
    return Fact(f"{who} was born on {value}.", f"When was {who} born?", f"{who} was born on {value}.")


def _time(rng: np.random.Generator) -> Fact:
    place, value = pick(rng, PLACES), f"{int(rng.integers(1, 13))}:{int(rng.integers(10, 60))}"
    return Fact(
        f"The ferry to {place} leaves at {value}.", f"At what time does the ferry to {place} leave?", f"At {value}."
    )


def _serial(rng: np.random.Generator) -> Fact:
    letters = "".join("ABCDEFGHKLMNPRSTVXZ"[int(i)] for i in rng.integers(0, 19, 3))
    value, thing = f"{letters}-{_digits(rng, 3)}", pick(rng, THINGS)
    place = pick(rng, PLACES)
    return Fact(
        f"The parcel with the {thing} for {place} has the label {value}.",
        f"What is written on the parcel with the {thing} for {place}?",
        f"The label {value}.",
    )


def _word(rng: np.random.Generator) -> Fact:
    who, value = _person(rng), pick(rng, WORDS)
    return Fact(
        f'To be let in, say "{value}" to {who} at the door.',
        f"What must one say to {who} at the door?",
        f'One must say "{value}".',
    )


def _nickname(rng: np.random.Generator) -> Fact:
    who, value = _person(rng), f"{pick(rng, COLOURS).capitalize()} {pick(rng, WORDS).capitalize()}"
    return Fact(f"Everybody knows {who} as {value}.", f"By which name is {who} known?", f"{who} is known as {value}.")


def _favourite(rng: np.random.Generator) -> Fact:
    name, kind = pick(rng, NAMES), (("animal", ANIMALS), ("colour", COLOURS), ("city", PLACES))[int(rng.integers(3))]
    value, surname = pick(rng, kind[1]), pick(rng, SURNAMES)
    return Fact(
        f"Of all {kind[0]}s, {name} {surname} likes {value} best.",
        f"Which {kind[0]} does {name} {surname} like best?",
        f"{value.capitalize()}.",
    )


def _home(rng: np.random.Generator) -> Fact:
    who, place = _person(rng), pick(rng, PLACES)
    return Fact(f"{who} has moved to {place} for good.", f"Where does {who} live now?", f"{who} lives in {place}.")


def _keeper(rng: np.random.Generator) -> Fact:
    thing, room, who = pick(rng, THINGS), pick(rng, ROOMS), _person(rng)
    return Fact(
        f"The {thing} from the {room} was lent to {who}.", f"Who has the {thing} from the {room}?", f"{who} has it."
    )


def _mail(rng: np.random.Generator) -> Fact:
    name, surname = pick(rng, NAMES), pick(rng, SURNAMES)
    value = f"{name.lower()}{int(rng.integers(10, 99))}@{pick(rng, WORDS)}.org"
    return Fact(f"Letters reach {name} {surname} at {value}.", f"What is the address of {name} {surname}?", f"{value}")


def _setting(rng: np.random.Generator) -> Fact:
    key = f"{pick(rng, WORDS)}_{pick(rng, ANIMALS)}"
    value = int(rng.integers(2, 5000)) if rng.integers(2) else pick(rng, WORDS)
    return Fact(f"In the configuration, {key} = {value}.", f"What is {key} set to?", f"{key} = {value}")


KINDS: tuple[Callable[[np.random.Generator], Fact], ...] = (
    *(_code, _word, _number, _nickname, _count, _favourite, _price, _home, _date, _keeper, _time, _mail, _serial),
    _setting,
)
"""Kinds of facts, with numbers and words as answers in alternation."""


def draw_facts(rng: np.random.Generator, count: int) -> list[Fact]:
    """Draw `count` facts of different kinds, in random order, with different questions."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        for number in rng.permutation(len(KINDS)):
            fact = KINDS[int(number)](rng)
            if len(facts) < count:
                facts.setdefault(fact.question, fact)
    return list(facts.values())
