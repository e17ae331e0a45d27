"""Fields of dataclasses that are flags of the server and keywords of `Engine`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any

from sgl_ragged.errors import RaggedConfigError


def flag(
    default: Any, text: str, *, shown: str = "", check: Callable[[Any], None] = lambda _: None, **parser: Any
) -> Any:
    """Make a dataclass field that is a flag: default, help, the default's name in the help, and a check of values.

    `parser`: keywords of `add_argument`; `type` and `choices` hold for keywords of `Engine`, too.
    """
    shown = f" [{shown or default}]" if shown or default is not None else ""
    return field(default=default, metadata={"check": check, "parser": {"help": text + shown, **parser}})


def flags_of(kind: type) -> dict[str, Field]:
    """Return the fields of a dataclass that are flags, by keyword of `Engine`; with dashes it is the flag."""
    return {_keyword(one): one for one in fields(kind) if one.metadata}


def _keyword(one: Field) -> str:
    return one.name if one.name.startswith("kv_") else f"ragged_{one.name}"


def dashed(keyword: str) -> str:
    return "--" + keyword.replace("_", "-")


RefusedValues = tuple[tuple[str, tuple[Any, ...], str], ...]
"""Fields of SGLang's ServerArgs, values that are served, and reasons against all other values."""


def refuse_values(server_args: Any, table: RefusedValues) -> None:
    """Raise RaggedConfigError for the first field of a table that has a refused value."""
    for name, served, reason in table:
        value = getattr(server_args, name, served[0])
        if value not in served:
            raise RaggedConfigError(f"{reason} ({name} is {value!r})")
