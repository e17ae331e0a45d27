"""Digest of a function's source that comments, docstrings, formatting, type annotations and Python versions keep.

The digest is taken of the syntax tree, written out by rules of this file. Tokens would change with brackets, quotes
and commas, and f-strings are other tokens since Python 3.12; `ast.dump` and `ast.unparse` write some trees otherwise
from version to version.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

LEFT_OUT = {"annotation", "returns", "ctx", "kind", "type_comment"}
"""Fields of syntax trees that do not change what a function does."""


def source_digest(function: Callable) -> str | None:
    """Return 16 hexadecimal digits for what `function` does, decorators and defaults included.

    Of a function that was wrapped with `functools.wraps`, the original is read. None if no source can be read.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return digest_of(source)


def digest_of(source: str) -> str:
    """Return 16 hexadecimal digits for the source of one function or class, indented or not."""
    # Indented lines are put into a block: removing the indent would change strings of several lines.
    tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    return hashlib.sha256("".join(_written(tree)).encode()).hexdigest()[:16]


def _written(node: Any) -> Iterator[str]:
    """Write a node as its class and fields. Empty fields are left out: later versions of Python add some."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name == "body":
                value = _without_docstring(value)
            if name not in LEFT_OUT and value not in (None, []):
                yield f" {name}="
                yield from _written(value)
        yield ")"
    elif isinstance(node, list):
        for one in node:
            yield from _written(one)
            yield ","
    else:
        yield repr(node)


def _without_docstring(body: Any) -> Any:
    """Return statements without expressions that are plain strings; the body of a lambda is a single node."""
    if not isinstance(body, list):
        return body
    return [one for one in body if not (isinstance(one, ast.Expr) and _is_string(one.value))]


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
