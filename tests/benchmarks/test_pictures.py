"""Committed pictures are what the code draws, are well-formed, and stay readable."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.pictures.__main__ import FOLDER, NAMES, draw, main
from benchmarks.pictures.chart import log_scale
from benchmarks.pictures.conversations import read_rows
from benchmarks.pictures.quality import peer_curves
from benchmarks.pictures.svg import PALETTE, WIDTH, Drawing

ROOT = Path(__file__).parent.parent.parent
SMALLEST = 11
"""Pixels of the smallest text."""

AVERAGE_WIDTH = 0.55
"""Width of a letter / font size, in wide fonts."""


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {name: draw(name) for name in NAMES}


def test_committed_pictures_are_what_the_code_draws(drawn):
    assert {name for name in NAMES if (FOLDER / f"{name}.svg").read_text() != drawn[name]} == set()


def test_there_are_no_other_pictures():
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.svg" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_readable(name, drawn):
    """No background, both colour schemes, a title, no small text, and nothing outside of the picture."""
    picture = ElementTree.fromstring(drawn[name])
    space = "{http://www.w3.org/2000/svg}"
    assert picture.find(f"{space}title").text
    assert "prefers-color-scheme:dark" in picture.find(f"{space}style").text
    height = float(picture.get("height"))
    for text in picture.iter(f"{space}text"):
        assert float(text.get("font-size")) >= SMALLEST
        assert 0 <= float(text.get("y")) <= height
        width = len(text.text) * float(text.get("font-size")) * AVERAGE_WIDTH
        left = float(text.get("x")) - width * {None: 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert 0 <= left <= left + width <= WIDTH, text.text
    for rectangle in picture.iter(f"{space}rect"):
        x, y, wide, high = (float(rectangle.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= WIDTH
        assert 0 <= y <= y + high <= height
    used = set(re.findall(r"\b[fs]-([a-z-]+)", " ".join(re.findall(r'class="([^"]*)"', drawn[name]))))
    assert used <= set(PALETTE)


def test_pages_give_pictures_a_text():
    """Markdown that embeds a picture says what it shows."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [text for page in pages for text in re.findall(r"!\[([^\]]*)\]\([^)]*pictures/", page.read_text())]
    assert texts
    assert all(len(text) > 20 for text in texts)


def test_check_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.pictures.__main__.FOLDER", tmp_path / "pictures")
    monkeypatch.setattr("benchmarks.pictures.__main__.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.pictures.__main__.draw", lambda name: f"<{name}/>")
    assert main(["states", "--check"]) == 1
    assert not (tmp_path / "pictures").exists()
    assert main(["states"]) == 0
    assert main(["states", "--check"]) == 0
    (tmp_path / "pictures" / "states.svg").write_text("changed")
    assert main(["states", "--check"]) == 1
    assert "differs pictures/states.svg" in capsys.readouterr().out


def test_text_is_escaped():
    drawing = Drawing(10, 'a "title" & <more>')
    drawing.text(0, 5, "a < b & c")
    picture = ElementTree.fromstring(drawing.render())
    assert picture.get("aria-label") == 'a "title" & <more>'
    assert picture[-1].text == "a < b & c"


def test_traffic_of_both_pools_is_read():
    rows = read_rows(
        "| traffic, clients | pool | a | b | c | d | output tokens/s | cached |\n"
        "| slow, 4 | token | 1 | 1 | 1 | 1 | 1,000.0 | 71% |\n"
        "| slow, 4 | ragged@0.3 | 1 | 1 | 1 | 1 | 1,000.0 (1.00) | 63% |\n"
        "| fast, 4 | token | 1 | 1 | 1 | 1 | 10.0 | 20% |\n"
        "| fast, 4 | ragged@0.3 | 1 | 1 | 1 | 1 | 25.0 (2.50) | 65% |\n"
        "| alone, 4 | ragged@0.3 | 1 | 1 | 1 | 1 | 25.0 | 65% |\n"
    )
    assert [(row.traffic, row.gain, row.ragged_cached) for row in rows] == [("fast, 4", 2.5, 65), ("slow, 4", 1.0, 63)]


def test_a_logarithmic_scale_holds_all_values():
    scale = log_scale([0.0013, 0.4, 0.02], 300, 0)
    assert (scale.low, scale.high) == (0.001, 0.5)
    assert [label for _, label in scale.ticks] == [
        "0.001",
        "0.002",
        "0.005",
        "0.01",
        "0.02",
        "0.05",
        "0.1",
        "0.2",
        "0.5",
    ]
    assert scale(0.001) == 300
    assert scale(0.5) == 0
    assert log_scale([1.0, 5000.0], 0, 1).ticks[-1] == (5000.0, "5,000")


def test_values_outside_of_a_scale_are_refused():
    with pytest.raises(ValueError, match="outside"):
        log_scale([1, 10], 0, 1)(11)


def test_peers_get_curves_where_their_distributions_were_measured():
    texts = {"continuation_nll": [1.0], "kl": [0.1, 0.3]}
    rows = [{"peer": f"a-{bits}", "share": share, "texts": texts} for bits, share in ((4, 0.3), (3, 0.2))]
    rows.append({"peer": "FP8", "share": 0.5, "texts": texts})
    rows.append({"peer": "b", "share": 0.2, "texts": {"continuation_nll": [1.0]}})
    assert peer_curves(rows) == {"a": [(0.2, 0.2), (0.3, 0.2)]}
