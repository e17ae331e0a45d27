"""The recall task, its tokenizer and the committed recall model."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.recall import MODEL, task
from benchmarks.recall.tokenizer import build_tokenizer

SEEDS = range(4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer as a server gets it: saved and loaded again."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(8192).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def messages(talk: task.Conversation, turns: int) -> list[dict[str, str]]:
    """The first ``turns`` turns with right answers, then the next user message."""
    past = [
        message
        for turn in talk.turns[:turns]
        for message in ({"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer})
    ]
    return [*past, {"role": "user", "content": talk.turns[turns].user}]


def prompt(tokenizer, chat: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def talks() -> list[task.Conversation]:
    documents = [
        task.document_conversation(np.random.default_rng(seed), length, style)
        for seed in SEEDS
        for style in task.STYLES
        for length in (48, 200, 1024)
    ]
    return [*documents, *(task.conversation(seed, turns=8, tokens_per_turn=64) for seed in SEEDS)]


@pytest.mark.parametrize("style", task.STYLES)
@pytest.mark.parametrize("length", [48, 64, 97, 384, 2048, 4096])
def test_document_has_the_length_asked_for(style, length):
    for seed in SEEDS:
        ids = task.document(np.random.default_rng(seed), length, style)
        assert ids.shape == (length,)
        assert ids.max() < len(task.VOCABULARY)
        assert not np.isin(ids, [0, 1]).any()


def test_conversation_turns_have_the_length_asked_for():
    talk = task.conversation(seed=0, turns=12, tokens_per_turn=96)
    ids = task.render(talk)
    starts = np.flatnonzero(ids == task.TOKEN_ID[task.USER])
    assert starts.tolist() == [1 + 96 * turn for turn in range(12)]
    assert len(ids) == 1 + 12 * 96


def test_same_seed_same_text():
    assert task.conversation(3, 6, 64) == task.conversation(3, 6, 64) != task.conversation(4, 6, 64)
    first, second = (task.document(np.random.default_rng(3), 384, "chat") for _ in range(2))
    assert (first == second).all()


def test_every_question_has_one_fact_stated_earlier():
    for talk in talks():
        text = [turn.user for turn in talk.turns]
        mentions = Counter(word for message in text for word in message.split() if word in task.KEYS)
        questions = Counter(turn.asked.key for turn in talk.turns)
        assert set(questions.values()) == {1}
        assert mentions == Counter(fact.key for fact in talk.facts) + questions
        for index, turn in enumerate(talk.turns):
            fact = turn.asked
            assert turn.user.endswith(f"{task.QUESTION} {fact.key}")
            assert fact.turn <= index
            assert f" {' '.join(fact.words)} " in f" {text[fact.turn]} "
            assert text[fact.turn].index(f"{fact.key} {fact.value}") < text[fact.turn].rindex(task.QUESTION)


def test_later_turns_ask_for_facts_of_earlier_turns():
    talk = task.conversation(seed=0, turns=10, tokens_per_turn=64, facts_per_turn=3)
    assert all(turn.asked.turn < index for index, turn in enumerate(talk.turns) if index > 0)
    assert len({turn.asked.kind for turn in talk.turns}) == 3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        task.conversation(seed=0, turns=2, tokens_per_turn=16, facts_per_turn=4)
    with pytest.raises(ValueError, match="keys"):
        task.conversation(seed=0, turns=40, tokens_per_turn=64, facts_per_turn=4)


def test_template_is_the_training_format(tokenizer):
    for talk in talks():
        whole = prompt(tokenizer, messages(talk, len(talk.turns) - 1))
        whole += [task.TOKEN_ID[talk.turns[-1].answer], tokenizer.eos_token_id]
        assert whole == task.render(talk).tolist()


def test_template_is_prefix_stable(tokenizer):
    talk = task.conversation(seed=0, turns=6, tokens_per_turn=64)
    prompts = [prompt(tokenizer, messages(talk, turns)) for turns in range(6)]
    for turn, (earlier, later) in zip(talk.turns, pairwise(prompts), strict=False):
        extended = [*earlier, task.TOKEN_ID[turn.answer], tokenizer.eos_token_id]
        assert later[: len(extended)] == extended


def test_system_message_is_plain_text_in_front(tokenizer):
    chat = [{"role": "system", "content": "w1 w2 ."}, {"role": "user", "content": "recall k1"}]
    words = tokenizer.convert_ids_to_tokens(prompt(tokenizer, chat))
    assert words == ["<bos>", "w1", "w2", ".", "<user>", "recall", "k1", "<assistant>"]


def test_words_survive_a_round_trip(tokenizer):
    text = task.conversation(seed=0, turns=2, tokens_per_turn=64).turns[0].user
    ids = tokenizer.encode(text)
    assert ids == [task.TOKEN_ID[word] for word in text.split()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode("k1 unheard-of k1.") == [task.TOKEN_ID["k1"]] + [tokenizer.unk_token_id] * 2
    assert len(tokenizer) == len(task.VOCABULARY)


def test_committed_model_recalls():
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rng, right = np.random.default_rng(0), []
    for _ in range(12):
        ids = torch.from_numpy(task.document(rng, 400, "chat"))
        due = (ids == task.TOKEN_ID[task.ASSISTANT]).nonzero().flatten()
        with torch.inference_mode():
            said = model(ids[None]).logits[0, due].argmax(-1)
        right += (said == ids[due + 1]).tolist()
    assert np.mean(right) >= 0.9
