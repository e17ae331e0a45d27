"""The page of all results, from result files that are made up, missing or broken."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.multi_turn.plots import colour, draw
from benchmarks.multi_turn.store import Store
from benchmarks.multi_turn.tables import overview
from benchmarks.report.__main__ import RESULTS
from benchmarks.report.kinds import HEADLINE, KINDS
from benchmarks.report.multi_turn import PATTERN
from benchmarks.report.single_files import OTHERS, sections
from tests.multi_turn_points import point

HTML = "{http://www.w3.org/1999/xhtml}"
SETTINGS = {"shape": "chat", "clients": [4], "rounds": 3, "request_length": 60, "output_length": 3, "repeats": 1}


def report(results: Path, folder: Path) -> tuple[ElementTree.Element, str, str]:
    """The page's root, the document and what was printed."""
    command = [sys.executable, "-m", "benchmarks.report", "--results", str(results)]
    command += ["--output", str(folder / "report.html"), "--document", str(folder / "results.md")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    page = (folder / "report.html").read_text()
    return ElementTree.fromstring(page), (folder / "results.md").read_text(), finished.stdout


@pytest.fixture
def results(tmp_path):
    """A folder with one multi-turn benchmark."""
    folder = tmp_path / "results" / "multi-turn-chat"
    manifest = {"settings": SETTINGS, "date": "2026-01-02", "command": "python -m benchmarks.multi_turn --seed 5"}
    store = Store.open(folder, manifest)
    for one in (point("token"), point("ragged@0.5"), point("token", 1, rejected="hit rate <0.1> & less")):
        store.add(one)
    draw(store.points, folder)
    return tmp_path / "results"


def test_a_page_is_complete_in_itself(results, tmp_path):
    root, document, printed = report(results, tmp_path)
    images = [image.get("src") for image in root.iter(f"{HTML}img")]
    assert len(images) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in images)
    assert all(image.get("alt") for image in root.iter(f"{HTML}img"))
    assert not list(root.iter(f"{HTML}script"))
    assert not list(root.iter(f"{HTML}link"))
    text = "".join(root.itertext())
    for part in ("python -m benchmarks.multi_turn --seed 5", "2026-01-02", "hit rate <0.1> & less", "ragged@0.5"):
        assert part in text
    targets = {section.get("id") for section in root.iter(f"{HTML}section")}
    assert {link.get("href").removeprefix("#") for link in root.iter(f"{HTML}a")} == targets
    assert "![Time to first token" in document
    assert "](results/multi-turn-chat/ttft.svg)" in document
    assert "python -m benchmarks.multi_turn --seed 5" in document
    assert "missing: Prefill and decode" in printed


def test_missing_files_are_named(tmp_path):
    (tmp_path / "results").mkdir()
    root, document, printed = report(tmp_path / "results", tmp_path)
    missing = [p for p in root.iter(f"{HTML}p") if p.get("class") == "missing"]
    assert len(missing) == len(KINDS) + 1
    assert "the benchmark has not been run" in document
    assert printed.count("missing:") == len(KINDS) + 1


def test_broken_files_are_named_and_do_not_stop_the_page(results, tmp_path):
    (results / "demo-cpu.json").write_text("{")
    (results / "step-speed-cpu.json").write_text(json.dumps({"options": {}}))
    (results / "something.json").write_text("{}")
    (results / "multi-turn-broken").mkdir()
    root, document, _ = report(results, tmp_path)
    text = "".join(root.itertext())
    assert "demo-cpu.json cannot be read" in text
    assert "step-speed-cpu.json cannot be read" in text
    assert "something.json" in text
    assert "multi-turn-broken has no readable manifest.json" in document


def test_the_results_of_this_repository_make_a_page(tmp_path):
    root, _, _ = report(RESULTS, tmp_path)
    assert "cannot be read" not in "".join(root.itertext())
    titles = [title.text for title in root.iter(f"{HTML}h2")]
    assert any(title.startswith("Accuracy") for title in titles)


def named(section) -> set[str]:
    """Files that a section shows, by what its tables are called."""
    return {f"{table.title.split(':')[0]}.json" for table in section.tables}


def test_every_result_file_has_a_table():
    """With a file that no kind has a pattern for there would be one section more."""
    made = sections(RESULTS)
    assert [section.title for section in made] == [kind.title for kind in KINDS]
    assert set().union(*map(named, made)) == {path.name for path in RESULTS.glob("*.json")}
    assert all(not section.notes and not section.missing for section in made)
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert folders == {path.name for path in RESULTS.glob(PATTERN) if path.is_dir()}


def test_a_file_of_no_kind_is_found(tmp_path):
    (tmp_path / "something.json").write_text("{}")
    assert sections(tmp_path)[-1].title == OTHERS


def test_the_files_of_the_readme_are_first(tmp_path):
    root, _, _ = report(RESULTS, tmp_path)
    assert next(root.iter(f"{HTML}h2")).text == KINDS[0].title
    assert named(sections(RESULTS)[0]) == set(HEADLINE)
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert all(name in readme for name in HEADLINE)


def test_results_and_their_commands_are_listed():
    """benchmarks/results/README.md has every file."""
    page = (RESULTS / "README.md").read_text()
    assert [path.name for path in RESULTS.glob("*.json") if f"`{path.name}`" not in page] == []


def test_a_folder_that_is_not_there_is_one_line_and_status_1(tmp_path):
    command = [sys.executable, "-m", "benchmarks.report", "--results", str(tmp_path / "none")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr.strip() == f"report: {tmp_path / 'none'} is no folder"


def test_the_overview_compares_with_the_token_pool_of_the_same_clients():
    slow = replace(point("ragged@0.5"), answers=tuple(replace(a, ttft_s=3 * a.ttft_s) for a in point("token").answers))
    rows = overview([("chat", [point("token"), slow, point("ragged@0.3", clients=8)])])
    mean, median = (rows.columns.index(f"TTFT ms {name}") for name in ("mean", "p50"))
    token, ragged, alone = rows.rows
    assert (token[0], token[1], token[mean], token[median]) == ("chat, 4", "token", "250", "250")
    assert (ragged[1], ragged[mean], ragged[median]) == ("ragged@0.5", "750 (3.00)", "750 (3.00)")
    # No token pool with as many clients: nothing to compare with.
    assert (alone[0], alone[mean]) == ("chat, 8", "250")


def test_a_pool_has_one_colour_in_all_plots():
    assert colour("token") != colour("ragged@1") != colour("ragged@0.3")
    assert colour("ragged@0.3") == colour("ragged@0.30")
