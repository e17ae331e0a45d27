"""What sliding-window layers mean for a server: a pool of their own, and its pages."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.windows.sizes import WindowNeeds, window_pages
from sgl_ragged.launch.models import architecture, hybrid_overrides
from sgl_ragged.launch.start import Launch
from sgl_ragged.profiles.geometry import ModelGeometry, WindowedLayers


def keep_apart(launch: Launch) -> WindowedLayers:
    """Have SGLang keep a model's sliding-window layers in a pool of their own.

    Where nothing is served (`launch.view` is None), nothing is done. Raises RaggedConfigError where SGLang does not.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

    server_args, geometry = launch.server_args, launch.geometry
    assert geometry is not None
    assert geometry.windowed is not None, "it was asked"
    if launch.view is not None and not launch.model.is_hybrid_swa:
        overrides = hybrid_overrides(geometry, launch.view.json_model_override_args)
        declare_resolution(
            server_args, "sgl_ragged", disable_hybrid_swa_memory=False, json_model_override_args=overrides
        )
        # The config that was built without them; whoever asks next builds it anew.
        server_args._model_config = None
        if not model_config_of(server_args).is_hybrid_swa:
            raise RaggedConfigError(
                f"SGLang does not keep the sliding-window layers of {architecture(launch.model)} apart; use "
                f"--kv-pool token"
            )
    return geometry.windowed


def asked_share(schedule: Any) -> float | None:
    """--swa-full-tokens-ratio, if it was given. Raises RaggedConfigError for one outside (0, 1]."""
    if not schedule._swa_full_tokens_ratio_explicitly_set:
        return None
    share = schedule.swa_full_tokens_ratio
    if not 0 < share <= 1:
        raise RaggedConfigError(f"--swa-full-tokens-ratio {share} is outside (0, 1]")
    return share


def eviction_interval() -> int:
    """Tokens that leave the windows of a request before SGLang frees pages of them."""
    return max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())


def window_needs(
    geometry: ModelGeometry, *, ranks: int, itemsize: int, segment: int, chunk: int, share: float | None, bounded: bool
) -> WindowNeeds:
    """Needs of the model's sliding-window layers on one rank.

    Args:
        itemsize: bytes per element of the KV dtype.
        chunk: tokens of a chunk of prefill, at most.
        share: --swa-full-tokens-ratio, if it was given.
        bounded: whether histories are.
    """
    windowed = geometry.windowed
    assert windowed is not None, "the feature has joined"
    # With more ranks than heads, every rank has a head of its own.
    elements = windowed.elements_per_token // min(ranks, geometry.num_heads)
    per_prefix = -(-windowed.window // segment)
    # Behind its bound a prompt waits for its next chunk with its window outside the tree, where nobody can evict it.
    waiting = per_prefix if bounded else 0
    return WindowNeeds(
        page_bytes=elements * itemsize * segment,
        per_prefix=per_prefix,
        per_request=window_pages(windowed.window, eviction_interval(), segment),
        in_flight=-(-chunk // segment) + 1 + waiting,
        share=share,
    )
