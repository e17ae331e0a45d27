"""A store is complete after its constructor: code elsewhere calls its methods and assigns none of its attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from tests.pool_machine import LAYOUT

ROOT = Path(__file__).parents[2]
NAMES = {"store", "_store", "operations", "_operations"}
"""Names by which code refers to a store or to operations on it."""


def assigned(tree: ast.AST) -> Iterator[str]:
    """Targets of assignments and deletions of the form `store.attribute`."""
    for node in ast.walk(tree):
        written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if written and _name(node.value) in NAMES:
            yield ast.unparse(node)


def _name(node: ast.AST) -> str:
    """The last part of `a.b.name`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_assignments_are_found():
    found = assigned(ast.parse("self.store.a += 1\nstore.x, y = 1, 2\ndel pool.store.s\nother.x = 1\nstore.m()"))
    assert sorted(found) == ["pool.store.s", "self.store.a", "store.x"]


@pytest.mark.parametrize("folder", ["sgl_ragged", "calib", "benchmarks"])
def test_no_attribute_of_a_store_is_assigned_outside_of_it(folder):
    found = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for target in assigned(ast.parse(path.read_text()))
    ]
    assert found == []


def test_attributes_are_declared_final_or_private():
    """Mypy refuses assignments to these everywhere."""
    tree = ast.parse((ROOT / "sgl_ragged/mem_pool/slab_store.py").read_text())
    (store,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == SlabStore.__name__)
    final = {
        node.target.attr
        for node in ast.walk(store)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and ast.unparse(node.annotation) == "Final"
    }
    made = SlabStore(LAYOUT, get_scorer("keydiff"), 3, 2, torch.float32, "cpu")
    assert {name for name in vars(made) if not name.startswith("_")} == final
    for name in ("kv_scales", "batches"):
        with pytest.raises(AttributeError):
            setattr(made, name, None)
