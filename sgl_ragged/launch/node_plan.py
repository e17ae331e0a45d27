"""Messages between the launchers of several nodes: introductions, and the first node's decisions."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

import sgl_ragged
from sgl_ragged.contract_checks import installed_release
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.launch.command_line import all_flags
from sgl_ragged.launch.feature import LaunchFeature
from sgl_ragged.launch.flags import dashed
from sgl_ragged.launch.model_source import weights_sample
from sgl_ragged.launch.models import architecture
from sgl_ragged.launch.nodes import Introduction
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.start import ModelStart
from sgl_ragged.mem_pool.slab_format import Share

OF_FIRST_NODE = ("ragged_profile", "ragged_scorer_weights")
"""Flags that name files, which the first node reads for all."""

SETTINGS = (
    *("nnodes", "tp_size", "pp_size", "dp_size", "device", "dtype", "kv_cache_dtype", "quantization", "load_format"),
    *("json_model_override_args", "context_length", "chunked_prefill_size", "max_running_requests"),
    *("max_total_tokens", "enable_mixed_chunk", "disable_radix_cache", "enable_lora"),
    *("enable_hierarchical_cache", "speculative_algorithm", "disable_overlap_schedule"),
)
"""SGLang's settings that all nodes need alike, resolved."""


@dataclass(frozen=True)
class Choices:
    """Choices that each launcher makes before budgets are chosen.

    kernel: as in ServingPlan. share: ratio and format of slabs. joining: features and their first settings.
    """

    kernel: str
    share: Share
    joining: Mapping[LaunchFeature, Any]


@dataclass(frozen=True)
class Decided:
    """Decisions of the first node: all inputs of a plan that another node might see otherwise.

    scorer, profile, source: as in ServingPlan. kept: int64 [layers, heads], before features joined.
    placement: None for SGLang's own order. files: contents of the profile and of the scorer's weights, by the flags'
    names; absent where there are none. digest: of the plan that came out.
    """

    scorer: str
    profile: str
    source: str
    kept: np.ndarray
    placement: Placement | None
    files: Mapping[str, bytes]
    digest: str

    def message(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the message to send: JSON, and safetensors by name."""
        arrays = {"kept": self.kept}
        if self.placement is not None:
            arrays |= {"heads": self.placement.heads, "placed": self.placement.kept}
        told = {name: getattr(self, name) for name in ("scorer", "profile", "source", "digest")}
        told["mode"] = None if self.placement is None else self.placement.mode
        contiguous = {name: np.ascontiguousarray(array, dtype=np.int64) for name, array in arrays.items()}
        return told, {**self.files, "arrays": save(contiguous)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any], files: Mapping[str, bytes]) -> Decided:
        """Read what `message` returned."""
        arrays = load(files["arrays"])
        placement = None
        if message["mode"] is not None:
            placement = Placement(arrays["heads"], arrays["placed"], message["mode"])
        told = {name: message[name] for name in ("scorer", "profile", "source", "digest")}
        given = {name: content for name, content in files.items() if name != "arrays"}
        return cls(kept=arrays["kept"], placement=placement, files=given, **told)


def introduce(start: ModelStart, choices: Choices) -> Introduction:
    """Return this node's introduction to the other nodes."""
    options, view = start.options, start.view
    facts = {
        "sgl-ragged": sgl_ragged.__version__,
        "SGLang": installed_release(),
        "model": f"{architecture(start.model)} with fingerprint {start.geometry.fingerprint}",
        "weights": weights_sample(view),
        **_flags(options),
        **{dashed(name): getattr(view, name, None) for name in SETTINGS},
        "kernels": choices.kernel,
        "slabs": choices.share.form.name,
        "ratio": choices.share.ratio,
        "cache dtype": str(start.kv_dtype),
        "features": sorted(feature.name for feature in choices.joining),
    }
    # As the other end will read it.
    return Introduction(view.node_rank, socket.gethostname(), json.loads(json.dumps(facts, default=str)))


def _flags(options: RaggedOptions) -> dict[str, Any]:
    """Return the plugin's flags as given, except those that name files."""
    given = {one.name: getattr(options, one.name) for one in fields(options) if one.metadata}
    given |= {one.name: getattr(of, one.name) for of in options.of_features for one in fields(of) if one.metadata}
    return {
        dashed(keyword): given.get(one.name, one.default)
        for keyword, one in all_flags().items()
        if keyword not in OF_FIRST_NODE
    }
