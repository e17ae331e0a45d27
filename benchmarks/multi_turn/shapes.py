"""The shapes of conversations: the requests, their messages, and which answer each of them waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.errors import SettingsError
from benchmarks.multi_turn.writers import Story, Text, Writer

TEMPLATE_TOKENS = 8
"""Tokens that a chat template may put around a message: an upper estimate, for the check of the context length."""

FACTS_PER_MESSAGE = 4
TOKENS_PER_DOCUMENT_FACT = 24

_CHAT_SPREAD = 0.6
"""Sigma of the log-normal length of a chat turn; turns are between a quarter and three times the mean."""


@dataclass(frozen=True)
class Load:
    """What a workload is made from. Lengths in tokens."""

    shape: str
    clients: int
    rounds: int
    request_length: int
    output_length: int
    shared_length: int
    group: int
    seed: int


@dataclass(frozen=True)
class Request:
    """One request of a workload.

    Attributes:
        number: its index in the workload.
        after: the request whose answer must be there before this one is sent, None for none.
        context: the request whose messages and answer stand before `messages`, None for none.
        messages: (role, content) of the new messages.
        answer: the right first word of the answer, None where there is none.
        length: upper estimate of the prompt, in tokens.
        shared: name of the text that `messages` begins with and that other requests begin with, too; None for none.
        shared_tokens: its length.
    """

    number: int
    client: int
    round: int
    after: int | None
    context: int | None
    messages: tuple[tuple[str, str], ...]
    answer: str | None
    length: int
    shared: str | None = None
    shared_tokens: int = 0


class _Plan:
    """The requests made so far."""

    def __init__(self, load: Load, writer: Writer) -> None:
        self.load, self.writer = load, writer
        self.requests: list[Request] = []

    def rng(self, *path: int) -> np.random.Generator:
        """A random generator for one message, which does not depend on the number of other messages."""
        # One up, since NumPy takes (1, 2) and (1, 2, 0) for the same seed.
        return np.random.default_rng([self.load.seed, *(number + 1 for number in path)])

    def text(self, rng: np.random.Generator, story: Story, tokens: int) -> Text:
        return self.writer.message(rng, story, tokens, facts=FACTS_PER_MESSAGE, ask=True)

    def add(
        self,
        client: int,
        round_: int,
        after: Request | None,
        context: Request | None,
        messages: tuple[tuple[str, str], ...],
        answer: str | None,
        new_tokens: int,
        shared: str | None = None,
        shared_tokens: int = 0,
    ) -> Request:
        length = new_tokens + TEMPLATE_TOKENS * (len(messages) + 1)
        if context is not None:
            length += context.length + self.load.output_length
        number = len(self.requests)
        after_number = after.number if after else None
        context_number = context.number if context else None
        request = Request(
            number, client, round_, after_number, context_number, messages, answer, length, shared, shared_tokens
        )
        self.requests.append(request)
        return request


def _chat(plan: _Plan) -> None:
    """Every client holds a conversation of its own; turns are short and of uneven length, as in ShareGPT."""
    mean = plan.load.request_length
    for client in range(plan.load.clients):
        story, last = plan.writer.begin(plan.rng(client)), None
        for round_ in range(plan.load.rounds):
            rng = plan.rng(client, round_)
            # Shifted so that the mean of the unclipped lengths is `mean`.
            drawn = mean * rng.lognormal(-(_CHAT_SPREAD**2) / 2, _CHAT_SPREAD)
            tokens = int(np.clip(drawn, max(1, mean // 4), 3 * mean))
            text = plan.text(rng, story, tokens)
            story = text.story
            last = plan.add(client, round_, last, last, (("user", text.content),), text.answer, tokens)


def _documents(plan: _Plan) -> None:
    """Groups of clients ask one question after the other about a long document, each question on its own."""
    load = plan.load
    facts = load.shared_length // TOKENS_PER_DOCUMENT_FACT
    for client in range(load.clients):
        number = client // load.group
        rng = plan.rng(0, number)
        document = plan.writer.message(rng, plan.writer.begin(rng), load.shared_length, facts=facts, ask=False)
        story, last = document.story, None
        for round_ in range(load.rounds):
            rng = plan.rng(1, client, round_)
            question = plan.writer.message(rng, story, load.request_length, facts=0, ask=True)
            story = question.story
            messages = (("user", f"{document.content} {question.content}"),)
            tokens = load.shared_length + load.request_length
            name = f"document {number}"
            last = plan.add(client, round_, last, None, messages, question.answer, tokens, name, load.shared_length)


def _agents(plan: _Plan) -> None:
    """All clients begin with one long system prompt; what each has seen and done since grows with every step."""
    load = plan.load
    rng = plan.rng(0)
    system = plan.writer.message(rng, plan.writer.begin(rng), load.shared_length, facts=0, ask=False)
    for client in range(load.clients):
        story, last = plan.writer.begin(plan.rng(1, client)), None
        for round_ in range(load.rounds):
            step = plan.text(plan.rng(1, client, round_), story, load.request_length)
            story = step.story
            user = (("user", step.content),)
            if last is None:
                messages = (("system", system.content), *user)
                tokens = load.shared_length + load.request_length
                last = plan.add(client, round_, None, None, messages, step.answer, tokens, "system", load.shared_length)
            else:
                last = plan.add(client, round_, last, last, user, step.answer, load.request_length)


def _fork(plan: _Plan) -> None:
    """Groups of clients begin as one conversation that branches in two again and again, until each has its own."""
    load = plan.load
    levels = load.group.bit_length() - 1
    if load.group != 1 << levels or load.clients % load.group or load.rounds <= levels:
        raise SettingsError(
            f"--shape fork needs a --group that is a power of two, divides --clients and leaves a round between "
            f"forks: {load.clients} clients, groups of {load.group}, {load.rounds} rounds do not"
        )
    for tree in range(load.clients // load.group):
        branches: list[tuple[Story, Request | None]] = [(plan.writer.begin(plan.rng(tree)), None)]
        for round_ in range(load.rounds):
            width = 1 << (round_ * (levels + 1) // load.rounds)
            branches = [branches[i * len(branches) // width] for i in range(width)]
            grown: list[tuple[Story, Request | None]] = []
            for i, (story, last) in enumerate(branches):
                text = plan.text(plan.rng(tree, round_, i), story, load.request_length)
                client = tree * load.group + i * load.group // width
                user = (("user", text.content),)
                grown.append((text.story, plan.add(client, round_, last, last, user, text.answer, load.request_length)))
            branches = grown


def _reason(plan: _Plan) -> None:
    """Every client asks one thing after the other, each on its own; what grows is the answer, as in reasoning."""
    for client in range(plan.load.clients):
        last = None
        for round_ in range(plan.load.rounds):
            rng = plan.rng(client, round_)
            text = plan.text(rng, plan.writer.begin(rng), plan.load.request_length)
            user = (("user", text.content),)
            last = plan.add(client, round_, last, None, user, text.answer, plan.load.request_length)


SHAPES: dict[str, Callable[[_Plan], None]] = {
    "chat": _chat,
    "documents": _documents,
    "agents": _agents,
    "fork": _fork,
    "reason": _reason,
}


def workload(load: Load, writer: Writer) -> tuple[Request, ...]:
    """All requests of a load, each after those it waits for. The same load and writer give the same requests.

    Raises:
        SettingsError: the shape cannot be made of these numbers.
    """
    plan = _Plan(load, writer)
    SHAPES[load.shape](plan)
    return tuple(plan.requests)


def longest(requests: tuple[Request, ...], output_length: int) -> int:
    """Tokens of the longest prompt with its answer, an upper estimate."""
    return max(request.length for request in requests) + output_length


def working_set(requests: tuple[Request, ...], output_length: int) -> int:
    """Tokens that a cache would hold if it kept everything once, an upper estimate."""
    lengths = {request.number: request.length for request in requests}
    seen: set[str] = set()
    total = 0
    for request in requests:
        total += request.length + output_length
        if request.context is not None:
            total -= lengths[request.context] + output_length
        elif request.shared is not None and request.shared in seen:
            total -= request.shared_tokens
        seen |= {request.shared} if request.shared else set()
    return total
