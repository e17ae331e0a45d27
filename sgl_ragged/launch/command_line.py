"""All flags of the plugin and its features, as command-line flags and as keywords of `Engine`."""

from __future__ import annotations

import argparse
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

_OF_FEATURES: dict[type, dict[str, Field]] = {
    feature.flags: flags_of(feature.flags) for feature in launch_features() if feature.flags is not None
}

FLAGS: dict[str, Field] = _OWN | {keyword: one for own in _OF_FEATURES.values() for keyword, one in own.items()}
"""Field of `RaggedOptions`, or of a feature's flags, by keyword of `Engine`; with dashes it is the flag."""

if len(FLAGS) < len(_OWN) + sum(map(len, _OF_FEATURES.values())):
    raise RaggedConfigError("two features have a flag of the same name; remove the package of one of them")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags to SGLang's parser. Values are read by `make_options`, whose errors are one line."""
    group = parser.add_argument_group("sgl_ragged: a KV cache with a budget per attention head")
    for keyword, one in FLAGS.items():
        group.add_argument(dashed(keyword), **{k: v for k, v in one.metadata["parser"].items() if k != "type"})


def make_options(given: dict[str, Any], *, from_command_line: bool, observer: Any = None) -> RaggedOptions | None:
    """Check the plugin's flags.

    Args:
        given: values by keyword (FLAGS); absent or None means not given.
        observer: see OBSERVER.

    Returns:
        The options, or None without any flag of the plugin, which then stays inert.

    Raises:
        RaggedConfigError: a value is out of range, or a --ragged-* flag was given without --kv-pool ragged.
    """
    given = {keyword: value for keyword, value in given.items() if value is not None}
    kv_pool = _read("kv_pool", given.get("kv_pool", FLAGS["kv_pool"].default))
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
        of_features=tuple(kind(**own) for kind, flags in _OF_FEATURES.items() if (own := values(flags))),
        from_command_line=from_command_line,
        observer=observer,
    )
    if options.slab_dtype == WIDE.name:
        # For other formats this depends on the model's heads.
        check_budgets(WIDE_RATIO if options.ratio is None else options.ratio, options.segment)
    return options


def _read(keyword: str, value: Any) -> Any:
    """Return a flag's value as options hold it. Raises RaggedConfigError for an invalid one."""
    parser = FLAGS[keyword].metadata["parser"]
    if "choices" in parser and value not in parser["choices"]:
        raise RaggedConfigError(f"unknown {dashed(keyword)} {value!r}; known: {', '.join(parser['choices'])}")
    try:
        value = parser.get("type", str)(value)
    except RaggedConfigError:
        raise
    except ValueError:
        raise RaggedConfigError(f"{dashed(keyword)} {value!r} is not a number") from None
    FLAGS[keyword].metadata["check"](value)
    return value
