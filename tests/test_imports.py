"""Which rooms of the package import which, and where SGLang is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

STOREYS = (
    {"errors"},
    {"profiles"},
    {"scorers", "fairkv"},
    {"mem_pool"},
    {"fitting"},
    {"attention"},
    {"launch", "serve", "features", "cli", "register"},
)
"""Rooms of the package from the ground up: each imports from its own storey and those below it. Only the last one may
import SGLang."""


def room(module: str) -> str:
    """Room of a module such as sgl_ragged.mem_pool.layout."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules and names that are imported, those for type checkers excepted."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        else:
            yield from imports(node)


def modules() -> dict[str, list[str]]:
    """What every module of the package and the calibrator imports, by its name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): list(imports(ast.parse(path.read_text())))
        for folder in ("sgl_ragged", "calib")
        for path in (ROOT / folder).rglob("*.py")
    }


def test_imports_run_downwards():
    storeys = {name: height for height, storey in enumerate(STOREYS) for name in storey}
    upwards = [
        (module, imported)
        for module, found in modules().items()
        for imported in found
        if module.startswith("sgl_ragged.") and imported.startswith("sgl_ragged.")
        if module != "sgl_ragged.__init__" and storeys[room(imported)] > storeys[room(module)]
    ]
    assert upwards == []


def test_only_the_last_storey_imports_sglang():
    importing = {module for module, found in modules().items() if any(x.split(".")[0] == "sglang" for x in found)}
    assert {module for module in importing if room(module) not in STOREYS[-1]} == {"calib.measure"}


def test_the_package_imports_nothing_that_the_working_folder_could_shadow():
    """A start has the working folder first in its path: `calib.py` or `benchmarks.py` there would be taken for ours."""
    ours = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()} - {"sgl_ragged"}
    assert {"calib", "benchmarks", "tests"} <= ours
    assert not [
        (module, imported)
        for module, found in modules().items()
        for imported in found
        if module.startswith("sgl_ragged.") and imported.split(".")[0] in ours
    ]


NAMED = re.compile(
    r"disaggregat\w*|drafts?|specul\w*|history|histories|retriev\w*|reservoir|overlay|tier|hicache|hierarchical|windows?|swa",
    re.I,
)
"""Words by which the core would speak of a feature."""

OF_MODELS = {"sliding_window", "sliding_window_size", "is_hybrid_swa", "is_hybrid_swa_compress", "_WINDOWS_IGNORED"}
"""Names with such words that say what a model is, as its `windowed` layers do."""


def conditions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield node


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_feature_is_named_in_a_condition_outside_its_folder():
    """FairKV and fitting are no features of that sort: they change no pool."""
    found = []
    for path in (ROOT / "sgl_ragged").rglob("*.py"):
        if path.relative_to(ROOT / "sgl_ragged").parts[0] == "features":
            continue
        for condition in conditions(ast.parse(path.read_text())):
            words = [word for name in set(names(condition)) - OF_MODELS for word in re.split(r"[^a-zA-Z]+", name)]
            if any(NAMED.fullmatch(word) for word in words):
                found.append((str(path.relative_to(ROOT)), ast.unparse(condition)))
    assert found == []
