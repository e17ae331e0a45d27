"""Parts of benchmarks.quality that need no server."""

from __future__ import annotations

import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from benchmarks.harness.errors import SettingsError
from benchmarks.quality import __main__ as door
from benchmarks.quality import facts, head, peering, plot, table, texts
from benchmarks.quality.configuration import Configuration, configurations
from benchmarks.quality.measured import figures
from benchmarks.quality.served import Answers
from benchmarks.quality.store import Results
from benchmarks.quality.tasks import Tasks


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


def test_the_head_is_the_models_own_or_its_embeddings(tmp_path):
    save_file({"model.embed_tokens.weight": torch.ones(3, 2)}, str(tmp_path / "model.safetensors"))
    assert head.load_head(tmp_path).tolist() == [[1, 1]] * 3
    save_file(
        {"lm_head.weight": torch.zeros(3, 2), "model.embed_tokens.weight": torch.ones(3, 2)},
        str(tmp_path / "model.safetensors"),
    )
    assert head.load_head(tmp_path).tolist() == [[0, 0]] * 3
    save_file({"other": torch.ones(1)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(head.HeadMissing, match=r"none of lm_head\.weight"):
        head.load_head(tmp_path)


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


def test_long_texts_are_shown_by_position(tmp_path):
    results = Results(tmp_path / "q.json", {"segment": 16, "text_tokens": 130}, {})
    console = Console(record=True, width=200)
    for segments, shown in (([0.25] * 6, False), ([0.25] * 8, True)):
        results.served = {Configuration("gate", "auto", 0.3): result(1.0, False) | {"segments": [segments]}}
        results.show(table.tables(results), console, as_json=False)
        assert ("KL by position" in (text := console.export_text())) == shown
    assert re.search(r"16 to 32.*32 to 64.*64 to 128.*128 to 130", text)
    assert text.count("0.2500") == 4


def test_results_go_on_where_they_were_and_refuse_others(tmp_path):
    path = tmp_path / "q.json"
    results = Results.open(path, {"model": "m"}, {"command": "c"})
    results.add(Configuration.token(), result(0.0, True))
    one, narrow = Configuration("gate", "auto", 0.3), Configuration("gate", "auto", 0.6, "fp8_e4m3")
    results.add(one, result(1.0, False))
    results.add(narrow, result(1.0, False))
    results.add_peer(
        "KeyDiff", 0.3, {"texts": {"continuation_nll": [1.0]}, "right": {k: [[False]] for k in facts.KINDS}}
    )
    again = Results.open(path, {"model": "m"}, {})
    assert again.known == {Configuration.token(), one, narrow}
    assert json.loads(again.text()) == json.loads(path.read_text())
    with pytest.raises(SettingsError, match="model: there m, here other"):
        Results.open(path, {"model": "other"}, {})
    path.with_suffix(".txt").write_text("{}")
    with pytest.raises(SettingsError, match="cannot be read"):
        Results.open(path.with_suffix(".txt"), {}, {})
    console = Console(record=True, width=200)
    again.show(table.tables(again), console, as_json=False)
    shown = console.export_text()
    assert "gate, auto, ratio 0.3" in shown
    assert "kvpress KeyDiff" in shown
    plot.draw(again, tmp_path / "q.png")
    assert (tmp_path / "q.png").stat().st_size > 10000


def test_the_reference_is_kept_for_the_same_settings_only(tmp_path):
    results = Results(tmp_path / "q.json", {"model": "m"}, {})
    assert results.load_reference() is None
    states = [torch.rand(3, 2), torch.rand(4, 2)]
    results.keep_reference(states)
    assert all(map(torch.equal, results.load_reference(), states))
    assert Results(results.path, {"model": "other"}, {}).load_reference() is None
    results.reference.write_bytes(b"no tensors")
    with pytest.raises(SettingsError, match="delete it"):
        results.load_reference()


def test_configurations_are_flags_of_the_server():
    made = configurations(["gate", "default"], ["auto", "p/{scorer}.safetensors"], [0.3])
    assert [str(one) for one in made][:2] == ["gate, auto, ratio 0.3", "gate, p/{scorer}.safetensors, ratio 0.3"]
    assert made[1].flags(64)[:4] == ["--ragged-scorer", "gate", "--ragged-profile", "p/gate.safetensors"]
    assert "--ragged-scorer" not in made[2].flags(64)
    assert Configuration.token().flags(64) == []
    wide, narrow = configurations(["gate"], ["auto"], [0.6], ["auto", "fp8_e4m3"])
    assert (str(wide), str(narrow)) == ("gate, auto, ratio 0.6", "gate, auto, fp8_e4m3, ratio 0.6")
    assert "--kv-cache-dtype" not in wide.flags(64)
    assert narrow.flags(64)[-4:] == ["--kv-cache-dtype", "fp8_e4m3", "--ragged-fit", "none"]
    plain, fitted = configurations(["gate"], ["auto"], [0.3], fits=["none", "auto"])
    assert (str(plain), str(fitted)) == ("gate, auto, ratio 0.3", "gate, auto, fitted, ratio 0.3")
    assert fitted.flags(64)[-2:] == ["--ragged-fit", "auto"]


FAKE_PEERS = """#!{python}
import json, sys
order = json.load(sys.stdin)
for method, share in order["wanted"][:{count}]:
    answers = [[[0]] * len(i["questions"]) for i in order["interviews"]]
    nll = [[1.0, 2.0]] * len(order["texts"])
    print(json.dumps(dict(method=method, share=share, nll=nll, answers=answers)), flush=True)
if {count} < len(order["wanted"]):
    sys.exit("out of memory")
"""


def fake_peers(path: Path, count: int) -> Path:
    """An interpreter that answers as `peers.py` does, for so many of what is wanted."""
    path.write_text(FAKE_PEERS.format(python=sys.executable, count=count))
    path.chmod(0o755)
    return path


def test_peers_that_fail_keep_what_they_measured_and_go_on_from_there(tmp_path):
    tokenizer, results = Words(), Results(tmp_path / "q.json", {}, {})
    tokenizer.encode("apple")
    ask = partial(peering.ask_peers, model="m", tasks=tasks(), tokenizer=tokenizer, ratios=[0.5, 0.3], results=results)
    with pytest.raises(peering.PeersFailed, match=r"the peers failed \(1\): out of memory"), Progress() as progress:
        ask(fake_peers(tmp_path / "python", 3), progress=progress)
    assert list(Results.load(results.path).peers) == [(method, 0.5) for method in peering.METHODS[:3]]
    with Progress() as progress:
        ask(fake_peers(tmp_path / "python", 2 * len(peering.METHODS) - 3), progress=progress)
    assert set(results.peers) == {(method, share) for method in peering.METHODS for share in (0.5, 0.3)}
    found = results.peers["KeyDiff", 0.3]
    assert found["texts"]["continuation_nll"] == [1.5]
    assert found["right"] == {kind: [[True, True]] for kind in facts.KINDS}


def test_the_peers_program_has_every_method():
    written = peering.SCRIPT.read_text()
    assert [method for method in peering.METHODS if f'    "{method}": lambda' not in written] == []


def test_peers_without_an_environment_are_one_line(tmp_path):
    with pytest.raises(peering.PeersFailed, match="make peers"), Progress() as progress:
        peering.ask_peers(tmp_path / "python", "m", tasks(), Words(), [0.3], Results(tmp_path, {}, {}), progress)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ("--axis compression", "--peers", "[quality.json]")),
        (["--axis", "history"], ("--axis history", "--bounds", "[history.json]")),
        (["--axis=retrieval"], ("--axis retrieval", "--overlay", "[retrieval.json]")),
    ],
)
def test_each_axis_shows_its_own_options(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["quality", *arguments, "--help"])
    with pytest.raises(SystemExit):
        door.main()
    shown = capsys.readouterr().out
    assert all(text in shown for text in said)
    assert sum(option in shown for option in ("--peers", "--bounds", "--overlay")) == 1


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--axis", "depth"], 2),
        (["--peers", "python", "--axis", "history"], 2),
        (["--axis", "history", "--interviews", "0"], "quality: --interviews must be at least 1, not 0"),
        (
            ["--axis", "retrieval", "--profile", "p", "--overlay", "64", "0"],
            "quality: --overlay must be at least 1, not 0",
        ),
        (["--axis", "retrieval", "--profile", "none"], "quality: --profile none: no such file"),
    ],
)
def test_options_of_another_axis_and_numbers_out_of_range_are_refused(monkeypatch, arguments, status):
    monkeypatch.setattr(sys, "argv", ["quality", "--model", "m", *arguments])
    with pytest.raises(SystemExit) as ended:
        door.main()
    assert str(ended.value.code).startswith(str(status))
