"""Parts of benchmarks.tier_codecs that need no server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.results import Results
from benchmarks.tier_codecs import __main__ as tier_codecs
from benchmarks.tier_codecs import asking, suites
from benchmarks.tier_codecs.asking import Answers
from benchmarks.tier_codecs.suites import Question, Talk

SEGMENT = 256


def test_conversations_of_the_recall_model():
    talks = suites.from_recall(2, segment=SEGMENT)
    assert [talk.kind for talk in talks] == ["facts"] * 2 + ["conversation"] * 2
    assert len({talk.context[:SEGMENT] for talk in talks}) == 4, "no context is in another's cache"
    assert {len(talk.questions) for talk in talks[:2]} == {8}
    assert {(len(talk.context), len(talk.continuation)) for talk in talks[2:]} == {(1792, 256)}
    assert talks[0].whole(SEGMENT) == 2048
    assert suites.kinds(talks) == ["facts"]
    # Nine segments with the question, twice, and SGLang's page.
    assert suites.pool_tokens(talks, SEGMENT) == 19 * SEGMENT


def test_words_of_the_recall_model_are_whole_words():
    assert suites.is_right("recall", "v5", "v5 <eos>")
    assert not suites.is_right("recall", "v5", "v52 <eos>")
    assert suites.is_right("texts", "4821", " 4821.")


class Server:
    """Answers as a server does whose device holds one context, and whose host holds all."""

    def __init__(self, device: int = 1) -> None:
        self.device, self.on_device, self.seen = device, [], set()

    def generate(self, ids, new_tokens, **more):
        start, whole = tuple(ids[:4]), (len(ids) - 1) // 4 * 4
        cached = min(whole, 8) if start in self.seen else 0
        host = cached if start not in self.on_device else 0
        self.seen.add(start)
        self.on_device = [*(one for one in self.on_device if one != start), start][-self.device :]
        meta = {"cached_tokens": cached, "cached_tokens_details": {"device": cached - host, "host": host}}
        if "return_hidden_states" in more:
            meta["hidden_states"] = [[[float(token), 0.0] for token in ids[cached:]]]
        return {"output_ids": [1] * new_tokens, "meta_info": meta}


def talks() -> list[Talk]:
    asked = (Question((90, 91), "a"), Question((92,), "b"))
    return [
        Talk("text", tuple(range(8)), tuple(range(8, 12)), ()),
        Talk("facts", tuple(range(20, 29)), (), asked),
        Talk("text", tuple(range(40, 48)), tuple(range(48, 52)), ()),
    ]


def test_contexts_leave_the_device_before_they_are_continued():
    server = Server()
    steps: list[int] = []
    first = asking.read_contexts(server, talks(), 4, ask=True, advance=lambda: steps.append(1))
    back = asking.continue_restored(server, talks(), 4, lambda: steps.append(1))
    assert len(steps) == 6
    assert (first.restored, back.restored) == (0, 24)
    assert [states[:, 0].tolist() for states in back.states] == [[8, 9, 10, 11], [48, 49, 50, 51]]
    assert [len(said) for said in back.said] == [0, 2, 0]


def test_what_never_left_the_device_is_refused():
    server = Server(device=3)
    asking.read_contexts(server, talks(), 4, ask=False, advance=lambda: None)
    with pytest.raises(SettingsError, match="0 of 8 tokens came back"):
        asking.continue_restored(server, talks(), 4, lambda: None)
    with pytest.raises(SettingsError, match="two contexts begin with the same segment"):
        asking.read_contexts(server, talks(), 4, ask=False, advance=lambda: None)


def test_a_continuation_that_was_cached_itself_is_no_answer():
    server = Server()
    longer = [Talk("text", tuple(range(6)), tuple(range(6, 12)), ()), talks()[2]]
    asking.read_contexts(server, longer, 4, ask=False, advance=lambda: None)
    with pytest.raises(SettingsError, match="hidden states of 4 tokens, not of the 8"):
        asking.continue_restored(server, longer, 4, lambda: None)


def test_what_answers_come_to(tmp_path):
    spoken = SimpleNamespace(decode=lambda ids: {1: "a", 2: "b"}[ids[0]])
    answers = Answers(said=[[], [[1], [1]], []])
    right = tier_codecs.count_right("texts", spoken, talks(), answers)
    assert right == {"facts": (1, 2)}
    states = torch.eye(4, 2)
    head, same, other = torch.eye(60, 2), Answers([states] * 2), Answers([states, states * 2])
    found = tier_codecs.differences(head, talks(), same, other)
    assert found["kl"][0] == 0 < found["kl"][1]
    results = Results(tmp_path / "t.json", "tier_codecs", {"segment": 256})
    for codec, row_bytes in (("exact", 1024), ("fp8", 512)):
        measured = tier_codecs.Measured(row_bytes, 1024, 24, **found, right=right, reference_right=right, start_up="")
        results.add(f"auto, 0.5, {codec}", measured)
    again = Results.load(results.path, "tier_codecs")
    assert tier_codecs.table(again).rows[1][:3] == ("auto, 0.5, fp8", "2", "0.500")
    assert tier_codecs.table(again).rows[1][-1] == "1 of 2 (1)"
