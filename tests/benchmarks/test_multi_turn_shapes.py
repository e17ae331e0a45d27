"""The shapes of conversations: the same from the same seed, as long as asked for, and sharing what they should."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.demo import MODEL
from benchmarks.harness.errors import SettingsError
from benchmarks.multi_turn.shapes import SHAPES, Load, Request, longest, working_set, workload
from benchmarks.multi_turn.writers import RecallWriter, Story, writer_for
from benchmarks.recall import task
from benchmarks.recall.tokenizer import build_tokenizer

WRITER = RecallWriter()


def load(shape: str, **changes: int) -> Load:
    numbers = {"clients": 8, "rounds": 5, "request_length": 60, "output_length": 12, "shared_length": 300}
    return Load(shape, **(numbers | {"group": 4, "seed": 7} | changes))


def messages(request: Request, requests: tuple[Request, ...], answer: str) -> list[dict[str, str]]:
    """All messages of a prompt, every earlier answer being `answer`."""
    own = [{"role": role, "content": content} for role, content in request.messages]
    if request.context is None:
        return own
    return [*messages(requests[request.context], requests, answer), {"role": "assistant", "content": answer}, *own]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_workload_is_the_same_from_the_same_seed_only(shape):
    assert workload(load(shape), WRITER) == workload(load(shape), WRITER)
    assert workload(load(shape), WRITER) != workload(load(shape, seed=8), WRITER)


@pytest.mark.parametrize("shape", SHAPES)
def test_more_clients_leave_the_first_ones_as_they_are(shape):
    few, many = workload(load(shape, clients=4), WRITER), workload(load(shape, clients=8), WRITER)
    contents = {request.messages for request in many}
    assert all(request.messages in contents for request in few)


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_are_no_longer_than_the_estimate_and_nearly_as_long(shape):
    requests = workload(load(shape), WRITER)
    tokenizer = build_tokenizer(8192)
    answer = " ".join(["w1"] * 12)
    for request in requests:
        rendered = tokenizer.apply_chat_template(
            messages(request, requests, answer), tokenize=False, add_generation_prompt=True
        )
        length = len(tokenizer.encode(rendered))
        slack = 9 * 2 * (request.round + 2)
        assert request.length - slack <= length <= request.length
    assert longest(requests, 12) == max(request.length for request in requests) + 12


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_wait_for_earlier_ones_of_the_round_before(shape):
    for request in (requests := workload(load(shape), WRITER)):
        assert requests[request.number] is request
        if request.round == 0:
            assert request.after is None
            assert request.context is None
        else:
            assert requests[request.after].round == request.round - 1
            assert request.after < request.number
            assert request.context in (None, request.after)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_asked_for_was_stated_in_the_same_prompt_once(shape):
    requests = workload(load(shape), WRITER)
    for request in requests:
        assert request.answer is not None
        texts = [one["content"].split() for one in messages(request, requests, "w1")]
        key = texts[-1][-1]
        assert texts[-1][-2] == task.QUESTION
        pairs = [(a, b) for text in texts for a, b in pairwise(text)]
        assert [b for a, b in pairs if a == key and b in task.VALUES] == [request.answer]


def test_chat_turns_are_of_uneven_length_about_the_mean():
    requests = workload(load("chat", clients=100, rounds=8, request_length=100), WRITER)
    lengths = [len(request.messages[0][1].split()) for request in requests]
    assert min(lengths) >= 25
    assert max(lengths) <= 300
    assert 92 < np.mean(lengths) < 106
    assert np.std(lengths) > 40


def test_documents_are_shared_by_their_group_and_stand_first():
    requests = workload(load("documents"), WRITER)
    starts = defaultdict(set)
    for request in requests:
        starts[request.shared].add(tuple(request.messages[0][1].split()[: request.shared_tokens]))
        assert request.context is None
    assert sorted(starts) == ["document 0", "document 1"]
    assert all(len(texts) == 1 for texts in starts.values())
    assert starts["document 0"] != starts["document 1"]
    assert Counter(request.shared for request in requests) == {"document 0": 20, "document 1": 20}


def test_agents_share_the_system_prompt_and_nothing_else():
    requests = workload(load("agents"), WRITER)
    first = [request for request in requests if request.round == 0]
    assert len({request.messages[0] for request in first}) == 1
    assert first[0].messages[0][0] == "system"
    assert len({request.messages[1] for request in first}) == 8
    assert all(len(request.messages) == 1 for request in requests if request.round)


def test_a_forked_conversation_branches_in_two_until_each_client_has_its_own():
    requests = workload(load("fork", clients=8, rounds=6, group=4), WRITER)
    widths = Counter(request.round for request in requests)
    assert [widths[number] for number in range(6)] == [2, 2, 4, 4, 8, 8]
    children = Counter(request.context for request in requests if request.context is not None)
    assert Counter(children.values()) == {1: 2 + 4 + 8, 2: 2 + 4}
    assert len({request.messages for request in requests}) == len(requests)


def test_the_working_set_counts_what_is_shared_once():
    chat = workload(load("chat", clients=1, rounds=3), WRITER)
    assert working_set(chat, 12) == chat[-1].length + 12
    documents = workload(load("documents", clients=4, rounds=1), WRITER)
    assert working_set(documents, 12) == sum(r.length + 12 for r in documents) - 3 * 300


@pytest.mark.parametrize(
    "changes", [{"group": 3, "clients": 6}, {"group": 4, "clients": 6}, {"group": 4, "rounds": 2}], ids=str
)
def test_a_fork_that_cannot_be_divided_is_refused(changes):
    with pytest.raises(SettingsError, match="power of two"):
        workload(load("fork", **changes), WRITER)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 12, 40, 500])
@pytest.mark.parametrize("ask", [True, False])
def test_a_message_has_its_length_to_the_token(tokens, ask):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        text = WRITER.message(rng, WRITER.begin(rng), tokens, facts=4, ask=ask)
        words = text.content.split()
        assert len(words) == tokens
        assert set(words) <= set(task.VOCABULARY)


def test_a_conversation_that_has_used_all_keys_goes_on_without_facts():
    text = WRITER.message(np.random.default_rng(0), Story(), 20, facts=4, ask=True)
    assert text.answer is None
    assert len(text.content.split()) == 20


def test_the_recall_model_is_known_by_its_words():
    assert isinstance(writer_for(str(MODEL)), RecallWriter)


def test_a_model_that_is_not_there_is_refused_in_one_line(tmp_path):
    with pytest.raises(SettingsError, match="cannot load the tokenizer") as caught:
        writer_for(str(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)


def test_reasoning_asks_one_thing_after_the_other():
    """Nothing stands before a question but the answer to the last one, which it waits for."""
    requests = workload(load("reason", rounds=2), WRITER)
    assert len(requests) == 16
    assert all(request.context is None and request.shared is None for request in requests)
    assert [request.after for request in requests[:4]] == [None, 0, None, 2]
    assert longest(requests, 12) < 60 + 12 + 40
