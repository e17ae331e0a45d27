"""The plugin's flags: one field for each, which is also a keyword of `Engine`; all are checked once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from sgl_ragged.attention.kernel_choice import KERNELS
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.history.bound import check_score
from sgl_ragged.host_tier.restore_schedule import AUTO, MODES
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.mem_pool.slab_format import ASKED, CODED_RATIO, WIDE, WIDE_RATIO
from sgl_ragged.mem_pool.slab_format import AUTO as BY_RATIO
from sgl_ragged.plan import CODEC_NAMES, ServingPlan
from sgl_ragged.profiles.budgets import check_budgets, check_ratio, check_segment

FITTED = "auto"
"""Value of --ragged-fit with which heads are fitted."""

ATTRIBUTE = "_sgl_ragged"
"""Bookkeeping attribute of SGLang's ServerArgs that holds the options; it is pickled along to the workers."""

CALIBRATED_SCORER = "gate"
"""The scorer of models that are calibrated at their first start (docs/evaluation.md)."""

OTHER_SCORER = "keydiff"
"""The scorer where there is nothing but budgets: bundled profiles, and equal ones."""

OBSERVER = "ragged_observer"
"""Keyword of `Engine` alone: an object that the workers' attention backend calls; the calibrator's recorder."""


def _flag(
    default: Any, text: str, *, shown: str = "", check: Callable[[Any], None] = lambda _: None, **parser: Any
) -> Any:
    """A field that is a flag: its default, its help, how the help names the default, and what refuses a bad value.

    `parser`: keywords of `add_argument`; `type` and `choices` hold for keywords of `Engine`, too.
    """
    shown = f" [{shown or default}]" if shown or default is not None else ""
    return field(default=default, metadata={"check": check, "parser": {"help": text + shown, **parser}})


def _check_scorer(name: str) -> None:
    from sgl_ragged.scorers import get_scorer

    get_scorer(name)


@dataclass(frozen=True)
class RaggedOptions:
    """The plugin's flags as given. `plan` is what the launcher derives from them; None before, and with SGLang's pool.

    `observer` is pickled along to the workers (`backend.RaggedAttnBackend`).
    """

    kv_pool: str = _flag("token", "KV cache: SGLang's own, or one slab per page.", choices=("token", "ragged"))
    kv_bytes: int | None = _flag(
        None,
        "KV budget of either pool per rank, such as 24GiB or 512M, instead of profiling free memory.",
        type=lambda text: parse_bytes(str(text)),
        metavar="N",
    )
    ratio: float | None = _flag(
        None,
        "Kept / full KV bytes, up to 1.",
        shown=f"{CODED_RATIO} in codes, {WIDE_RATIO} in wide slabs",
        type=float,
        check=check_ratio,
        metavar="R",
    )
    segment: int = _flag(
        256,
        "Tokens per segment, a multiple of 16, on CUDA a power of two; becomes the page size.",
        type=int,
        check=check_segment,
    )
    scorer: str | None = _flag(
        None,
        "Method that ranks the tokens of a segment.",
        shown=f"the profile's; {CALIBRATED_SCORER} where one is calibrated",
        check=_check_scorer,
        metavar="NAME",
    )
    scorer_weights: str | None = _flag(None, "Gate weights of scorers that have them.", metavar="FILE")
    profile: str = _flag(
        "auto",
        "Calibrated head budgets; auto: bundled, or calibrated once, before the server starts.",
        type=str,
        metavar="auto|uniform|FILE",
    )
    slab_dtype: str = _flag(
        BY_RATIO,
        "How finished segments are stored. wide: as the cache's dtype; int8: keys and values in 8 bits; k8v4: keys in "
        "8 bits, values in 4; k6v4, k4v4: keys in 6 or 4; auto: by the ratio, wide at 1 and where codes cannot be "
        "served. The ratio is one of bytes, so fewer bits keep more tokens.",
        choices=ASKED,
    )
    fit: str = _flag(
        FITTED,
        "Whether what heads keep of a segment is fitted to stand for all of it. auto: with a profile that has a "
        "codebook; none: as it is.",
        choices=(FITTED, "none"),
    )
    kernel: str = _flag("auto", "Attention kernels; auto: triton on CUDA, torch elsewhere.", choices=KERNELS)
    fairkv: str | None = _flag(
        None,
        "Which rank of --tp serves which heads. none: in the checkpoint's order; permute: so that ranks store and read "
        "equally much; split: the same, with some heads stored in parts on several ranks.",
        shown="permute, where that is possible",
        choices=("none", "permute", "split"),
    )
    restore: str | None = _flag(
        None,
        "With --enable-hierarchical-cache: load segments from the host, or compute the first of them meanwhile; auto: "
        "what pays.",
        shown=AUTO,
        choices=MODES,
    )
    host_codec: str | None = _flag(
        None,
        "How slabs lie in the host tier and in storage: as they are, in 8 bits, or without the layers that are "
        "restored from another's. All but exact lose something (docs/host-tier.md).",
        shown=CODEC_NAMES[0],
        choices=CODEC_NAMES,
    )
    history: int | None = _flag(
        None,
        "Tokens of its history that a request sees at most, a multiple of the segment; what leaves its view is freed "
        "while it runs.",
        shown="all",
        type=int,
        metavar="N",
    )
    history_score: str | None = _flag(
        None,
        "With --ragged-history: by which score segments leave; auto: value_novelty with a calibrated profile, else "
        "recency.",
        shown="auto",
        check=check_score,
        metavar="NAME",
    )
    reservoir: int | None = _flag(
        None,
        "Host memory of all ranks together, such as 8GiB, for what heads drop of segments: what attention comes back "
        "to is fetched from there.",
        shown="none, nothing is fetched",
        type=lambda text: parse_bytes(str(text)),
        metavar="N",
    )
    overlay: int | None = _flag(
        None, "With --ragged-reservoir: tokens that a head can be given back at a time.", shown="128", type=int
    )
    pivots: int | None = _flag(
        None,
        "With --ragged-reservoir: heads that keep everything and watch what attention comes back to.",
        shown="2",
        type=int,
    )
    watch_interval: int | None = _flag(
        None, "With --ragged-reservoir: tokens between two looks at what pivots attend to.", shown="8", type=int
    )
    drift: float | None = _flag(
        None,
        "With --ragged-reservoir: overlap with what was fetched last, below which is fetched anew.",
        shown="0.5",
        type=float,
    )
    from_command_line: bool = False
    observer: Any = None
    plan: ServingPlan | None = field(default=None, compare=False)

    @property
    def ragged(self) -> bool:
        return self.kv_pool == "ragged"


def serving_plan(options: RaggedOptions) -> ServingPlan:
    """What the launcher has decided."""
    assert options.plan is not None, "the launcher decides before any worker starts"
    return options.plan


def _keyword(one: Field) -> str:
    return one.name if one.name.startswith("kv_") else f"ragged_{one.name}"


FLAGS: dict[str, Field] = {_keyword(one): one for one in fields(RaggedOptions) if one.metadata}
"""Field of `RaggedOptions` by keyword of `Engine`; with dashes it is the flag."""


def dashed(keyword: str) -> str:
    return "--" + keyword.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags to SGLang's parser. Values are read by `make_options`, which says what is wrong in one line."""
    group = parser.add_argument_group("sgl_ragged: a KV cache with a budget per attention head")
    for keyword, one in FLAGS.items():
        group.add_argument(dashed(keyword), **{k: v for k, v in one.metadata["parser"].items() if k != "type"})


def make_options(given: dict[str, Any], *, from_command_line: bool, observer: Any = None) -> RaggedOptions | None:
    """Check the plugin's flags.

    Args:
        given: values by keyword (FLAGS); absent or None means not given.
        observer: see OBSERVER.

    Returns:
        The options, or None when nothing was asked of the plugin, which then stays inert.

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
    values = {FLAGS[keyword].name: _read(keyword, value) for keyword, value in given.items()}
    options = RaggedOptions(**values, from_command_line=from_command_line, observer=observer)
    if options.slab_dtype == WIDE.name:
        # What others can keep depends on the model's heads.
        check_budgets(WIDE_RATIO if options.ratio is None else options.ratio, options.segment)
    return options


def _read(keyword: str, value: Any) -> Any:
    """A flag's value as options have it. Raises RaggedConfigError for one that it cannot have."""
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
