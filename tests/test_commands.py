"""Commands on pages name options that their programs know."""

from __future__ import annotations

import pytest

from tests.command_lines import ROOT, Command, page_commands, parse

PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_on_pages_are_known(page):
    commands = [(line, parse(line)) for line in page_commands(page.read_text())]
    unknown = {line: sorted(command.unknown()) for line, command in commands if command and command.unknown()}
    assert unknown == {}


@pytest.mark.parametrize(
    ("line", "program", "options"),
    [
        ("sgl-ragged layout --model M --json | jq --raw .x", ("-m", "sgl_ragged.cli", "layout"), ("--model", "--json")),
        ("sgl-ragged check   # --none", ("-m", "sgl_ragged.cli", "check"), ()),
        ("A=1 B=2 python -m calib run -o F --x=3", ("-m", "calib", "run"), ("-o", "--x")),
        (
            "python -m benchmarks quality --args '--inner 1' --ratio -1",
            ("-m", "benchmarks", "quality"),
            ("--args", "--ratio"),
        ),
        ("python benchmarks/gpu.py --a; x --b", ("benchmarks/gpu.py",), ("--a",)),
        ("python3 -m benchmarks.quality --a", ("-m", "benchmarks.quality"), ("--a",)),
        ("make peers", None, ()),
    ],
)
def test_commands_are_parsed(line, program, options):
    assert parse(line) == (Command(program, options) if program else None)


def test_commands_are_found():
    page = (
        "a `python -m calib inspect F` b `sgl-ragged` c\n\n"
        "    python -m sglang.launch_server --a \\\n        --b\n\n"
        "```\nsgl-ragged check\nls --c\n```\n- `python -m pytest --d`\n"
    )
    assert [line.split() for line in page_commands(page)] == [
        ["python", "-m", "calib", "inspect", "F"],
        ["python", "-m", "sglang.launch_server", "--a", "--b"],
        ["sgl-ragged", "check"],
    ]


def test_an_option_that_is_unknown_is_found():
    command = parse("sgl-ragged layout --model M --ragged-rato 0.3")
    assert command is not None
    assert command.unknown() == {"--ragged-rato"}
