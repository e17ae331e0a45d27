"""All flags of the plugin and its features, as command-line flags and as keywords of `Engine`."""

from __future__ import annotations

import argparse
import functools
from dataclasses import Field
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import launch_features
from sgl_ragged.launch.flags import dashed, flags_of
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.mem_pool.slab_format import WIDE, WIDE_RATIO
from sgl_ragged.profiles.budgets import check_budgets

OBSERVER = "ragged_observer"
"""Keyword of `Engine` alone: an object that the workers' attention backend calls; the calibrator's recorder."""

_OWN = flags_of(RaggedOptions)


def _feature_flags() -> dict[type, dict[str, Field]]:
    return {one.flags: flags_of(one.flags) for one in launch_features() if one.flags is not None}


@functools.cache
def all_flags() -> dict[str, Field]:
    """Return fields of `RaggedOptions` and of features' flags by keyword of `Engine`; with dashes it is the flag.

    Raises:
        RaggedConfigError: a feature of another package cannot be loaded, or two features have the same flag.
    """
    of_features = _feature_flags().values()
    flags = _OWN | {keyword: one for own in of_features for keyword, one in own.items()}
    if len(flags) < len(_OWN) + sum(map(len, of_features)):
        raise RaggedConfigError("two features have a flag of the same name; remove the package of one of them")
    return flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags to SGLang's parser. Values are read by `make_options`, whose errors are one line."""
    group = parser.add_argument_group("sgl_ragged: a KV cache with a budget per attention head")
    for keyword, one in all_flags().items():
        group.add_argument(dashed(keyword), **{k: v for k, v in one.metadata["parser"].items() if k != "type"})


def make_options(given: dict[str, Any], *, from_command_line: bool, observer: Any = None) -> RaggedOptions | None:
    """Check the plugin's flags.

    Args:
        given: values by keyword (`all_flags`); absent or None means not given.
        observer: see OBSERVER.

    Returns:
        The options, or None without any flag of the plugin, which then stays inert.

    Raises:
        RaggedConfigError: a value is out of range, or a --ragged-* flag was given without --kv-pool ragged.
    """
    given = {keyword: value for keyword, value in given.items() if value is not None}
    kv_pool = _read("kv_pool", given.get("kv_pool", all_flags()["kv_pool"].default))
    if kv_pool == "token":
        stray = [dashed(keyword) for keyword in given if keyword.startswith("ragged_")]
        if stray:
            raise RaggedConfigError(f"{', '.join(stray)} given without --kv-pool ragged: add it, or drop the flag")
        if "kv_bytes" not in given:
            return None

    def values(flags: dict[str, Field]) -> dict[str, Any]:
        return {flags[keyword].name: _read(keyword, value) for keyword, value in given.items() if keyword in flags}

    options = RaggedOptions(
        **values(_OWN),
        of_features=tuple(kind(**own) for kind, flags in _feature_flags().items() if (own := values(flags))),
        from_command_line=from_command_line,
        observer=observer,
    )
    if options.slab_dtype == WIDE.name:
        # For other formats this depends on the model's heads.
        check_budgets(WIDE_RATIO if options.ratio is None else options.ratio, options.segment)
    return options


def _read(keyword: str, value: Any) -> Any:
    """Return a flag's value as options hold it. Raises RaggedConfigError for an invalid one."""
    parser = all_flags()[keyword].metadata["parser"]
    if "choices" in parser and value not in parser["choices"]:
        raise RaggedConfigError(f"unknown {dashed(keyword)} {value!r}; known: {', '.join(parser['choices'])}")
    try:
        value = parser.get("type", str)(value)
    except RaggedConfigError:
        raise
    except ValueError:
        raise RaggedConfigError(f"{dashed(keyword)} {value!r} is not a number") from None
    all_flags()[keyword].metadata["check"](value)
    return value
