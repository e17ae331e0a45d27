"""The plugin's flags: one field for each, which is also a keyword of `Engine`; all are checked once."""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

from sgl_ragged.attention.kernel_choice import KERNELS
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.feature import features
from sgl_ragged.launch.flags import dashed, flag, flags_of
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.mem_pool.slab_format import ASKED, CODED_RATIO, WIDE, WIDE_RATIO
from sgl_ragged.mem_pool.slab_format import AUTO as BY_RATIO
from sgl_ragged.profiles.budgets import check_budgets, check_ratio, check_segment
from sgl_ragged.profiles.profile_choice import AUTO

T = TypeVar("T")

FITTED = "auto"
"""Value of --ragged-fit with which heads are fitted."""

ATTRIBUTE = "_sgl_ragged"
"""Bookkeeping attribute of SGLang's ServerArgs that holds the options; it is pickled along to the workers."""

CALIBRATED_SCORER = "gate"
"""The scorer of models that are calibrated at their first start (docs/evaluation.md)."""

OTHER_SCORER = "keydiff"
"""The scorer where there is nothing but budgets: equal ones (`uniform`), and those of bundled profiles (`bundled`)."""

OBSERVER = "ragged_observer"
"""Keyword of `Engine` alone: an object that the workers' attention backend calls; the calibrator's recorder."""


def _check_scorer(name: str) -> None:
    from sgl_ragged.scorers import get_scorer

    get_scorer(name)


@dataclass(frozen=True)
class RaggedOptions:
    """The plugin's flags as given. `plan` is what the launcher derives from them; None before, and with SGLang's pool.

    `of_features`: flags of features, where one was given. `observer` is pickled along to the workers
    (`backend.RaggedAttnBackend`).
    """

    kv_pool: str = flag("token", "KV cache: SGLang's own, or one slab per page.", choices=("token", "ragged"))
    kv_bytes: int | None = flag(
        None,
        "KV budget of either pool per rank, such as 24GiB or 512M, instead of profiling free memory.",
        type=lambda text: parse_bytes(str(text)),
        metavar="N",
    )
    ratio: float | None = flag(
        None,
        "Kept / full KV bytes, up to 1.",
        shown=f"{CODED_RATIO} in codes, {WIDE_RATIO} in wide slabs",
        type=float,
        check=check_ratio,
        metavar="R",
    )
    segment: int = flag(
        256,
        "Tokens per segment, a multiple of 16, on CUDA a power of two; becomes the page size.",
        type=int,
        check=check_segment,
    )
    scorer: str | None = flag(
        None,
        "Method that ranks the tokens of a segment.",
        shown=f"the profile's; {CALIBRATED_SCORER} where one is calibrated",
        check=_check_scorer,
        metavar="NAME",
    )
    scorer_weights: str | None = flag(None, "Gate weights of scorers that have them.", metavar="FILE")
    profile: str = flag(
        AUTO,
        "Budgets of the heads. auto: calibrated once, before the first start of a model, and cached; uniform: equal; "
        "bundled: measured by others and shipped with this package, for two models; FILE: written by calib run.",
        type=str,
        metavar="auto|uniform|bundled|FILE",
    )
    slab_dtype: str = flag(
        BY_RATIO,
        "How finished segments are stored. wide: as the cache's dtype; int8: keys and values in 8 bits; k8v4: keys in "
        "8 bits, values in 4; k6v4, k4v4: keys in 6 or 4; auto: by the ratio, wide at 1 and where codes cannot be "
        "served. The ratio is one of bytes, so fewer bits keep more tokens.",
        choices=ASKED,
    )
    fit: str = flag(
        FITTED,
        "Whether what heads keep of a segment is fitted to stand for all of it. auto: with a profile that has a "
        "codebook; none: as it is.",
        choices=(FITTED, "none"),
    )
    kernel: str = flag("auto", "Attention kernels; auto: triton on CUDA, torch elsewhere.", choices=KERNELS)
    fairkv: str | None = flag(
        None,
        "Which rank of --tp serves which heads. none: in the checkpoint's order; permute: so that ranks store and read "
        "equally much; split: the same, with some heads stored in parts on several ranks.",
        shown="permute, where that is possible",
        choices=("none", "permute", "split"),
    )
    of_features: tuple[Any, ...] = ()
    from_command_line: bool = False
    observer: Any = None
    plan: ServingPlan | None = field(default=None, compare=False)

    @property
    def ragged(self) -> bool:
        return self.kv_pool == "ragged"

    def of(self, kind: type[T]) -> T:
        """Flags of a feature, as given; `kind`: their dataclass."""
        return next((one for one in self.of_features if isinstance(one, kind)), kind())


def serving_plan(options: RaggedOptions) -> ServingPlan:
    """The launcher's plan."""
    assert options.plan is not None, "the launcher decides before any worker starts"
    return options.plan


_OWN = flags_of(RaggedOptions)

_OF_FEATURES: dict[type, dict[str, Field]] = {
    feature.flags: flags_of(feature.flags) for feature in features() if feature.flags is not None
}

FLAGS: dict[str, Field] = _OWN | {keyword: one for own in _OF_FEATURES.values() for keyword, one in own.items()}
"""Field of `RaggedOptions`, or of a feature's flags, by keyword of `Engine`; with dashes it is the flag."""

if len(FLAGS) < len(_OWN) + sum(map(len, _OF_FEATURES.values())):
    raise RaggedConfigError("two features have a flag of the same name; remove the package of one of them")


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

    def values(flags: dict[str, Field]) -> dict[str, Any]:
        return {flags[keyword].name: _read(keyword, value) for keyword, value in given.items() if keyword in flags}

    options = RaggedOptions(
        **values(_OWN),
        of_features=tuple(kind(**own) for kind, flags in _OF_FEATURES.items() if (own := values(flags))),
        from_command_line=from_command_line,
        observer=observer,
    )
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
