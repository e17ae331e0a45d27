"""The recall task: facts scattered in filler, asked for again in later turns of a conversation.

A conversation is a list of turns. A turn's user text is filler sentences and facts, then exactly one question
``recall KEY``; the answer is the one word that the fact gave. Every key occurs in one fact and in at most one question,
so the only place to find the answer is the fact itself. Rendered with one token per word:

    <bos> <user> w3 w17 . k5 v9 . recall k5 <assistant> v9 <eos> <user> ... recall k7 <assistant> v1 <eos>

Needs numpy alone, so that a client of a running server can use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["marked", "unmarked", "decoy"]
Style = Literal["needle", "chat"]

KINDS: tuple[Kind, ...] = ("marked", "unmarked", "decoy")
STYLES: tuple[Style, ...] = ("needle", "chat")

PAD, UNK, BOS, EOS, USER, ASSISTANT = "<pad>", "<unk>", "<bos>", "<eos>", "<user>", "<assistant>"
SPECIALS = (PAD, UNK, BOS, EOS, USER, ASSISTANT)
KEYS = tuple(f"k{i}" for i in range(128))
VALUES = tuple(f"v{i}" for i in range(64))
FILLER = tuple(f"w{i}" for i in range(182))
STOP, QUESTION = ".", "recall"
MARK: dict[Kind, tuple[str, ...]] = {"marked": ("remember",), "unmarked": (), "decoy": ("maybe",)}

VOCABULARY = (*SPECIALS, STOP, QUESTION, "remember", "maybe", *KEYS, *VALUES, *FILLER)
TOKEN_ID = {word: i for i, word in enumerate(VOCABULARY)}

TURN_OVERHEAD = 6  # tokens of a turn beside its facts and filler: <user> recall KEY <assistant> VALUE <eos>

_TOPICS = 4
_GRAMMAR_SEED = 20_25
_SENTENCE_WORDS = (4, 11)  # words of a sentence beside its full stop, both ends included
# Successor slots repeat a successor to give it weight: 1/2, 1/4, 1/8, 1/8.
_SUCCESSOR_SLOTS = (0, 0, 0, 0, 1, 1, 2, 3)


@dataclass(frozen=True)
class Fact:
    """One stated fact. ``turn`` is the index of the turn whose user text states it."""

    key: str
    value: str
    kind: Kind
    turn: int

    @property
    def words(self) -> tuple[str, ...]:
        """The fact as it stands in the text, full stop included."""
        return (*MARK[self.kind], self.key, self.value, STOP)


@dataclass(frozen=True)
class Turn:
    """One user message, words joined by single spaces, that ends with a question about ``asked``."""

    user: str
    asked: Fact

    @property
    def answer(self) -> str:
        """The one word that is the right answer."""
        return self.asked.value


@dataclass(frozen=True)
class Conversation:
    """Turns in order, and every fact that they state, in order of its turn, whether or not a turn asks for it."""

    turns: tuple[Turn, ...]
    facts: tuple[Fact, ...]


def conversation(seed: int, turns: int, tokens_per_turn: int, facts_per_turn: int = 4) -> Conversation:
    """A conversation whose every turn has ``tokens_per_turn`` tokens (answer and markers included; <bos> comes on top).

    Each turn states ``facts_per_turn`` facts, their kinds drawn at random, and asks for one fact not asked before: one
    of an earlier turn where any is left, so turn 0 alone asks for a fact of its own text if facts_per_turn > 1.
    """
    rng = np.random.default_rng(seed)
    facts = _draw_facts(rng, [turn for turn in range(turns) for _ in range(facts_per_turn)])
    filler = [tokens_per_turn - TURN_OVERHEAD] * turns
    for fact in facts:
        filler[fact.turn] -= len(fact.words)
    if min(filler) < 0:
        raise ValueError(f"{facts_per_turn} facts and a question do not fit into turns of {tokens_per_turn} tokens")
    return _compose(rng, facts, filler)


def document_conversation(rng: np.random.Generator, length: int, style: Style) -> Conversation:
    """A conversation that renders to exactly ``length`` tokens; denser in facts and questions than a real one.

    'needle' states all facts in turn 0 and then only asks; 'chat' spreads facts and filler over the turns.
    """
    if length < 48:
        raise ValueError(f"a document needs at least 48 tokens, not {length}")
    num_facts = min(int(rng.integers(max(2, length // 32), length // 16 + 1)), len(KEYS))
    num_turns = int(rng.integers(max(1, num_facts // 3), max(1, 2 * num_facts // 3) + 1))
    if style == "needle":
        fact_turns = [0] * num_facts
    else:
        # Fact i comes no later than turn i, so every turn has a fact left to ask for.
        drawn = np.sort(rng.integers(0, num_turns, num_facts))
        fact_turns = [min(i, int(turn)) for i, turn in enumerate(drawn)]
    facts = _draw_facts(rng, fact_turns)
    rest = length - 1 - TURN_OVERHEAD * num_turns - sum(len(fact.words) for fact in facts)
    if style == "needle":
        filler = [rest] + [0] * (num_turns - 1)
    else:
        filler = rng.multinomial(rest, rng.dirichlet(np.ones(num_turns))).tolist()
    return _compose(rng, facts, filler)


def render(talk: Conversation) -> np.ndarray:
    """Return token ids, int64 [tokens]."""
    words = [BOS]
    for turn in talk.turns:
        words += [USER, *turn.user.split(" "), ASSISTANT, turn.answer, EOS]
    return np.array([TOKEN_ID[word] for word in words])


def document(rng: np.random.Generator, length: int, style: Style) -> np.ndarray:
    """Return a document of the language, int64 [length]."""
    return render(document_conversation(rng, length, style))


def _successors() -> np.ndarray:
    """Filler grammar [topic, word, slot] int64: the filler word that follows, by a uniformly drawn slot."""
    rng = np.random.default_rng(_GRAMMAR_SEED)
    choices = len(set(_SUCCESSOR_SLOTS))
    table = rng.permuted(np.tile(np.arange(len(FILLER)), (_TOPICS, len(FILLER), 1)), axis=-1)[..., :choices]
    return table[..., list(_SUCCESSOR_SLOTS)]


_SUCCESSORS: list[list[list[int]]] = _successors().tolist()


def filler_sentences(rng: np.random.Generator, num_tokens: int) -> list[tuple[str, ...]]:
    """Sentences of one topic with ``num_tokens`` tokens in all, full stops included; the last may be cut short."""
    grammar = _SUCCESSORS[int(rng.integers(_TOPICS))]
    slots = rng.integers(len(_SUCCESSOR_SLOTS), size=num_tokens).tolist()
    sentences = []
    while len(slots) > 0:
        length = min(int(rng.integers(_SENTENCE_WORDS[0], _SENTENCE_WORDS[1] + 1)), len(slots) - 1)
        word = int(rng.integers(len(FILLER)))
        words = []
        for slot in slots[:length]:
            words.append(FILLER[word])
            word = grammar[word][slot]
        sentences.append((*words, STOP))
        slots = slots[length + 1 :]
    return sentences


def _draw_facts(rng: np.random.Generator, turns: Sequence[int]) -> list[Fact]:
    """One fact for each entry of ``turns``, with distinct keys and a random value and kind."""
    if len(turns) > len(KEYS):
        raise ValueError(f"{len(turns)} facts need as many keys, but there are only {len(KEYS)}")
    keys = rng.permutation(len(KEYS))
    values = rng.integers(len(VALUES), size=len(turns))
    kinds = rng.integers(len(KINDS), size=len(turns))
    return [Fact(KEYS[k], VALUES[v], KINDS[c], t) for k, v, c, t in zip(keys, values, kinds, turns, strict=False)]


def _compose(rng: np.random.Generator, facts: Sequence[Fact], filler: Sequence[int]) -> Conversation:
    """Turn t states its facts among ``filler[t]`` tokens of filler, then asks for a fact not asked before."""
    turns: list[Turn] = []
    unasked: list[Fact] = []
    for index, num_tokens in enumerate(filler):
        stated = [fact for fact in facts if fact.turn == index]
        pieces = [*(fact.words for fact in stated), *filler_sentences(rng, num_tokens)]
        text = [word for i in rng.permutation(len(pieces)) for word in pieces[i]]
        candidates = unasked or stated
        if not candidates:
            raise ValueError(f"turn {index} has no fact left to ask for")
        asked = candidates[int(rng.integers(len(candidates)))]
        unasked = [fact for fact in (*unasked, *stated) if fact is not asked]
        turns.append(Turn(" ".join((*text, QUESTION, asked.key)), asked))
    return Conversation(tuple(turns), tuple(facts))
