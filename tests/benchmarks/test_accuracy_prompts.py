"""Prompts of accuracy suites: later ones extend earlier ones, long contexts lose their middle, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.accuracy import recall
from benchmarks.accuracy.prompts import (
    Completion,
    PromptFormat,
    common_prefix,
    load_tokenizer,
    make_talk,
    without_middle,
)
from benchmarks.accuracy.session import Question, Session, SuiteError
from benchmarks.demo import MODEL
from benchmarks.recall import task
from benchmarks.recall.questions import interviews
from benchmarks.recall.task import TOKEN_ID

TEMPLATE = (
    "{{- bos_token }}{%- for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{%- endif %}"
)
FORMS = [PromptFormat(mode, own=own) for mode, own in (("turns", False), ("turns", True), ("requests", False))]


def byte_level(*, bos: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as large models have it, that merges across blanks and line breaks wherever it can."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<end>"],
        show_progress=False,
    )
    bpe.train_from_iterator(["ab ab\n\nabc a b\n\nab c ab.\n c b a\n\n" * 40], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<end>", chat_template=TEMPLATE)


WITH_BOS, WITHOUT_BOS = byte_level(bos=True), byte_level(bos=False)
RECALL = load_tokenizer(str(MODEL))

TEXTS = st.text("ab c.\né", min_size=1, max_size=30)


def no_score(text: str) -> float:
    return 0.0


@st.composite
def sessions(draw) -> Session:
    context = draw(st.text("ab c.\né", min_size=1, max_size=200))
    made = st.builds(Question, st.just("t"), TEXTS, TEXTS, st.just(3), st.just(no_score))
    questions = draw(st.lists(made, min_size=1, max_size=5))
    return Session("s", context, tuple(questions), may_be_cut=True)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def answers(session: Session) -> list[Completion]:
    """Three tokens each, of which no text is made."""
    return [Completion((7 + turn, 8, 9), "") for turn in range(len(session.questions))]


@given(session=sessions(), form=st.sampled_from(FORMS), tokenizer=st.sampled_from([WITH_BOS, WITHOUT_BOS]))
def test_every_prompt_extends_what_was_sent_before(session, form, tokenizer):
    talk = make_talk(session, tokenizer, form)
    said = answers(session)
    prompts = [talk.prompt(turn, said[:turn]) for turn in range(len(session.questions))]
    beginning = [tokenizer.bos_token_id] if tokenizer is WITH_BOS else []
    context = beginning + ids(tokenizer, session.context)
    assert talk.primer() == (context if form.mode == "requests" else [])
    expected = context
    for turn, (prompt, question) in enumerate(zip(prompts, session.questions, strict=True)):
        expected = expected + ids(tokenizer, question.text)
        assert prompt == expected
        assert tokenizer.bos_token_id not in prompt[1:]
        if form.mode == "requests":
            expected = context
        else:
            expected = prompt + (list(said[turn].tokens) if form.own else ids(tokenizer, question.answer))
    if form.own:
        # The longest that may come: answers of new_tokens.
        assert talk.longest() == len(context) + sum(len(ids(tokenizer, q.text)) + 3 for q in session.questions) - 3
    else:
        assert talk.longest() == max(map(len, prompts))


@given(session=sessions(), form=st.sampled_from(FORMS), share=st.floats(0, 1), data=st.data())
def test_a_context_that_is_too_long_loses_its_middle(session, form, share, data):
    tokenizer = data.draw(st.sampled_from([WITH_BOS, WITHOUT_BOS]))
    whole = make_talk(session, tokenizer, form)
    context = whole.context
    least = whole.longest() - len(context) + 2
    assume(len(context) >= 2)
    limit = least + int(share * (whole.longest() - least))
    cut = whole.fitted(limit)
    assert cut.was_cut == (limit < whole.longest())
    # Not a token more is lost than has to be.
    assert cut.longest() == limit
    kept = cut.context
    head, tail = len(kept) - len(kept) // 2, len(kept) // 2
    assert kept == context[:head] + context[len(context) - tail :]
    assert (cut.questions, cut.answers) == (whole.questions, whole.answers)


def test_cutting_keeps_as_much_of_both_ends():
    assert without_middle(list(range(10)), 5) == [0, 1, 2, 8, 9]
    assert without_middle(list(range(10)), 4) == [0, 1, 8, 9]
    assert without_middle(list(range(10)), 10) == list(range(10))


@pytest.mark.parametrize("chat", [False, True])
def test_what_cannot_be_cut_is_refused_in_one_line(chat):
    questions = (Question("t", "\n\nab", "c", 3, no_score),)
    long = Session("book 7", "ab c " * 50, questions)
    form = PromptFormat("requests", chat=chat)
    talk = make_talk(long, WITH_BOS, form)
    assert talk.fitted(talk.longest()) is talk
    with pytest.raises(SuiteError, match=f"session book 7 has a prompt of {talk.longest()} tokens, .* 20") as caught:
        talk.fitted(20)
    assert "\n" not in str(caught.value)
    with pytest.raises(SuiteError, match="questions and answers alone are too long"):
        make_talk(replace(long, may_be_cut=True), WITH_BOS, form).fitted(2)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(session=sessions(), mode=st.sampled_from(["turns", "requests"]), own=st.booleans())
def test_a_chat_is_written_by_the_template(session, mode, own):
    assume(mode == "turns" or not own)
    talk = make_talk(session, WITH_BOS, PromptFormat(mode, own=own, chat=True))
    said = [Completion((5,), f" said {turn}\n") for turn in range(len(session.questions))]
    for turn, question in enumerate(session.questions):
        if mode == "requests":
            messages = [session.context + question.text]
        else:
            messages = [session.context + session.questions[0].text]
            for past in range(turn):
                messages.append(f"said {past}" if own else session.questions[past].answer.strip())
                messages.append(session.questions[past + 1].text.strip())
        text = "<s>" + "".join(f"<{('user', 'assistant')[i % 2]}>{m}<end>" for i, m in enumerate(messages))
        prompt = talk.prompt(turn, said[:turn])
        assert prompt == ids(WITH_BOS, text + "<assistant>")
        if mode == "requests":
            assert common_prefix(talk.primer(), prompt) == len(talk.primer()) > 0
    if mode == "turns":
        assert talk.primer() == []
    if not own:
        assert talk.longest() == max(len(talk.prompt(turn, [])) for turn in range(len(session.questions)))


@pytest.mark.parametrize("mode", ["turns", "requests"])
def test_a_chat_that_is_too_long_loses_the_middle_of_its_context(mode):
    context = "start " + "ab c\n" * 60 + " stop"
    questions = tuple(Question("t", f"\n\nab {n}", "c", 3, no_score) for n in range(3))
    talk = make_talk(Session("s", context, questions, True), WITH_BOS, PromptFormat(mode, chat=True))
    cut = talk.fitted(100)
    assert cut.was_cut
    assert 90 <= cut.longest() <= 100
    text = cut.session.context
    assert text.startswith("start ab c")
    assert text.endswith("ab c\n stop")
    assert cut.session.questions == questions
    assert WITH_BOS.decode(cut.prompt(0, [])).startswith("<s><user>start ")


def test_a_model_without_a_template_cannot_chat():
    bare = byte_level(bos=True)
    bare.chat_template = None
    with pytest.raises(SuiteError, match="no chat template"):
        make_talk(Session("s", "a", (Question("t", "b", "c", 1, no_score),)), bare, PromptFormat("turns", chat=True))


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(SuiteError, match="is no folder"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(SuiteError, match="cannot load the tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_recall_suite_asks_token_for_token_what_it_always_did():
    made = recall.load(3, 5, 2**34)
    for session, talk in zip(made, interviews(3, 5, seed=2**34), strict=True):
        prompts = make_talk(session, RECALL, PromptFormat("requests"))
        assert prompts.primer() == list(talk.history)
        assert [prompts.prompt(turn, []) for turn in range(5)] == [talk.prompt(fact) for fact in talk.facts]
        for question, fact in zip(session.questions, talk.facts, strict=True):
            assert question.new_tokens == 1
            assert question.score(f" {fact.value}") == 1
            assert question.score("") == question.score("w1") == question.score(f"w1 {fact.value}") == 0


def test_turns_of_the_recall_suite_are_a_conversation():
    (session,) = recall.load(1, 3, 2**34)
    (talk,) = interviews(1, 3, seed=2**34)
    first, second, third = talk.facts
    words = [task.USER, task.QUESTION, first.key, task.ASSISTANT, first.value, task.EOS]
    words += [task.USER, task.QUESTION, second.key, task.ASSISTANT, second.value, task.EOS]
    words += [task.USER, task.QUESTION, third.key, task.ASSISTANT]
    prompt = make_talk(session, RECALL, PromptFormat("turns")).prompt(2, [])
    assert prompt == [*talk.history, *(TOKEN_ID[word] for word in words)]


def test_the_recall_suite_speaks_one_language():
    recall.check_language(RECALL)
    with pytest.raises(SuiteError, match="does not have"):
        recall.check_language(WITH_BOS)
    with pytest.raises(SuiteError, match="at least 1"):
        recall.load(0, 1, 1)
