"""Sliding windows: a pool of SGLang's own for the layers that have them, and its pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.windows.sizes import WindowNeeds, eviction_interval, window_needs
from sgl_ragged.launch.conflicts import NODES, SPLIT
from sgl_ragged.launch.feature import Conflict, LaunchFeature
from sgl_ragged.launch.models import architecture, hybrid_overrides
from sgl_ragged.launch.plan import FeatureSettings, Prefill, Rank, ServingPlan
from sgl_ragged.launch.start import BudgetedStart, ModelStart, Start
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.profiles.geometry import WindowedLayers

ONE_POOL = "--disable-hybrid-swa-memory"
CASE = "sliding-window layers"


@dataclass(frozen=True)
class WindowSettings(FeatureSettings):
    """windowed: the layers with windows."""

    windowed: WindowedLayers

    def side_pages(self, rank: Rank, prefill: Prefill) -> WindowNeeds:
        return window_needs(
            rank.plan.geometry,
            ranks=rank.plan.ranks,
            itemsize=rank.itemsize,
            segment=rank.plan.segment,
            chunk=prefill.chunk,
            share=asked_share(prefill.schedule),
            interval=eviction_interval(),
            bounded=rank.plan.settings_of("history") is not None,
        )


class Windows(LaunchFeature):
    """Settings: `WindowSettings`."""

    name = "windows"
    case = CASE
    contract = sglang.WINDOWS
    needed_for = " for models with sliding windows"
    cases: ClassVar[Mapping] = {ONE_POOL: lambda start: start.server_args.disable_hybrid_swa_memory}
    conflicts = (
        Conflict(ONE_POOL, CASE, "windows need a pool of their own", "drop it"),
        Conflict(NODES, CASE, "they have not been tested over nodes", "use one node"),
        Conflict(SPLIT, CASE, "it changes the number of heads of all layers, and these keep theirs", "use permute"),
    )

    def asked(self, start: Start) -> bool:
        return isinstance(start, ModelStart) and start.geometry.windowed is not None

    def settle(self, start: Start) -> WindowSettings:
        assert isinstance(start, ModelStart), "windows are seen in the model"
        return WindowSettings(keep_apart(start))

    def join(self, settings: WindowSettings, plan: ServingPlan, start: BudgetedStart) -> WindowSettings:
        return settings

    def layout_info(self, settings: Any, rank: Rank, sizes: PoolSizes) -> dict[str, Any]:
        return {"window_pages": sizes.side_pages, "windows_bytes": sizes.side_pages_bytes}


def keep_apart(start: ModelStart) -> WindowedLayers:
    """Have SGLang keep a model's sliding-window layers in a pool of their own; changes nothing for `layout`.

    Raises:
        RaggedConfigError: SGLang does not.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

    server_args, geometry = start.server_args, start.geometry
    assert geometry.windowed is not None, "the feature has joined"
    if start.served and not start.model.is_hybrid_swa:
        overrides = hybrid_overrides(geometry, start.view.json_model_override_args)
        declare_resolution(
            server_args, "sgl_ragged", disable_hybrid_swa_memory=False, json_model_override_args=overrides
        )
        # SGLang has cached the config without the overrides; the next access builds it with them.
        server_args._model_config = None
        if not model_config_of(server_args).is_hybrid_swa:
            raise RaggedConfigError(
                f"SGLang does not keep the sliding-window layers of {architecture(start.model)} apart; use "
                f"--kv-pool token"
            )
    return geometry.windowed


def asked_share(schedule: Any) -> float | None:
    """Return --swa-full-tokens-ratio if it was given. Raises RaggedConfigError for one outside (0, 1]."""
    if not schedule._swa_full_tokens_ratio_explicitly_set:
        return None
    share = schedule.swa_full_tokens_ratio
    if not 0 < share <= 1:
        raise RaggedConfigError(f"--swa-full-tokens-ratio {share} is outside (0, 1]")
    return share


FEATURE = Windows()
