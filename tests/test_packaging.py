"""What the package index gets: metadata that names things twice names the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import sgl_ragged
from sgl_ragged.launch.calibration_process import NEEDED

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def named(requirements: list[str | dict]) -> set[str]:
    return {re.match(r"[\w-]+", entry)[0] for entry in requirements if isinstance(entry, str)}


def test_the_citation_is_of_this_release():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == sgl_ragged.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["project"]["authors"]
    ]


def test_a_server_without_the_extra_asks_for_all_of_it():
    assert named(PROJECT["project"]["optional-dependencies"]["calibrate"]) == set(NEEDED)


EXTRA = re.compile(r"(?:sgl-ragged|install (?:-e )?\S?\.)\[([\w-]+)\]")
GROUP = re.compile(r"install --group ([\w-]+)")


@pytest.mark.parametrize("folder", ["sgl_ragged", "calib", "benchmarks", "docs"])
def test_extras_and_groups_that_are_named_exist(folder):
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    texts = [path.read_text() for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    assert {name for text in texts for name in EXTRA.findall(text)} <= set(extras)
    assert {name for text in texts for name in GROUP.findall(text)} <= set(groups)


@pytest.mark.parametrize("package", PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
def test_packages_of_the_wheel_are_typed(package):
    assert (ROOT / package / "py.typed").exists()
    assert package in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
