"""Which rooms of the package import which, where SGLang is, and that no group of files imports itself in a circle."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

STOREYS = (
    {"errors", "sglang_contract"},
    {"profiles", "verify"},
    {"scorers", "fairkv"},
    {"mem_pool"},
    {"fitting"},
    {"attention"},
    {"source_digest", "contract_checks", "launch", "rank_sizes", "serve", "features"},
    {"check_command", "cli", "register"},
)
"""Rooms of the package from the ground up: each imports from its own storey and those below it. Only the last two may
import SGLang."""

MOST_IN_A_CIRCLE = 3
MOST_IN_FUNCTIONS = 16
MOST_OF_ONE_FEATURE = 3
"""Members of a feature's base classes that a single feature has."""
MOST_THAT_KNOW_A_FEATURE = 5
"""Files outside of a feature's folder that name it."""


def room(module: str) -> str:
    """Room of a module such as sgl_ragged.mem_pool.layout."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST, typing: bool = False) -> Iterator[str]:
    """Modules and names that are imported.

    Args:
        typing: True to include those for type checkers.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        else:
            yield from imports(node, typing)


@cache
def trees() -> dict[str, ast.AST]:
    """Every module of the package and the calibrator, by its name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for folder in ("sgl_ragged", "calib")
        for path in (ROOT / folder).rglob("*.py")
    }


def modules(typing: bool = False) -> dict[str, list[str]]:
    """What every module imports, by its name."""
    return {module: list(imports(tree, typing)) for module, tree in trees().items()}


def module_of(imported: str) -> str:
    return imported if imported in trees() else imported.rpartition(".")[0]


def edges() -> dict[str, set[str]]:
    """Which modules of ours every module imports: deferred imports and those for type checkers count."""
    found = {module: {module_of(one) for one in imported} for module, imported in modules(typing=True).items()}
    return {module: {one for one in imported if one in trees()} - {module} for module, imported in found.items()}


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_imports_run_downwards():
    storeys = {name: height for height, storey in enumerate(STOREYS) for name in storey}
    upwards = [
        (module, imported)
        for module, found in modules().items()
        for imported in found
        if module.startswith("sgl_ragged.") and imported.startswith("sgl_ragged.")
        if storeys[room(imported)] > storeys[room(module)]
    ]
    assert upwards == []


def test_no_group_of_files_imports_itself():
    """Pairs are for a class and the one that makes it; a larger circle means that a file is in the wrong room."""
    graph = edges()
    reached = {module: reachable(module, graph) for module in graph}
    circles = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    assert [sorted(circle) for circle in circles if len(circle) > MOST_IN_A_CIRCLE] == []


def test_launcher_and_worker_meet_in_the_plan():
    """Neither side imports the other, directly or through a feature's half."""
    graph = {module: found - {"sgl_ragged.launch.plan"} for module, found in edges().items()}
    of_launch = [one for one in graph if re.match(r"sgl_ragged\.(launch\.|features\.\w+\.launch$)", one)]
    of_serve = [one for one in graph if re.match(r"sgl_ragged\.(serve\.|features\.\w+\.serve$)", one)]
    assert (len(of_launch), len(of_serve)) > (20, 15)
    crossing = [
        (module, other)
        for side, others in ((of_launch, "serve"), (of_serve, "launch"))
        for module in side
        for other in reachable(module, graph)
        if room(other) == others or re.match(rf"sgl_ragged\.features\.\w+\.{others}$", other)
        if module != "sgl_ragged.launch.plan"
    ]
    assert crossing == []


def test_features_do_not_import_each_other():
    """Exceptions: bounded histories count pages of windows, and a host tier carries the scores of histories."""
    known = {("history", "windows.sizes"), ("host_tier", "history.histories"), ("host_tier", "history.segment_scores")}
    prefix = "sgl_ragged.features."
    found = {
        (module.removeprefix(prefix).split(".")[0], imported.removeprefix(prefix))
        for module, imported_modules in edges().items()
        for imported in imported_modules
        if module.startswith(prefix) and imported.startswith(prefix)
    }
    assert {(one, other) for one, other in found if one != other.split(".")[0]} <= known


def test_members_of_a_feature_serve_several_features():
    """A base class that is the union of its features would say nothing about what a feature is."""
    uses: Counter[str] = Counter()
    members = set()
    for half in ("launch", "serve"):
        base = next(
            one for one in trees()[f"sgl_ragged.{half}.feature"].body if is_feature(one, f"{half.title()}Feature")
        )
        members |= {f"{half}.{name}" for name in defined(base)}
        for module, tree in trees().items():
            if re.fullmatch(rf"sgl_ragged\.features\.\w+\.{half}", module):
                classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
                uses.update(f"{half}.{name}" for one in classes for name in defined(one))
    assert len(members) > 15
    assert len([name for name in members if uses[name] < 2]) <= MOST_OF_ONE_FEATURE


def is_feature(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == name


def defined(node: ast.ClassDef) -> Iterator[str]:
    """Names of a class's methods and attributes."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            yield one.name
        elif isinstance(one, ast.AnnAssign):
            yield ast.unparse(one.target)
        elif isinstance(one, ast.Assign):
            yield from (ast.unparse(target) for target in one.targets)


def test_few_files_know_a_feature():
    """By its module or by its name in a plan; the feature's own files do not count."""
    for folder in (ROOT / "sgl_ragged" / "features").iterdir():
        if not (folder / "launch.py").exists():
            continue
        name = folder.name
        in_plan = rf'(?:settings_of|attached\.get)\("{name}"|attached\["{name}"'
        named = re.compile(rf"features\.{name}\b|features import {name}\b|{in_plan}")
        knowing = [
            path.name
            for path in (ROOT / "sgl_ragged").rglob("*.py")
            if not path.is_relative_to(folder) and named.search(path.read_text())
        ]
        assert len(knowing) <= MOST_THAT_KNOW_A_FEATURE, knowing


def test_our_modules_are_imported_at_the_top_of_files():
    """Deferred imports are for torch, SGLang, Triton and optional packages."""
    deferred = set()
    for module, tree in trees().items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in functions:
            deferred |= {(module, module_of(one)) for one in imports(function) if one.startswith("sgl_ragged.")}
    assert len(deferred) <= MOST_IN_FUNCTIONS, sorted(deferred)


def test_only_the_last_storeys_import_sglang():
    importing = {module for module, found in modules().items() if any(x.split(".")[0] == "sglang" for x in found)}
    assert {one for one in importing if room(one) not in STOREYS[-1] | STOREYS[-2]} == {"calib.engine"}


def test_pools_of_sglang_are_imported_in_one_place():
    """SGLang is about to move them to other modules, without names left behind."""
    moving = {"BaseSWAKVPool", "KVCache", "KVWriteLoc", "MHATokenToKVPool", "SWAKVPool"}
    importing = {
        module
        for module, found in modules().items()
        for one in found
        if one.rpartition(".")[2] in moving
        if one.startswith("sglang.")
    }
    assert importing == {"sgl_ragged.serve.sglang_pools"}


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
