"""Parts of benchmarks.quality that need no server."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.progress import Progress

from benchmarks.harness.errors import PointFailed, SettingsError
from benchmarks.harness.forced import Forced
from benchmarks.harness.results import Results
from benchmarks.quality import __main__ as door
from benchmarks.quality import facts, head, history, peering, reference, table, texts
from benchmarks.quality.configuration import Configuration, configurations
from benchmarks.quality.history import PARTS, text_nll
from benchmarks.quality.measured import figures
from benchmarks.quality.retrieval import tables as retrieval
from benchmarks.quality.retrieval.axis import groups_of
from benchmarks.quality.retrieval.measured import Measured, counts, decoded_states
from benchmarks.quality.served import Answers
from benchmarks.quality.tasks import Tasks
from benchmarks.quality.texts import Text

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Words:
    """A tokenizer of words and single spaces; ids in order of appearance. Without a template texts begin with `<s>`."""

    def __init__(self, chat_template: str | None = "one") -> None:
        self.known: dict[str, int] = {} if chat_template else {"<s>": 0}
        self.chat_template, self.bos_token_id = chat_template, None if chat_template else 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return first + [self.known.setdefault(part, len(self.known)) for part in re.findall(r"\s|\S+", text)]

    def decode(self, ids: list[int]) -> str:
        words = list(self.known)
        return "".join(words[i] for i in ids)

    def apply_chat_template(self, messages: list[dict], **_: object) -> str:
        return f"<user> {messages[0]['content']} <assistant> "


def test_two_distributions_by_hand():
    """Over two tokens, reference (1/2, 1/2) and (3/4, 1/4): KL = log(2 / sqrt 3)."""
    matrix = torch.eye(2)
    reference = torch.zeros(3, 2)
    found = torch.tensor([[math.log(3.0), 0.0]] * 3)
    difference = head.compare(matrix, reference, found, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(difference.kl, torch.full((2,), math.log(2) - math.log(3) / 2))
    torch.testing.assert_close(difference.nll, torch.tensor([math.log(4 / 3), math.log(4.0)]))
    torch.testing.assert_close(difference.reference_nll, torch.full((2,), math.log(2)))
    same = head.compare(matrix, found, found, torch.tensor([0, 0, 1]))
    assert same.kl.abs().max() < 1e-7
    assert same.agrees.tolist() == [1.0, 1.0]


def test_texts_are_there_and_differ(monkeypatch):
    found = texts.pieces(Words(), 200, 2)
    assert [text.source for text in found] == [source for source in texts.SOURCES for _ in range(2)]
    assert len({text.ids for text in found}) == len(found)
    assert {len(text.ids) for text in found} == {200}
    assert texts.pieces(Words(), 200, 2, ["licence"]) == texts.pieces(Words(), 200, 2, ["licence", "c++"])[:2]
    monkeypatch.setitem(texts.SOURCES, "prose", ("no-such-package", "x", ""))
    with pytest.raises(texts.TextMissing, match="in the package no-such-package, which is not installed"):
        texts.pieces(Words(), 200)


@pytest.mark.parametrize("kind", facts.KINDS)
def test_facts_are_in_the_context_and_questions_do_not_give_them_away(kind):
    tokenizer = Words()
    for interview in facts.interviews(tokenizer, kind, 3, facts=4, length=300):
        context = tokenizer.decode(list(interview.context))
        for question in interview.questions:
            asked = tokenizer.decode(list(question.suffix))
            beginning = asked.partition("<assistant> ")[2]
            assert f"{beginning} {question.answer}." in context
            assert question.answer not in asked
        assert len({question.answer for question in interview.questions}) == 4
    first, again = (facts.interviews(tokenizer, kind, 2, facts=4, length=300) for _ in range(2))
    assert first == again


def test_a_model_without_a_template_reads_one_text():
    tokenizer = Words(chat_template=None)
    (interview,) = facts.interviews(tokenizer, "words", 1, facts=2, length=300)
    asked = [tokenizer.decode([*interview.context, *question.suffix]) for question in interview.questions]
    for text, question in zip(asked, interview.questions, strict=True):
        assert text.startswith(f"<s>{facts.INTRODUCTION}")
        assert f"{facts.QUESTION}\n\n" in text
        assert f"{text.rpartition(chr(10))[2]} {question.answer}." in text
    (text, *_) = texts.pieces(tokenizer, 100)
    assert (len(text.ids), text.ids[0], text.ids.count(0)) == (100, 0, 1)


def test_what_counts_as_right():
    assert facts.is_right("4821", " 4821.")
    assert facts.is_right("apple", '"Apple" is')
    assert not facts.is_right("4821", " not 4821")


def tasks() -> Tasks:
    question = facts.Question((1, 2), "apple")
    held = [facts.Interview(kind, "prose", tuple(range(40)), (question, question)) for kind in facts.KINDS]
    return Tasks([texts.Text("prose", tuple(range(64)))], held, segment=16)


def test_the_share_of_a_context_counts_its_open_segment_whole():
    assert tasks().share(tasks().interviews[0], 0.5) == pytest.approx((32 * 0.5 + 8) / 40)
    assert tasks().context == 48


def result(shift: float, right: bool) -> dict:
    reference = [torch.zeros(64, 64)]
    states = [reference[0].clone()]
    states[0][:, 0] += shift
    return figures(Answers(states, [[right, True]] * 2, ""), reference, torch.eye(64), tasks())


def test_only_what_sees_compressed_history_counts():
    found = result(1.0, False)["texts"]
    assert found["kl"] == pytest.approx(found["all_kl"])
    assert np.mean(result(1.0, False)["segments"]) == pytest.approx(found["kl"][0])
    assert np.shape(result(1.0, False)["segments"]) == (1, 3)
    states = torch.zeros(64, 64)
    states[:16, 0] += 1.0
    answers = Answers([states], [[True, True]] * 2, "")
    only_first = figures(answers, [torch.zeros(64, 64)], torch.eye(64), tasks())["texts"]
    assert only_first["kl"] == [0.0]
    assert only_first["all_kl"][0] > 0


def test_octaves_of_the_position_by_hand():
    assert table.by_octave([[1.0, 2.0, 4.0], [3.0, 2.0, 4.0]]) == [2.0, 3.0]
    assert table.by_octave([[1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0]]) == [1.0, 3.0, 6.5]
    assert table.by_octave([[1.0, 2.0, 4.0, 5.0, 7.0]]) == [1.0, 3.0, 6.0]


def test_results_of_this_repository_have_tables_and_are_continued(tmp_path):
    """Servers by configuration, kvpress by method and share; the figures are those of docs/evaluation.md."""
    path = tmp_path / "q.json"
    path.write_text((RESULTS / "quality-smollm2-135m-cpu.json").read_text())
    results = Results.open(path, "quality", json.loads(path.read_text())["settings"])
    servers, peers = table.tables(results)
    rows = {row[0]: row for row in servers.rows}
    assert rows["default, auto, ratio 0.3"][1].startswith("0.0194")
    assert rows["default, auto, ratio 0.3"][-2:] == ("48 of 48", "44 of 48")
    assert ("kvpress KVzip", "0.3", "0.0090 ± 0.0059", "45 of 48", "45 of 48") in peers.rows
    one = Configuration("gate", "auto", 0.15)
    results.add(str(one), {"configuration": one, **result(1.0, False)})
    assert one in table.served(Results.load(path, "quality"))


def test_the_reference_is_kept_for_the_same_settings_only(tmp_path):
    results = Results(tmp_path / "q.json", "quality", {"model": "m"})
    assert reference.load(results) is None
    states = [torch.rand(3, 2), torch.rand(4, 2)]
    reference.keep(results, states)
    assert all(map(torch.equal, reference.load(results), states))
    assert reference.load(Results(results.path, "quality", {"model": "other"})) is None
    reference.path_of(results).write_bytes(b"no tensors")
    with pytest.raises(SettingsError, match="delete it"):
        reference.load(results)


def test_configurations_are_flags_of_the_server():
    gate, default = configurations(["gate", "default"], ["p/{scorer}.safetensors"], [0.3], fits=["auto"])
    assert str(gate) == "gate, p/{scorer}.safetensors, fitted, ratio 0.3"
    assert gate.flags(64)[:4] == ["--ragged-scorer", "gate", "--ragged-profile", "p/gate.safetensors"]
    assert gate.flags(64)[-2:] == ["--ragged-fit", "auto"]
    assert "--ragged-scorer" not in default.flags(64)
    (narrow,) = configurations(["gate"], ["auto"], [0.6], ["fp8_e4m3"])
    assert str(narrow) == "gate, auto, fp8_e4m3, ratio 0.6"
    assert narrow.flags(64)[-4:] == ["--kv-cache-dtype", "fp8_e4m3", "--ragged-fit", "none"]


FAKE_PEERS = """#!{python}
import json, sys
order = json.load(sys.stdin)
for method, share in order["wanted"][:{count}]:
    answers = [[[0]] * len(i["questions"]) for i in order["interviews"]]
    nll = [[1.0, 2.0]] * len(order["texts"])
    found = dict(method=method, share=share, nll=nll, answers=answers)
    if method == "FP8":
        import torch
        found["states"] = order["folder"] + "/states"
        torch.save([torch.zeros(len(ids), 64) for ids in order["texts"]], found["states"])
    print(json.dumps(found), flush=True)
if {count} < len(order["wanted"]):
    sys.exit("out of memory")
"""


def test_peers_that_fail_keep_what_they_measured_and_go_on_from_there(tmp_path):
    """With an interpreter that answers as `peers.py` does, for the first three of what is wanted, then for the rest."""
    tokenizer, results, python = Words(), Results(tmp_path / "q.json", "quality", {}), tmp_path / "python"
    tokenizer.encode("apple")
    methods = (*peering.METHODS, "FP8")

    def ask():
        wanted = peering.missing_peers(results, methods, [0.5, 0.3], 64)
        exact = peering.Exact([torch.zeros(64, 64)], torch.eye(64))
        with Progress() as progress:
            peering.ask_peers(python, "m", tasks(), tokenizer, wanted, exact, results, progress)

    with pytest.raises(peering.PeersFailed, match="make peers"):
        ask()
    for count, failed in ((3, True), (2 * len(peering.METHODS) + 1 - 3, False)):
        python.write_text(FAKE_PEERS.format(python=sys.executable, count=count))
        python.chmod(0o755)
        if failed:
            with pytest.raises(peering.PeersFailed, match=r"the peers failed \(1\): out of memory"):
                ask()
        else:
            ask()
    found = table.peers(Results.load(results.path, "quality"))
    assert set(found) == {("FP8", 0.5)} | {(method, share) for method in peering.METHODS for share in (0.5, 0.3)}
    assert found["KeyDiff", 0.3]["texts"] == {"continuation_nll": [1.5]}
    assert found["KeyDiff", 0.3]["right"] == {kind: [[True, True]] for kind in facts.KINDS}
    assert found["FP8", 0.5]["texts"] | {"kl": [0.0], "continuation_nll": [1.5]} == found["FP8", 0.5]["texts"]
    assert {row[0] for row in table.tables(results)[0].rows} == {"FP8, 0.5 of the bytes"}


def test_the_peers_program_has_every_method():
    written = peering.SCRIPT.read_text()
    assert [method for method in peering.METHODS if f'    "{method}": lambda' not in written] == []


class Scoring:
    """A server that gives token n of a prompt the log-probability -n; the first has none."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def generate(self, ids, new_tokens, *, return_logprobs):
        found = [[None, 0, None], *([-float(n), 0, None] for n in range(1, self.tokens))]
        return {"meta_info": {"input_token_logprobs": found}}


def test_loss_of_a_bound_by_place_in_the_text(tmp_path):
    assert text_nll(Scoring(17), Text("prose", tuple(range(17)))) == [1.5 + 2 * part for part in range(PARTS)]
    with pytest.raises(PointFailed, match="of 15 of 16 tokens"):
        text_nll(Scoring(16), Text("prose", tuple(range(17))))
    results = Results(tmp_path / "h.json", "quality.history", {"text_tokens": 800})
    nll = [[1.0] * PARTS, [2.0] * PARTS]
    results.add("token", history.Measured(nll, [[True, True], [True, True]], ""))
    worse = [[1.0] * 4 + [1.5] * 4, [2.0] * 4 + [2.7] * 4]
    results.add("ragged@1+history=400", history.Measured(worse, [[False, True], [False, True]], "line"))
    row = history.tables(results)[0].rows[1]
    assert row[1:10] == [*["0.000"] * 4, *["0.600"] * 4, "0.6000 ± 0.1000"]
    assert row[10:] == ["2 of 4", "0.00", "1.00"]


class Decoding:
    """A server whose hidden states are the token's place; it decodes the forced tokens unless it is deaf."""

    def __init__(self, deaf: bool = False) -> None:
        self.deaf = deaf

    def generate(self, ids, new_tokens, *, ignore_eos, forced, return_hidden_states):
        places = [[float(place)] for place in range(len(ids) + new_tokens - 1)]
        states = [places[: len(ids)], *places[len(ids) :]]
        return {"output_ids": [0] * len(forced) if self.deaf else list(forced), "meta_info": {"hidden_states": states}}


def test_states_of_decoded_tokens_begin_with_the_last_of_the_prompt():
    text = Text("prose", tuple(range(10, 18)))
    assert decoded_states(Decoding(), text, 5).tolist() == [[4.0], [5.0], [6.0]]
    with pytest.raises(PointFailed, match="did not decode what the text says"):
        decoded_states(Decoding(deaf=True), text, 5)


def test_every_request_is_forced_to_its_next_token():
    so_far = [SimpleNamespace(output_ids=[]), SimpleNamespace(output_ids=[7, 8])]
    params = [{"tokens": tokens, "__req__": req} for tokens, req in zip(([3, 1], [7, 8, 2]), so_far, strict=True)]
    found = Forced.from_str(Forced.to_str())(torch.randn(2, 5), params)
    assert found.argmax(-1).tolist() == [3, 2]
    assert torch.isinf(found).sum() == 8


def test_retrieval_is_compared_with_the_same_ratio_without(tmp_path):
    arguments = ["--model", "m", "--profile", "p", "--ratio", "0.1", "0.2", "--ragged-args", "--ragged-pivots 3"]
    groups = groups_of(door.parser("retrieval").parse_args(arguments))
    assert [list(group) for group in groups] == [["token"], ["0.1", "0.1 + 128"], ["0.2", "0.2 + 128"]]
    flags = ["--ragged-reservoir", "1GiB", "--ragged-overlay", "128", "--ragged-pivots", "3"]
    assert (groups[2]["0.2"].flags, groups[2]["0.2 + 128"].flags) == ([], flags)
    text = 'sglang:ragged_pivot_questions_total{rank="0"} 6.0\nsglang:ragged_kept_ratio{rank="0"} 0.3\n'
    assert counts(text) == {"pivot_questions": 6, "pivot_answers": 0, "retrieved_rows": 0}
    results = Results(tmp_path / "r.json", "quality.retrieval", {"prompt": 1280, "row_bytes": 512})
    same = {"delta_nll": [0.1, 0.1], "agrees": [0.9, 0.9], "tokens": 100, "start_up": ""}
    for name, kl, step, (questions, answers, rows) in (
        ("token", 0.0, 40.0, (0, 0, 0)),
        (retrieval.key(0.15, 0), 0.1, 20.0, (0, 0, 0)),
        (retrieval.key(0.15, 64), 0.04, 30.0, (10, 4, 50)),
    ):
        asked = {"questions": questions, "answers": answers, "rows": rows}
        results.add(name, Measured(kl=[kl, kl], step_ms=[step, 2 * step, step], **asked, **same))
    (made,) = retrieval.tables(results)
    assert made.rows[1][1:] == ("0.1000 ± 0.0000", "", "0.1000", "0.900", "0.150", "", "", "20.0", "")
    assert made.rows[2][1:] == ("0.0400 ± 0.0000", "0.40", "0.1000", "0.900", "0.200", "0.40", "256", "30.0", "1.50")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--peers", "python", "--axis", "history"], 2),
        (["--axis", "history", "--interviews", "0"], "quality: --interviews must be at least 1, not 0"),
        (["--axis", "retrieval", "--profile", "none"], "quality: --profile none: no such file"),
    ],
)
def test_options_of_another_axis_and_numbers_out_of_range_are_refused(monkeypatch, arguments, status):
    monkeypatch.setattr(sys, "argv", ["quality", "--model", "m", *arguments])
    with pytest.raises(SystemExit) as ended:
        door.main()
    assert str(ended.value.code).startswith(str(status))
