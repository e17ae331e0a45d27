"""Digests of sources change with what a function does and with nothing else."""

from __future__ import annotations

import functools

import pytest

from sgl_ragged.source_digest import digest_of, source_digest

FUNCTION = """\
@cached
def place(self, rows: list[int], *, limit: int | None = None) -> str:
    \"\"\"Place rows.\"\"\"
    # A comment.
    total: int = sum(rows, 0)
    text = f"{total!r:>{limit}} rows"
    return text + "  # no comment"
"""

ALIKE = {
    "comment": ("    # A comment.\n", ""),
    "docstring": ('    """Place rows."""\n', '    """Another."""\n'),
    "no docstring": ('    """Place rows."""\n', ""),
    "quotes": ('f"{total!r:>{limit}} rows"', "f'{total!r:>{limit}} rows'"),
    "brackets": ("sum(rows, 0)", "(sum(\n        rows,\n        0,\n    ))"),
    "annotations": ("rows: list[int], *, limit: int | None = None) -> str", "rows, *, limit=None)"),
    "another annotation": ("total: int =", "total: float ="),
    "blank lines": ("    return", "\n\n    return"),
    "indent": ("\n    ", "\n  "),
}

OTHERWISE = {
    "string": ("  # no comment", " # no comment"),
    "conversion": ("!r", "!s"),
    "decorator": ("@cached\n", ""),
    "default": ("= None", "= 3"),
    "parameter": ("self, rows", "self, row"),
    "constant": ("(rows, 0)", "(rows, 0.0)"),
    "name": ("return text", "return total"),
    "statement": ("    return", "    rows.clear()\n    return"),
    "order": ("sum(rows, 0)", "sum(0, rows)"),
}


@pytest.mark.parametrize(("old", "new"), ALIKE.values(), ids=ALIKE)
def test_looks_do_not_count(old, new):
    assert old in FUNCTION
    assert digest_of(FUNCTION.replace(old, new)) == digest_of(FUNCTION)


@pytest.mark.parametrize(("old", "new"), OTHERWISE.values(), ids=OTHERWISE)
def test_what_a_function_does_counts(old, new):
    assert old in FUNCTION
    assert digest_of(FUNCTION.replace(old, new)) != digest_of(FUNCTION)


def test_a_method_with_a_string_of_several_lines():
    method = '    def ask(self):\n        return """one\ntwo"""\n'
    assert digest_of(method) != digest_of(method.replace("\ntwo", "\n two"))


def test_the_digest_is_the_same_in_all_versions_of_python():
    """Digest of one function, taken with Python 3.11. Another version must give the same."""
    assert digest_of(FUNCTION) == "4d4a46fdc3bdb76c"


def test_the_original_of_a_wrapped_function_is_read():
    @functools.wraps(digest_of)
    def wrapper(source: str) -> str:
        return digest_of(source)

    assert source_digest(wrapper) == source_digest(digest_of)
    assert source_digest(len) is None
