"""What becomes of answers: cells and their intervals, the file that keeps them, tables and plot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.asking import AnsweredQuestion, sessions_at_once
from benchmarks.accuracy.cell import TOKEN, Cell, Key, cells_of, mean_of, without_hits
from benchmarks.accuracy.intervals import interval, of_mean
from benchmarks.accuracy.plots import draw, panels
from benchmarks.accuracy.store import Prompts, Results
from benchmarks.accuracy.tables import notes, tables
from benchmarks.harness.errors import SettingsError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SETTINGS = {"suite": "scbench", "model": "m", "segment": 256, "limit": None, "machine": {"torch": "2"}}
RAGGED = Key("ragged", "keydiff", "auto", 0.5)


def asked(session: str, score: float, *, task: str = "kv", before: int = 0, cached: int = 0) -> AnsweredQuestion:
    return AnsweredQuestion(session, task, 1, score, prompt=1000, sent_before=before, cached=cached, text="")


def cell(key: Key = TOKEN, task: str = "kv", score: float = 0.5, cached: float | None = 0.9, **others) -> Cell:
    values = dict(asked=10, low=score - 0.1, high=score + 0.1, mean_share=None, profile=None, wall_s=1.0) | others
    return Cell(key.pool, key.scorer, key.budgets, key.ratio, task, score, cached=cached, **values)


def wilson(right: int, count: int) -> tuple[float, float]:
    z, share = 1.959963984540054, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (3, 10), (191, 200)])
def test_right_or_wrong_answers_have_wilsons_interval(right, count):
    scores = [1.0] * right + [0.0] * (count - right)
    assert interval([f"s{i}" for i in range(count)], scores) == pytest.approx(wilson(right, count))


def test_scores_of_one_session_stand_or_fall_together():
    """Asking the same ten times says nothing new: the interval is that of the sessions' means."""
    rng = np.random.default_rng(0)
    means = rng.uniform(0.1, 0.9, 40)
    sessions = [f"s{i}" for i in range(40) for _ in range(10)]
    low, high = interval(sessions, [float(mean) for mean in means for _ in range(10)])
    half = 1.96 * means.std() / np.sqrt(40)
    assert low == pytest.approx(means.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(means.mean() + half, abs=0.1 * half)
    once = interval([f"s{i}" for i in range(40)], [float(mean) for mean in means])
    assert (low, high) == pytest.approx(once)


def test_long_sessions_weigh_more():
    """The mean is over questions. Here it is one of 0.1, 0.5 or 0.9, by how often the short session is drawn."""
    low, high = interval(["a"] * 3 + ["b"], [0.9, 0.9, 0.9, 0.1])
    assert (low, high) == pytest.approx((0.1, 0.9))
    assert interval(["a"] * 999 + ["b"] * 999, [0.4] * 999 + [0.6] * 999) == pytest.approx((0.4, 0.6))


def test_equal_scores_have_no_spread_and_a_single_session_says_nothing_of_others():
    assert interval(["a", "a", "b"], [0.3, 0.3, 0.3]) == (0.3, 0.3)
    assert interval(["a", "a"], [0.3, 0.4]) == (0.0, 1.0)


def test_the_same_scores_have_the_same_interval():
    scores = np.random.default_rng(1).uniform(size=30).tolist()
    names = [f"s{i // 3}" for i in range(30)]
    assert interval(names, scores) == interval(names, scores)


def test_the_interval_of_a_mean_over_tasks():
    assert of_mean([0.8], [0.5], [0.9]) == pytest.approx((0.5, 0.9))
    # Four tasks alike: half as wide.
    assert of_mean([0.5] * 4, [0.3] * 4, [0.6] * 4) == pytest.approx((0.4, 0.55))
    assert of_mean([0.2, 0.6], [0.2, 0.2], [0.2, 0.9]) == pytest.approx((0.4 - 0.2, 0.4 + 0.15))


def test_cells_are_means_by_task_and_cached_shares_of_prompts_that_could_hit():
    answers = [
        asked("a", 1.0, before=0, cached=0),
        asked("a", 0.5, before=500, cached=256),
        asked("b", 0.0, before=900, cached=768),
        # Sent before, but less than a segment.
        asked("b", 0.0, before=256, cached=0),
        asked("b", 1.0, task="mf", before=10),
    ]
    kv, mf = cells_of(RAGGED, answers, segment=256, mean_share=0.5, profile="d", wall_s=2.5)
    assert (kv.task, kv.score, kv.asked, kv.cached) == ("kv", 0.375, 4, 0.512)
    assert (kv.key, kv.mean_share, kv.profile, kv.wall_s) == (RAGGED, 0.5, "d", 2.5)
    assert (mf.task, mf.score, mf.asked, mf.cached) == ("mf", 1.0, 1, None)
    assert mean_of([kv, mf]).score == pytest.approx(0.6875)


def test_servers_without_a_hit_are_named():
    missed, no_chance = Key("ragged", "h2o", "auto", 0.3), Key("ragged", "h2o", "auto", 0.1)
    cells = [
        *(cell(), cell(task="mf", cached=0.0), cell(missed, cached=0.0), cell(missed, task="mf", cached=None)),
        *(cell(RAGGED, cached=0.1), cell(no_chance, cached=None)),
    ]
    assert without_hits(cells) == [missed]
    (line,) = notes(cells)
    assert line.startswith("* h2o, auto, ratio 0.3: no prompt found anything in the cache")
    scores = tables(SETTINGS, cells)[0]
    marked = [text for row in scores.rows for text in row if "*" in text]
    assert len(marked) == 1
    assert scores.rows[1][scores.columns.index("ratio 0.3")] == marked[0]


def test_tables_have_the_token_pool_first_then_scorers_by_ratio():
    keys = [Key("ragged", "keydiff", "auto", ratio) for ratio in (0.3, 0.5)]
    cells = [cell(keys[0], score=0.25), cell(keys[1], score=0.75), cell(score=0.875), cell(task="mf", score=0.625)]
    scores, by_task, cached = tables(SETTINGS, cells)
    assert scores.title == "scbench on m, segments of 256: mean over 2 tasks, 20 questions (95 % interval)"
    assert scores.columns == ("scorer, budgets", "ratio 0.5", "ratio 0.3")
    assert scores.rows[0] == ("token pool", "0.750 (0.68-0.82)", "0.750 (0.68-0.82)")
    assert scores.rows[1] == ("keydiff, auto", "0.750 (0.65-0.85)", "0.250 (0.15-0.35)")
    assert by_task.columns == ("server", "kv (10)", "mf (10)")
    assert by_task.rows[0] == ("keydiff, auto, ratio 0.3", "0.250 (0.15-0.35)", "")
    assert cached.rows[1] == ("keydiff, auto", "90%", "90%")
    (alone,) = tables(SETTINGS, [cell(cached=None)])
    assert alone.rows == (("token pool", "0.500 (0.40-0.60)"),)


def test_panels_are_scorers_or_tasks():
    one, other = Key("ragged", "keydiff", "auto", 0.3), Key("ragged", "h2o", "auto", 0.3)
    tasks = [cell(key, task) for key in (TOKEN, one) for task in ("kv", "mf")]
    assert [title for title, _ in panels(tasks)] == ["mean of 2 tasks", "kv", "mf"]
    scorers = [*tasks, cell(other)]
    assert [(title, len(own)) for title, own in panels(scorers)] == [("keydiff", 4), ("h2o", 3)]
    assert [title for title, _ in panels([cell(one)])] == ["keydiff: kv"]
    assert [title for title, _ in panels([cell()])] == ["kv"]


def test_a_plot_is_drawn_of_whatever_is_there(tmp_path):
    draw([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    for cells in ([cell()], [cell(RAGGED)], [cell(), cell(RAGGED), cell(RAGGED, "mf")]):
        draw(cells, tmp_path / "some.png")
        assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "some.png").unlink()


class Long:
    """A session whose longest prompt is known."""

    def __init__(self, longest: int) -> None:
        self.tokens = longest

    def longest(self) -> int:
        return self.tokens


def test_no_more_sessions_at_once_than_the_pool_holds():
    talks = [Long(1000), Long(900), Long(10)]
    # 1,010 tokens take four segments, and one more for a question's own.
    assert sessions_at_once(talks, 10, 2 * 1280, 8, 256) == 2
    assert sessions_at_once(talks, 10, 2 * 1280 - 1, 8, 256) == 1
    assert sessions_at_once(talks, 10, 10, 8, 256) == 1
    assert sessions_at_once(talks, 10, 10**6, 2, 256) == 2
    assert sessions_at_once(talks, 10, 10**6, 8, 256) == 3


def test_cells_survive_and_answers_stand_beside(tmp_path):
    results = Results.open(tmp_path / "new.json", SETTINGS, {"date": "today"})
    results.prompts = Prompts(sessions=2, questions=4, cut=1, max_length=800)
    assert not results.path.exists()
    results.add([cell()], [asked("a", 0.5)])
    results.add([cell(RAGGED), cell(RAGGED, "mf")], [asked("a", 1.0), asked("b", 0.0)])
    again = Results.open(tmp_path / "new.json", SETTINGS, {"date": "tomorrow"})
    assert again.cells == results.cells
    assert again.prompts == results.prompts
    assert again.about == {"date": "today"}
    assert again.known == {TOKEN, RAGGED}
    lines = [json.loads(line) for line in results.requests.read_text().splitlines()]
    assert [(line["pool"], line["session"], line["score"]) for line in lines] == [
        *(("token", "a", 0.5), ("ragged", "a", 1.0), ("ragged", "b", 0.0))
    ]


def test_a_file_of_other_settings_is_refused_with_what_differs(tmp_path):
    path = tmp_path / "new.json"
    Results.open(path, SETTINGS, {}).add([cell()], [])
    other = SETTINGS | {"limit": 5, "machine": {"torch": "3"}}
    with pytest.raises(SettingsError, match=r"limit: there None, here 5; machine\.torch: there 2, here 3") as caught:
        Results.open(path, other, {})
    assert "suite" not in str(caught.value)
    assert "\n" not in str(caught.value)
    # A file that does not say is not compared.
    Results.open(path, SETTINGS | {"new": 1}, {})


def test_a_file_without_cells_is_no_reason_to_refuse(tmp_path):
    path = tmp_path / "new.json"
    Results.open(path, SETTINGS, {}).write()
    assert Results.open(path, SETTINGS | {"limit": 5}, {}).settings["limit"] == 5


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"settings": {}, "cells": [{"pool": "token"}]}', "\x00"])
def test_a_file_that_is_none_of_ours_is_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="cannot be read as results"):
        Results.open(path, SETTINGS, {})
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["", "none/new.json"])
def test_a_file_goes_into_a_folder_that_is_there(tmp_path, name):
    with pytest.raises(SettingsError, match="folder that exists"):
        Results.open(tmp_path / name, SETTINGS, {})


def test_another_profile_of_the_same_name_is_refused(tmp_path):
    results = Results.open(tmp_path / "new.json", SETTINGS, {})
    results.cells = [cell(RAGGED, profile="abc"), cell(profile=None)]
    results.check_profile(RAGGED, lambda: "abc")
    # Cells without a digest were measured before digests were recorded, or without a profile.
    results.check_profile(TOKEN, lambda: pytest.fail("not needed"))
    with pytest.raises(SettingsError, match="with the profile abc, and that is xyz now"):
        results.check_profile(RAGGED, lambda: "xyz")


def test_the_files_of_this_repository_can_be_read_and_gone_on_with():
    paths = sorted(RESULTS.glob("accuracy*.json"))
    assert paths
    for path in paths:
        results = Results.load(path)
        assert results.cells
        for one in results.cells:
            assert one.low <= one.score <= one.high
            if results.settings["suite"] == "recall":
                low, high = wilson(round(one.score * one.asked), one.asked)
                assert (one.low, one.high) == pytest.approx((low, high), abs=1e-4)
        assert tables(results.settings, results.cells)
