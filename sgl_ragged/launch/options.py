"""The plugin's flags: one field for each, which is also a keyword of `Engine`; all are checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

from sgl_ragged.attention.kernel_choice import KERNELS
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.flags import flag
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.mem_pool.slab_format import ASKED, CODED_RATIO, WIDE_RATIO
from sgl_ragged.mem_pool.slab_format import AUTO as BY_RATIO
from sgl_ragged.profiles.budgets import check_ratio, check_segment
from sgl_ragged.profiles.profile_choice import AUTO
from sgl_ragged.scorers import get_scorer

T = TypeVar("T")

FITTED = "auto"
"""Value of --ragged-fit with which heads are fitted."""

CHECKS = ("auto", "off", "strict")
"""Values of --ragged-check."""

CALIBRATED_SCORER = "gate"
"""The scorer of models that are calibrated at their first start (docs/evaluation.md)."""

OTHER_SCORER = "keydiff"
"""The scorer where there is nothing but budgets: equal ones (`uniform`), and those of bundled profiles (`bundled`)."""


def _check_kl(kl: float) -> None:
    # The negation refuses NaN, too.
    if not 0 < kl < math.inf:
        raise RaggedConfigError(f"--ragged-quality {kl} must be a positive number of nats")


def _check_scorer(name: str) -> None:
    get_scorer(name)


@dataclass(frozen=True)
class RaggedOptions:
    """The plugin's flags as given.

    of_features: flag dataclasses of features, where a flag was given. observer: pickled with the settings of workers
    (`serve.backend.RaggedAttnBackend`).
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
    quality: float | None = flag(
        None,
        "Instead of --ragged-ratio: the largest KL to the uncompressed model, nats, as measured by python -m calib "
        "quality; the least ratio below it serves.",
        type=float,
        check=_check_kl,
        metavar="KL",
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
        "How finished segments are stored. wide: as the cache's dtype; int8: keys and values in 8 bits; k5v4: keys in "
        "5 bits, values in 4, and so on; auto: by the ratio, wide at 1 and where codes cannot be served. The ratio is "
        "one of bytes, so fewer bits keep more tokens.",
        choices=ASKED,
    )
    fit: str = flag(
        FITTED,
        "Whether what heads keep of a segment is fitted to stand for all of it. auto: with a profile that has a "
        "codebook; none: as it is.",
        choices=(FITTED, "none"),
    )
    kernel: str = flag("auto", "Attention kernels; auto: triton on CUDA, numba on CPUs.", choices=KERNELS)
    fairkv: str | None = flag(
        None,
        "Which rank of --tp serves which heads. none: in the checkpoint's order; permute: so that ranks store and read "
        "equally much; split: the same, with some heads stored in parts on several ranks.",
        shown="permute, where that is possible",
        choices=("none", "permute", "split"),
    )
    check: str = flag(
        CHECKS[0],
        "Whether answers are compared with the profile's reference of the uncompressed model before the server is "
        "healthy. auto: a warning beyond the limits of sgl-ragged verify; strict: the start ends there.",
        choices=CHECKS,
    )
    check_seconds: float = flag(
        20.0, "Longest time of --ragged-check; auto skips it where it would take longer.", type=float, metavar="S"
    )
    of_features: tuple[Any, ...] = ()
    from_command_line: bool = False
    observer: Any = None

    @property
    def ragged(self) -> bool:
        return self.kv_pool == "ragged"

    def of(self, kind: type[T]) -> T:
        """Return the flags of a feature as given; `kind`: their dataclass."""
        return next((one for one in self.of_features if isinstance(one, kind)), kind())
