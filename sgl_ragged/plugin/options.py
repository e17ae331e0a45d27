"""What the user asked for, checked once, and carried from the launcher to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sgl_ragged.attention.kernel_choice import KERNELS
from sgl_ragged.budgets import check_ratio, check_segment
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.geometry import ModelGeometry

if TYPE_CHECKING:
    from sgl_ragged.plugin.served_budgets import ServedBudgets

ATTRIBUTE = "_sgl_ragged"
"""Bookkeeping attribute of SGLang's ServerArgs that holds the options; it is pickled along to the workers."""

KV_POOLS = ("token", "ragged")

FAIRKV_MODES = ("none", "permute", "split")

DEFAULTS: dict[str, Any] = {
    "ragged_ratio": 0.5,
    "ragged_segment": 256,
    "ragged_scorer": None,
    "ragged_scorer_weights": None,
    "ragged_profile": "auto",
    "ragged_heads_per_group": 1,
    "ragged_kernel": "auto",
    "ragged_fairkv": None,
}
"""Defaults of the flags that only mean something with --kv-pool ragged."""

CALIBRATED_SCORER = "gate"
"""The scorer of models that are calibrated at their first start (docs/quality.md)."""

OTHER_SCORER = "keydiff"
"""The scorer where there is nothing but budgets: bundled profiles, and equal ones."""

FLAGS = ("kv_pool", "kv_bytes", *DEFAULTS)

OBSERVER = "ragged_observer"
"""Keyword of `Engine` alone: an object that the workers' attention backend calls; the calibrator's recorder."""


@dataclass(frozen=True)
class RaggedOptions:
    """Checked options. `kv_bytes` is the KV budget per rank in bytes, None for SGLang's own profiling.

    `profile` is "auto", "uniform" or a path, `scorer` a name or "" for what the profile was made with; the launcher
    settles both (`calibrating.settle_profile`). `observer` is pickled along to the workers
    (`attention.backend.RaggedAttnBackend`). `fairkv` is None until the launcher has settled it; it then adds
    `geometry`, the model as its checkpoint has it, `budgets`, what it has read from files: workers open none of them,
    and `placement`, None where heads are where SGLang puts them.
    """

    kv_pool: str
    kv_bytes: int | None
    ratio: float
    segment: int
    scorer: str
    scorer_weights: str | None
    profile: str
    heads_per_group: int
    kernel: str
    fairkv: str | None
    from_command_line: bool
    observer: Any = None
    geometry: ModelGeometry | None = None
    budgets: ServedBudgets | None = field(default=None, compare=False)
    placement: Placement | None = None

    @property
    def ragged(self) -> bool:
        return self.kv_pool == "ragged"


def make_options(given: dict[str, Any], *, from_command_line: bool, observer: Any = None) -> RaggedOptions | None:
    """Check the plugin's flags.

    Args:
        given: flag name (FLAGS) to value; absent or None means not given.
        observer: see OBSERVER.

    Returns:
        The options, or None when nothing was asked of the plugin, which then stays inert.

    Raises:
        RaggedConfigError: a value is out of range, or a --ragged-* flag was given without --kv-pool ragged.
    """
    from sgl_ragged.mem_pool.sizing import parse_bytes

    given = {name: value for name, value in given.items() if value is not None}
    kv_pool = given.get("kv_pool", "token")
    if kv_pool not in KV_POOLS:
        raise RaggedConfigError(f"unknown --kv-pool {kv_pool!r}; known: {', '.join(KV_POOLS)}")
    kv_bytes = given.get("kv_bytes")
    if kv_bytes is not None:
        kv_bytes = parse_bytes(str(kv_bytes))
    stray = [name for name in DEFAULTS if name in given]
    if kv_pool == "token":
        if stray:
            flags = ", ".join("--" + name.replace("_", "-") for name in stray)
            raise RaggedConfigError(f"{flags} given without --kv-pool ragged: add it, or drop the flag")
        if kv_bytes is None:
            return None
    values = DEFAULTS | {name: given[name] for name in stray}
    check_ratio(float(values["ragged_ratio"]))
    check_segment(int(values["ragged_segment"]))
    if int(values["ragged_heads_per_group"]) < 1:
        raise RaggedConfigError(f"--ragged-heads-per-group {values['ragged_heads_per_group']} must be at least 1")
    if values["ragged_kernel"] not in KERNELS:
        raise RaggedConfigError(f"unknown --ragged-kernel {values['ragged_kernel']!r}; known: {', '.join(KERNELS)}")
    if values["ragged_fairkv"] not in (None, *FAIRKV_MODES):
        raise RaggedConfigError(
            f"unknown --ragged-fairkv {values['ragged_fairkv']!r}; known: {', '.join(FAIRKV_MODES)}"
        )
    if kv_pool == "ragged":
        from sgl_ragged.scorers import get_scorer

        if values["ragged_scorer"] is not None:
            get_scorer(values["ragged_scorer"])
    return RaggedOptions(
        kv_pool=kv_pool,
        kv_bytes=kv_bytes,
        ratio=float(values["ragged_ratio"]),
        segment=int(values["ragged_segment"]),
        scorer=values["ragged_scorer"] or "",
        scorer_weights=values["ragged_scorer_weights"],
        profile=str(values["ragged_profile"]),
        heads_per_group=int(values["ragged_heads_per_group"]),
        kernel=values["ragged_kernel"],
        fairkv=values["ragged_fairkv"],
        from_command_line=from_command_line,
        observer=observer,
    )
