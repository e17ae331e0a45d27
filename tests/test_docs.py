"""Links of the documentation lead somewhere, paths that it and the code name exist, and the README stays short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README_LINES = 120
MOST_WORDS = 15_000
"""Largest number of words in docs/, without docs/notes."""
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)


def prose(text: str) -> Iterator[str]:
    """Lines of a page that are no code: neither in fences nor indented by four spaces behind an empty line."""
    fenced = indented = False
    before = ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            indented = line.startswith("    ") and (indented or not before.strip())
            if not indented:
                yield line
        before = line


def links(text: str) -> list[str]:
    """Targets of links and images; what stands in backticks is none."""
    lines = (re.sub(r"`[^`]*`", "", line) for line in prose(text))
    return [target for line in lines for target in re.findall(r"\]\(([^)\s]+)\)", line)]


def anchors(text: str) -> set[str]:
    """What `#...` may name: headings in lower case without punctuation, hyphens for spaces, numbered where repeated."""
    seen: Counter[str] = Counter()
    found = set()
    for line in prose(text):
        if heading := re.match(r"#{1,6} +(.*?)\s*$", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return found


def dead(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of one."""
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = target.is_file() and (not anchor or anchor in anchors(target.read_text() if path else text))
        if not (known or (target.is_dir() and not anchor)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    assert dead(page, page.read_text()) == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_pages_stay_short():
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert sum(any(map(str.isalnum, word)) for text in texts for word in text.split()) <= MOST_WORDS


def test_every_page_is_in_the_index():
    index = links((ROOT / "docs" / "README.md").read_text())
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(index)


@pytest.mark.parametrize("folder", ["sgl_ragged", "calib", "benchmarks", "tests", "examples"])
def test_pages_that_the_code_names_are_there(folder):
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\b((?:docs|benchmarks)/[\w./-]*\.md)\b", path.read_text())
        if path != Path(__file__)
    }
    assert [(path, name) for path, name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](there.md) ![b](there.md#two-words-10)", []),
        ("[a](gone.md)", ["gone.md"]),
        ("![a](gone.png)", ["gone.png"]),
        ("[a](there.md#three)", ["there.md#three"]),
        ("# Here\n[a](#here) [b](#gone)", ["#gone"]),
        ("[a](there.md#again) [b](there.md#again-1) [c](there.md#again-2)", ["there.md#again-2"]),
        ("[a](there.md#code)", ["there.md#code"]),
        ("- [a](https://example.org/x) `[b](gone.md)`\n\n    [c](gone.md)\n\n```\n[d](gone.md)\n```", []),
        ("- one\n    [a](gone.md)", ["gone.md"]),
        ("[a](folder) [b](folder#x)", ["folder#x"]),
    ],
)
def test_dead_links_are_found(tmp_path, text, expected):
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.md").write_text("## Two *words*, 1.0\n\n# Again\n\n# Again\n\n```\n# Code\n```\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert dead(page, text) == expected


def test_files_of_ours_that_pages_name_exist():
    """Paths in backticks; names of SGLang's files are written with their folder."""
    known = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    theirs = {"layers/dp_attention.py", "benchmark/hicache/bench_multiturn.py"}
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {(page.name, name) for page in pages for name in re.findall(r"`([\w./-]+\.py)`", page.read_text())}
    lost = {(page, name) for page, name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)}
    assert {one for one in lost if one[1] not in theirs} == set()


ELSEWHERE = {"ReadWriteMany", "SGLANG_PLUGINS", "fp4_mx_block16", "k_base", "nvfp4", "register_kv_pool_backend"}
"""Names on pages that nothing here has: Kubernetes', SGLang's, a checkpoint's, and one that SGLang could offer."""


def unknown_names(text: str, known: set[str]) -> set[str]:
    """Parts of names in backticks, such as `Class.method` or `function(x)`, that are not among known words."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    names = [span.partition("(")[0] for span in spans if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", span)]
    files = (".py", ".md", ".json", ".jsonl", ".toml", ".yaml", ".svg", ".safetensors")
    return {part for name in names if not name.endswith(files) for part in name.split(".") if len(part) > 2} - known


def test_names_in_backticks_are_in_the_sources():
    folders = [path for name in ("sgl_ragged", "calib", "benchmarks", "tests") for path in (ROOT / name).rglob("*.py")]
    sources = [*folders, ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "docker").iterdir()]
    known = {word for path in sources if path != Path(__file__) for word in re.findall(r"\w+", path.read_text())}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert {page.name: found for page in pages if (found := unknown_names(page.read_text(), known) - ELSEWHERE)} == {}


def test_names_that_nothing_has_are_found():
    text = "`Known.gone` `known(x, y)` `--flag` `walk.py` `two words`\n```\n`lost`\n```\n"
    assert unknown_names(text, {"Known", "known"}) == {"gone"}
