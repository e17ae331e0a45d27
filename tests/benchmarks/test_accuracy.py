"""Accuracy of the recall suite: prompts, intervals, cells, and failures in one line."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy.cells import TOKEN, Cell, Key, cell_of, notes, tables
from benchmarks.accuracy.conversations import Answered, ask, conversations_at_once, longest_prompt
from benchmarks.harness import machine
from benchmarks.harness.results import Results
from benchmarks.recall import MODEL
from benchmarks.recall.questions import interviews
from benchmarks.recall.task import TOKEN_ID

RAGGED = Key("ragged", "keydiff", "uniform", 0.5)
SETTINGS = {"model": "m", "segment": 256}


def answered(right: bool, *, cached: int = 0) -> Answered:
    return Answered(right, prompt=1000, cached=cached)


def cell(key: Key = TOKEN, score: float = 0.5, cached: float | None = 0.9) -> Cell:
    return Cell(
        key.pool, key.scorer, key.budgets, key.ratio, score, 10, score - 0.1, score + 0.1, cached, None, None, 1
    )


def wilson(right: int, count: int) -> tuple[float, float]:
    z, share = 1.959963984540054, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (3, 10), (191, 200)])
def test_scores_have_wilsons_interval(right, count):
    every = [answered(number < right) for number in range(count)]
    found = cell_of(RAGGED, every, mean_share=0.5, profile="d", wall_s=2.5)
    assert (found.score, found.asked) == (pytest.approx(right / count), count)
    assert (found.low, found.high) == pytest.approx(wilson(right, count), abs=1e-4)


def test_cached_shares_are_means_over_prompts():
    every = [answered(True), answered(True, cached=256), answered(True, cached=768)]
    assert cell_of(RAGGED, every, mean_share=None, profile=None, wall_s=1).cached == 0.3413


def test_a_server_without_a_hit_is_marked():
    cells = [cell(), cell(RAGGED, 0.25, cached=0.0), cell(Key("ragged", "h2o", "uniform", 0.3), cached=None)]
    (line,) = notes(cells)
    assert line.startswith("* keydiff, uniform, ratio 0.5: no prompt found anything in the cache")
    scores, _ = tables(SETTINGS, cells)
    assert list(scores.columns) == ["scorer, budgets", "ratio 0.5", "ratio 0.3"]
    assert scores.rows[0] == ["token pool", "0.500 (0.40-0.60)", "0.500 (0.40-0.60)"]
    assert scores.rows[1] == ["keydiff, uniform", "0.250 (0.15-0.35)*", ""]


class Answering:
    """A server that caches all that it was sent, and knows every second fact."""

    def __init__(self, talks) -> None:
        self.values = {tuple(talk.prompt(fact)): fact.value for talk in talks for fact in talk.facts}
        self.sent: list[list[int]] = []

    def generate(self, prompt, new_tokens):
        cached = 0 if not self.sent else len(self.sent[0])
        self.sent.append(list(prompt))
        value = self.values.get(tuple(prompt), "w1") if len(self.sent) % 2 else "w1"
        return {"output_ids": [TOKEN_ID[value]], "meta_info": {"cached_tokens": cached}}


def test_answers_are_right_if_their_token_is_the_facts():
    talks = interviews(1, 4, seed=7)
    server = Answering(talks)
    found = ask(server, talks, at_once=1)
    # The conversation goes first.
    assert [one.right for one in found] == [False, True, False, True]
    assert server.sent == [list(talks[0].history), *(talks[0].prompt(fact) for fact in talks[0].facts)]


def test_no_more_conversations_at_once_than_the_pool_holds():
    talks = interviews(3, 2, seed=1)
    each = (-(-(longest_prompt(talks) + 1) // 256) + 1) * 256
    assert conversations_at_once(talks, 2 * each, 8, 256) == 2
    assert conversations_at_once(talks, 2 * each - 1, 8, 256) == 1
    assert conversations_at_once(talks, 10, 8, 256) == 1
    assert conversations_at_once(talks, 10**6, 2, 256) == 2
    assert conversations_at_once(talks, 10**6, 8, 256) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-running-requests", "0"], "--max-running-requests must be at least 1"),
        (["--segment", "100"], "multiple of 16"),
        (["--ratio", "0.5", "0.5"], "--ratio: each value once"),
        (["--scorer", "keydif"], "unknown scorer 'keydif'"),
        (["--budgets", "covrage"], "--budgets covrage: covrage is no file, and no kind"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_a_server_starts(monkeypatch, tmp_path, arguments, said):
    monkeypatch.setattr(accuracy, "Started", lambda *_: pytest.fail("a server was about to be started"))
    common = ["accuracy", "--output", str(tmp_path / "a.json"), "--conversations", "1", "--budgets", "uniform"]
    monkeypatch.setattr(sys, "argv", [*common, "--ratio", "0.5", *arguments])
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    assert str(ended.value.code).startswith("accuracy: ")
    assert said in ended.value.code
    assert "\n" not in ended.value.code


def test_finished_cells_are_not_run_again(monkeypatch, capsys, tmp_path):
    path = tmp_path / "a.json"
    command = ["accuracy", "--output", str(path), "--conversations", "1", "--json"]
    command += ["--scorer", "keydiff", "--budgets", "uniform", "--ratio", "0.5"]
    monkeypatch.setattr(sys, "argv", command)
    options = accuracy.parser().parse_args(command[1:])
    settings = {name: getattr(options, name) for name in accuracy.SETTINGS}
    settings |= machine.model_settings(str(MODEL)) | {"machine": machine.describe()}
    results = Results.open(path, "accuracy", settings)
    for key in (TOKEN, RAGGED):
        results.add(str(key), cell(key, score=1.0))
    monkeypatch.setattr(accuracy, "Started", lambda *_: pytest.fail("a server was about to be started"))
    accuracy.main()
    assert json.loads(capsys.readouterr().out)["entries"]["token pool"]["score"] == 1.0
    monkeypatch.setattr(sys, "argv", [*command, "--seed", "7"])
    with pytest.raises(SystemExit, match=r"seed: there \d+, here 7"):
        accuracy.main()
