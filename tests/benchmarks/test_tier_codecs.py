"""Parts of benchmarks.tier_codecs that need no server."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.harness.errors import ServerLost, SettingsError
from benchmarks.tier_codecs import as_published, asking, results, sizes, suites
from benchmarks.tier_codecs.asking import Answers
from benchmarks.tier_codecs.suites import Question, Talk
from sgl_ragged.mem_pool.layout import SlabLayout

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

    def __call__(self, url, ids, new_tokens, **more):
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


def test_contexts_leave_the_device_before_they_are_gone_on_with(monkeypatch):
    monkeypatch.setattr(asking, "_generate", Server())
    steps: list[int] = []
    first = asking.read_contexts("", talks(), 4, ask=True, advance=lambda: steps.append(1))
    back = asking.go_on_restored("", talks(), 4, lambda: steps.append(1))
    assert len(steps) == 6
    assert (first.restored, back.restored) == (0, 24)
    assert [states[:, 0].tolist() for states in back.states] == [[8, 9, 10, 11], [48, 49, 50, 51]]
    assert [len(said) for said in back.said] == [0, 2, 0]


def test_what_never_left_the_device_is_refused(monkeypatch):
    monkeypatch.setattr(asking, "_generate", Server(device=3))
    asking.read_contexts("", talks(), 4, ask=False, advance=lambda: None)
    with pytest.raises(SettingsError, match="0 of 8 tokens came back"):
        asking.go_on_restored("", talks(), 4, lambda: None)
    with pytest.raises(SettingsError, match="two contexts begin with the same segment"):
        asking.read_contexts("", talks(), 4, ask=False, advance=lambda: None)


def test_a_continuation_that_was_cached_itself_is_no_answer(monkeypatch):
    server = Server()
    monkeypatch.setattr(asking, "_generate", server)
    longer = [Talk("text", tuple(range(6)), tuple(range(6, 12)), ()), talks()[2]]
    asking.read_contexts("", longer, 4, ask=False, advance=lambda: None)
    with pytest.raises(ServerLost, match="hidden states of 4 tokens, not of the 8"):
        asking.go_on_restored("", longer, 4, lambda: None)


def result(codec: str, row_bytes: int, kl: float) -> results.Result:
    right = {"facts": (1, 2)}
    return results.Result(
        "auto", 0.5, codec, row_bytes, 1024, 256, 24, [kl, kl], [0.0, 0.1], [1.0, 0.5], right, right, ""
    )


def test_what_answers_come_to(tmp_path):
    spoken = SimpleNamespace(decode=lambda ids: {1: "a", 2: "b"}[ids[0]])
    answers = Answers(said=[[], [[1], [1]], []])
    assert results.count_right("texts", spoken, talks(), answers) == {"facts": (1, 2)}
    states = torch.eye(4, 2)
    one = results.differences(torch.eye(60, 2), talks(), Answers([states] * 2), Answers([states, states * 2]))
    assert one["kl"][0] == 0 < one["kl"][1]
    found = [result("exact", 1024, 0.0), result("fp8", 512, 1e-3)]
    assert results.table(found).rows[1][:4] == ("auto, 0.5, fp8", "2", "0.500", "0.001 ± 0")
    results.draw(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert json.loads(json.dumps(results.document({}, {}, found)))["results"][1]["codec"] == "fp8"


def test_bytes_by_codec():
    equal = SlabLayout(np.full((4, 2), 32), 8, 64)
    # fp8: 16 float32 scales to 4,096 elements. shared: one layer of four, and a header of 16 bytes.
    assert sizes.row("x", equal, torch.float32) == ("x", "1.000", "0.254", "0.751", "0.00", "1.00")
    other = SlabLayout(np.array([[16, 32], [48, 64]]), 8, 64)
    assert sizes.row("x", other, torch.bfloat16)[3:] == ("refused", "1.00", "0.00")


def test_distances_of_attention_are_those_of_whole_matrices():
    weights = [torch.rand(1, 2, 5, 5, generator=torch.Generator().manual_seed(n)).softmax(-1) for n in range(3)]
    apart, received = as_published.apart_and_received(weights)
    for first in range(3):
        for second in range(3):
            by_head = [float((weights[first] - weights[second])[0, head].norm()) for head in range(2)]
            assert apart[first, second] == pytest.approx(np.mean(by_head), abs=1e-3)
    assert received.sum(axis=1) == pytest.approx([1.0] * 3)
    assert received[1, 2] == pytest.approx(float(weights[1][0, :, :, 2].mean()))


def test_caches_through_the_codecs():
    random = torch.Generator().manual_seed(0)
    layers = [
        SimpleNamespace(keys=torch.randn((1, 2, 512, 8), generator=random), values=torch.randn((1, 2, 512, 8)))
        for _ in range(3)
    ]
    cache = SimpleNamespace(layers=layers)
    shared = as_published.with_shared(cache, [(0, 2)])
    assert torch.equal(shared.layers[2].keys, layers[0].keys)
    assert torch.equal(shared.layers[1].values, layers[1].values)
    assert not torch.equal(layers[2].keys, layers[0].keys), "the cache itself is as it was"
    eighth = as_published.with_fp8(cache)
    for mine, was in zip(eighth.layers, layers, strict=True):
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(mine, name), getattr(was, name), rtol=1 / 16, atol=1e-3)
