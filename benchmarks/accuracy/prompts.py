"""From a session to the token ids that a server gets: raw text or a chat, turn by turn or question by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.accuracy.session import Question, Session, SuiteError

Mode = Literal["turns", "requests"]
MODES: tuple[Mode, ...] = ("turns", "requests")


@dataclass(frozen=True)
class PromptFormat:
    """How prompts are made.

    `mode`: "turns", where a prompt holds all questions and answers before it, or "requests", where every question
    follows the context alone. `own`: those answers are the server's, else the references. `chat`: messages in the
    model's chat template, else plain text.
    """

    mode: Mode
    own: bool = False
    chat: bool = False


@dataclass(frozen=True)
class Completion:
    """A server's answer: its tokens as they came, an end-of-sequence token included, and its text."""

    tokens: tuple[int, ...]
    text: str


class TokenizedSession(Protocol):
    """A session as token ids. `was_cut`: the middle of its context is missing."""

    @property
    def session(self) -> Session: ...

    @property
    def was_cut(self) -> bool: ...

    def primer(self) -> list[int]:
        """What is sent before the first question, so that all find the context in the cache; may be empty."""
        ...

    def prompt(self, turn: int, said: Sequence[Completion]) -> list[int]:
        """Of question `turn`, counted from 0; `said` holds the server's answers to those before it."""
        ...

    def longest(self) -> int:
        """Tokens of the longest prompt; with the server's own answers, of the longest possible."""
        ...

    def fitted(self, limit: int) -> TokenizedSession:
        """The same with no prompt longer than `limit` tokens. Raises SuiteError where that cannot be."""
        ...


def load_tokenizer(model: str) -> Any:
    """Of a model's folder. Raises SuiteError."""
    from transformers import AutoTokenizer

    if not Path(model).is_dir():
        raise SuiteError(f"--model {model} is no folder: download the model, and give its path")
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise SuiteError(f"cannot load the tokenizer of --model {model}: {str(error).splitlines()[0]}") from None


def make_talk(session: Session, tokenizer: Any, form: PromptFormat) -> TokenizedSession:
    """Raises SuiteError for chats where the tokenizer has no template for them."""
    if not session.questions:
        raise SuiteError(f"session {session.name} has no question")
    if form.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise SuiteError("--chat: this model's tokenizer has no chat template; leave out --chat")
        return ChatTalk(session, tokenizer, form)
    return RawTalk(
        session,
        form,
        context=[*_beginning(tokenizer), *_ids(tokenizer, session.context)],
        questions=[_ids(tokenizer, question.text) for question in session.questions],
        answers=[_ids(tokenizer, question.answer) for question in session.questions],
    )


@dataclass(frozen=True)
class RawTalk:
    """Context, questions and answers, tokenized one by one and laid end to end.

    So every prompt of "turns" begins with the whole one before it, whatever a tokenizer makes of the seams.
    """

    session: Session
    form: PromptFormat
    context: list[int]
    questions: list[list[int]]
    answers: list[list[int]]
    was_cut: bool = False

    def primer(self) -> list[int]:
        return self.context if self.form.mode == "requests" else []

    def prompt(self, turn: int, said: Sequence[Completion]) -> list[int]:
        if self.form.mode == "requests":
            return [*self.context, *self.questions[turn]]
        answers = [list(one.tokens) for one in said] if self.form.own else self.answers
        past = [token for i in range(turn) for token in (*self.questions[i], *answers[i])]
        return [*self.context, *past, *self.questions[turn]]

    def longest(self) -> int:
        if self.form.mode == "requests":
            return len(self.context) + max(len(question) for question in self.questions)
        answers = _own_lengths(self.session) if self.form.own else [len(answer) for answer in self.answers]
        return len(self.context) + sum(len(question) for question in self.questions) + sum(answers[:-1])

    def fitted(self, limit: int) -> RawTalk:
        excess = self.longest() - limit
        if excess <= 0:
            return self
        context = without_middle(self.context, _kept(self, len(self.context), limit, excess))
        return replace(self, context=context, was_cut=True)


@dataclass(frozen=True)
class ChatTalk:
    """Messages in the model's template. The context and the first question are one message.

    Templates may write earlier messages anew: whether a prompt begins with the one before it is the template's matter.
    """

    session: Session
    tokenizer: Any
    form: PromptFormat
    was_cut: bool = False

    def primer(self) -> list[int]:
        if self.form.mode == "turns":
            return []
        # Up to where the context ends or its last token merges with a question's first one.
        primer = self._render([self.session.context], generate=False)
        for turn in range(len(self.session.questions)):
            primer = primer[: common_prefix(primer, self.prompt(turn, []))]
        return primer

    def prompt(self, turn: int, said: Sequence[Completion]) -> list[int]:
        questions = self.session.questions
        if self.form.mode == "requests":
            return self._render([self.session.context + questions[turn].text])
        answers = [one.text for one in said] if self.form.own else [question.answer for question in questions]
        return self._turns(turn, answers)

    def longest(self) -> int:
        count = len(self.session.questions)
        if self.form.mode == "requests":
            return max(len(self.prompt(turn, [])) for turn in range(count))
        if not self.form.own:
            return len(self.prompt(count - 1, []))
        return len(self._turns(count - 1, [""] * count)) + sum(_own_lengths(self.session)[:-1])

    def fitted(self, limit: int) -> ChatTalk:
        ids = _ids(self.tokenizer, self.session.context)
        talk: ChatTalk = self
        kept = len(ids)
        # The two ends, as text again, may have some tokens more than before: cut until it fits.
        while (excess := talk.longest() - limit) > 0:
            kept = _kept(self, kept, limit, excess)
            context = "".join(self._text(part) for part in _ends(ids, kept))
            talk = replace(self, session=replace(self.session, context=context), was_cut=True)
        return talk

    def _turns(self, turn: int, answers: Sequence[str]) -> list[int]:
        questions = self.session.questions
        messages = [self.session.context + questions[0].text]
        for answer, question in zip(answers[:turn], questions[1 : turn + 1], strict=True):
            messages += [answer.strip(), question.text.strip()]
        return self._render(messages)

    def _render(self, messages: Sequence[str], *, generate: bool = True) -> list[int]:
        """Of user and assistant in turns."""
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": message} for i, message in enumerate(messages)]
        return list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=generate, return_dict=False))

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def without_middle(ids: list[int], kept: int) -> list[int]:
    """`kept` of the tokens, half from the beginning and half from the end, as SCBench cuts its contexts."""
    head, tail = _ends(ids, kept)
    return head + tail


def _ends(ids: list[int], kept: int) -> tuple[list[int], list[int]]:
    return ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]


def _kept(talk: TokenizedSession, before: int, limit: int, excess: int) -> int:
    """Tokens of the context that can stay when `excess` have to go. Raises SuiteError."""
    session = talk.session
    if not session.may_be_cut:
        raise SuiteError(f"session {session.name} has a prompt of {talk.longest()} tokens, and the limit is {limit}")
    if before - excess < 2:
        raise SuiteError(
            f"session {session.name} has {talk.longest()} tokens and the limit is {limit}: its questions and answers "
            "alone are too long, and only the context can be cut"
        )
    return before - excess


def _own_lengths(session: Session) -> list[int]:
    return [question.new_tokens for question in session.questions]


def _ids(tokenizer: Any, text: str) -> list[int]:
    # `verbose`: a context beyond the model's length is dealt with here, and needs no warning.
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer writes before a text: most often a BOS token, or nothing."""
    plain, whole = _ids(tokenizer, "a"), list(tokenizer("a").input_ids)
    starts = range(len(whole) - len(plain) + 1)
    return next((whole[:start] for start in starts if whole[start : start + len(plain)] == plain), [])


def most_new_tokens(sessions: Sequence[Session]) -> int:
    """Of the longest answer that any question asks for."""
    questions: list[Question] = [question for session in sessions for question in session.questions]
    return max(question.new_tokens for question in questions)
