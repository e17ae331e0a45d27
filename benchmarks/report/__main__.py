"""One page of all results: tables and plots from the files under benchmarks/results/, in a single HTML file.

    python -m benchmarks.report [--output report.html] [--document benchmarks/results/speed.md]

Starts no server and measures nothing. What concerns speed is also written as a document of the repository.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import jinja2

from benchmarks.harness.command import command
from benchmarks.harness.errors import SettingsError
from benchmarks.report import multi_turn, single_files
from benchmarks.report.section import Section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TITLE = "sgl_ragged: results"


def html(sections: Sequence[Section], source: str, measured: str, date: str) -> str:
    """The page. It is well-formed XML, too, so that a parser can check it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("benchmarks.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("page.html.j2")
    return page.render(title=TITLE, date=date, source=source, measured=measured, sections=sections) + "\n"


def document(sections: Sequence[Section], folder: Path) -> str:
    """Sections as Markdown; links to plots are relative to `folder`."""
    parts = [
        "# Results: speed\n",
        "Written by `make report` from this folder; `benchmarks/multi_turn/README.md` says what is measured and how.",
        "All other results are in the page that the same command writes.\n",
    ]
    for section in sections:
        parts.append(f"## {section.title}\n")
        if section.missing:
            parts.append(f"Missing: {section.missing}.\n")
        parts += [f"{paragraph}\n" for paragraph in section.text]
        if section.facts:
            parts.append("; ".join(f"{name}: {value}" for name, value in section.facts) + ".\n")
        if section.command:
            parts.append(f"    {section.command}\n")
        for table in section.tables:
            parts.append(f"**{table.title[:1].upper()}{table.title[1:]}**\n\n{table.markdown()}")
        for figure in section.figures:
            link = Path(os.path.relpath(figure.path, folder)).as_posix()
            parts.append(f"![{figure.caption}]({link})\n\n{figure.caption}\n")
        parts += [f"- {note}" for note in section.notes] + ([""] if section.notes else [])
    return "\n".join(parts).rstrip("\n") + "\n"


def measured_on(results: Path) -> str:
    """What the results folder says of the machine and date of its single files: the paragraph below its title."""
    path = results / "README.md"
    paragraphs = path.read_text().split("\n\n") if path.is_file() else []
    found = [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.startswith("Measured")]
    return found[0] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="[report.html]")
    parser.add_argument("--document", type=Path, default=RESULTS / "speed.md", help="[benchmarks/results/speed.md]")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read [benchmarks/results]")
    options = parser.parse_args()
    with command("report"):
        write(options)


def write(options: argparse.Namespace) -> None:
    """Write page and document, and print what is missing. Raises SettingsError."""
    if not options.results.is_dir():
        raise SettingsError(f"{options.results} is no folder")
    conversations = multi_turn.sections(options.results)
    headline, *others = single_files.sections(options.results)
    everything = [headline, *conversations, *others]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        options.output.write_text(html(everything, str(options.results.name), measured_on(options.results), date))
        speed = [*conversations, single_files.step_speed(options.results)]
        options.document.write_text(document(speed, options.document.resolve().parent))
    except OSError as error:
        raise SettingsError(f"cannot write {error.filename}: {error.strerror}") from None
    for section in everything:
        if section.missing:
            print(f"missing: {section.title}: {section.missing}")
    print(f"{options.output}, {options.document}")


if __name__ == "__main__":
    main()
