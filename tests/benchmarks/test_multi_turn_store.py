"""The folder of a multi-turn benchmark: what is written can be read, resumed, and is not mixed with other settings."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from benchmarks.harness.errors import SettingsError
from benchmarks.multi_turn import __main__ as door
from benchmarks.multi_turn import many_clients as multi_turn
from benchmarks.multi_turn.plots import PLOTS, draw
from benchmarks.multi_turn.point import Point
from benchmarks.multi_turn.schedule import Schedule
from benchmarks.multi_turn.store import Store
from benchmarks.multi_turn.tables import by_round, rejections, totals
from benchmarks.multi_turn.writers import RecallWriter
from tests.multi_turn_points import point

MANIFEST = {"settings": {"clients": [4], "seed": 1}, "date": "2026-01-02", "command": "python -m benchmarks.multi_turn"}


def options(*arguments: str):
    return door.parser().parse_args(["--clients", "4", "--request-rate", "inf", *arguments])


def test_points_survive_the_round_trip(tmp_path):
    store = Store.open(tmp_path / "new", MANIFEST)
    points = [point("token"), point("ragged@0.5"), point("token", 1, rejected="too few")]
    for one in points:
        store.add(one)
    assert Store.open(tmp_path / "new", MANIFEST).points == points
    assert Store.load(tmp_path / "new").points == points
    assert Point.from_json(json.loads(json.dumps(points[0].to_json()))) == points[0]


def test_the_csv_has_a_row_for_each_round(tmp_path):
    store = Store.open(tmp_path / "new", MANIFEST)
    store.add(point("ragged@0.5"))
    store.add(point("token", rejected="too few"))
    with (tmp_path / "new" / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["pool"], row["round"]) for row in rows] == [
        *(("ragged@0.5", str(number)) for number in (1, 2, 3)),
        ("token", ""),
    ]
    assert float(rows[1]["cached_share"]) == pytest.approx(0.45)
    assert rows[0]["hit_rate"] == ""
    assert rows[3]["rejected"] == "too few"


def test_a_line_that_was_cut_short_is_dropped_and_the_next_point_follows_cleanly(tmp_path):
    store = Store.open(tmp_path / "new", MANIFEST)
    store.add(point("token"))
    with (tmp_path / "new" / "points.jsonl").open("a") as file:
        file.write('{"key": {"pool": "ragged@0.5", "cli')
    again = Store.open(tmp_path / "new", MANIFEST)
    assert again.points == [point("token")]
    again.add(point("ragged@0.5"))
    assert Store.load(tmp_path / "new").points == [point("token"), point("ragged@0.5")]


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path):
    store = Store.open(tmp_path / "new", MANIFEST)
    path = tmp_path / "new" / "points.jsonl"
    path.write_text("nonsense\n")
    store.add(point("token"))
    with pytest.raises(SettingsError, match="line 1"):
        Store.open(tmp_path / "new", MANIFEST)


def test_other_settings_are_refused_in_one_line_that_names_them(tmp_path):
    Store.open(tmp_path / "new", MANIFEST).add(point("token"))
    other = MANIFEST | {"settings": {"clients": [8], "seed": 1}}
    with pytest.raises(SettingsError, match=r"clients: there \[4\], here \[8\]") as caught:
        Store.open(tmp_path / "new", other)
    assert "seed" not in str(caught.value)
    assert "\n" not in str(caught.value)
    # What is for readers only may differ.
    assert len(Store.open(tmp_path / "new", MANIFEST | {"date": "later"}).points) == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SettingsError, match="no benchmark's folder"):
        Store.open(tmp_path, MANIFEST)
    with pytest.raises(SettingsError, match="no readable manifest"):
        Store.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_finished_points_are_not_measured_again_and_pools_take_turns(tmp_path):
    chosen = options("--pools", "token,ragged@0.5", "--repeats", "2", "--rounds", "2", "--request-length", "40")
    pools, _ = multi_turn.pools_of(chosen)
    store = Store.open(tmp_path / "new", MANIFEST)
    benchmark = multi_turn.Benchmark(chosen, Schedule.of(chosen, pools, RecallWriter()), store)
    assert [(key.pool, key.repeat) for _, key in benchmark.remaining()] == [
        ("token", 0),
        ("ragged@0.5", 0),
        ("token", 1),
        ("ragged@0.5", 1),
    ]
    store.add(point("token"))
    store.add(point("ragged@0.5", rejected="too few"))
    assert [(key.pool, key.repeat) for _, key in benchmark.remaining()] == [("token", 1), ("ragged@0.5", 1)]


def test_options_that_change_figures_change_the_settings_and_others_do_not():
    base = options()
    pools, _ = multi_turn.pools_of(base)
    settings = multi_turn.settings_of(base, pools)
    assert settings == multi_turn.settings_of(options("--json", "--output", "elsewhere"), pools)
    for changed in (["--seed", "2"], ["--kv-bytes", "1GiB"], ["--request-rate", "2"], ["--shape", "fork"]):
        assert settings != multi_turn.settings_of(options(*changed), pools)
    json.dumps(settings, allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--clients", "4", "4"], "different numbers"),
        (["--clients", "0"], "at least 1"),
        (["--request-rate", "0"], "greater than 0"),
        (["--request-rate", "nan"], "greater than 0"),
        (["--min-load", "1.5"], "shares from 0 to 1"),
        (["--pools", "token,token"], "once only"),
        (["--pools", "token,half"], "is no pool"),
        (["--url", "token"], "POOL=http"),
        (["--kv-bytes", "lots"], "cannot read 'lots'"),
        (["--rounds", "60"], "the model's context is 8192"),
        (["--shape", "fork", "--rounds", "2"], "power of two"),
    ],
)
def test_bad_options_end_with_one_line_and_status_1(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["multi_turn", "--clients", "4", *arguments, "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        door.main()
    said = ended.value.code
    assert said.startswith("multi_turn: ")
    assert message in said
    assert "\n" not in said
    assert not (tmp_path / "new").exists()


def test_plots_are_drawn_from_what_counts(tmp_path):
    points = [point(pool, repeat, clients=n) for n in (4, 8) for repeat in (0, 1) for pool in ("token", "ragged@0.5")]
    paths = draw([*points, point("ragged@0.3", rejected="too few")], tmp_path)
    assert sorted(path.stem for path in paths) == sorted(PLOTS)
    first = {path: path.read_text() for path in paths}
    assert all("<svg" in text and "ragged@0.5" in text for text in first.values())
    assert not any("ragged@0.3" in text for text in first.values())
    draw([*points, point("ragged@0.3", rejected="too few")], tmp_path)
    assert first == {path: path.read_text() for path in paths}
    assert draw([point("token", rejected="too few")], tmp_path / "none") == []


def test_tables_name_what_was_rejected():
    points = [point("token"), point("ragged@0.5", rejected="hit rate 0.1")]
    total = totals(points)
    assert total.rows[0][:4] == ("token", "4", "1/1", "3,072")
    assert set(total.rows[1][3:]) == {"rejected"}
    assert all(len(row) == len(total.columns) for row in total.rows)
    per_round = by_round(points, 4)
    assert len(per_round.rows) == 3
    assert not any("ragged" in column for column in per_round.columns)
    assert rejections(points) == ["ragged@0.5, 4 clients, run 1: hit rate 0.1"]


def test_pools_of_different_bytes_are_not_compared(tmp_path):
    chosen = options("--pools", "token,ragged@0.5", "--request-length", "40")
    pools, _ = multi_turn.pools_of(chosen)
    store = Store.open(tmp_path / "new", MANIFEST)
    benchmark = multi_turn.Benchmark(chosen, Schedule.of(chosen, pools, RecallWriter()), store)
    store.add(point("token"))
    # The ragged pool is a whole number of slabs, and a point that failed early never knew its bytes.
    for near in (int(24 * 2**20 * 0.95), 0):
        benchmark.check_bytes(replace(point("ragged@0.5"), kv_bytes=near))
    with pytest.raises(SettingsError, match="same bytes"):
        benchmark.check_bytes(replace(point("ragged@0.5"), kv_bytes=12 * 2**20))


def test_a_folder_without_a_point_takes_other_settings(tmp_path):
    Store.open(tmp_path / "new", MANIFEST)
    other = MANIFEST | {"settings": {"clients": [8], "seed": 1}}
    assert Store.open(tmp_path / "new", other).points == []
    assert Store.load(tmp_path / "new").manifest["settings"] == other["settings"]
