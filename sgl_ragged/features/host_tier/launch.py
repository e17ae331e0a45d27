"""The host tier: its flags, and what names the contents of a tier under the device."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sgl_ragged import sglang_contract as sglang
from sgl_ragged.contract_checks import installed_release, wrap
from sgl_ragged.features.host_tier.adapters import adapter_id
from sgl_ragged.features.host_tier.codecs import make_codec
from sgl_ragged.features.host_tier.restore_schedule import AUTO, MODES
from sgl_ragged.features.host_tier.tier_plan import CODEC_NAMES, TierPlan, refuse_storage
from sgl_ragged.launch.conflicts import CODES, NODES
from sgl_ragged.launch.feature import STAYS_WIDE, Conflict, LaunchFeature
from sgl_ragged.launch.flags import flag
from sgl_ragged.launch.model_source import model_folder
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import BudgetedStart, ModelStart, Start
from sgl_ragged.profiles.profile_cache import weights_identity

CASE = "--enable-hierarchical-cache"

CODEC = "--ragged-host-codec fp8 or shared"

NAMED = (
    *("dtype", "quantization", "quantization_param_path", "torchao_config", "modelopt_quant", "rl_quant_profile"),
    *("modelopt_checkpoint_restore_path", "load_format", "model_loader_extra_config", "custom_weight_loader"),
    *("decrypted_config_file", "json_model_override_args", "model_impl", "enable_tf32_matmul"),
    *("enable_quant_communications", "forward_hooks", "lora_target_modules", "experts_shared_outer_loras"),
    *("mm_process_config", "image_processor_backend", "disable_fast_image_processor"),
    "enable_precise_embedding_interpolation",
)
"""Settings of the server that change what a model computes for given tokens and pictures, in addition to its files.

Not the tokenizer's: tokens are what slabs are named by. Adapters of LoRA are in the ids that requests carry
(`adapters`).
"""

READ_AS_TEXT = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config")
"""Prefixes of files that change how text becomes tokens or how tokens are chosen, and nothing else."""

CODE = ("*.json", "*.py")
"""Files other than weights that decide what is computed: configurations, and the code of --trust-remote-code."""


@dataclass(frozen=True)
class TierFlags:
    """Values as given."""

    restore: str | None = flag(
        None,
        "With --enable-hierarchical-cache: load segments from the host, or compute the first of them meanwhile; auto: "
        "what pays.",
        shown=AUTO,
        choices=MODES,
    )
    host_codec: str | None = flag(
        None,
        "How slabs lie in the host tier and in storage: as they are, in 8 bits, or without the layers that are "
        "restored from another's. All but exact lose something (docs/host-tier.md).",
        shown=CODEC_NAMES[0],
        choices=CODEC_NAMES,
    )


class HostTier(LaunchFeature):
    """Settings: True where the user said how large the host's part is; then `TierPlan`."""

    name = "tier"
    case = CASE
    flags = TierFlags
    in_vain = "{flags} has no effect without --enable-hierarchical-cache: add --enable-hierarchical-cache, or remove it"
    contract = sglang.HOST_TIER
    needed_for = " with --enable-hierarchical-cache"
    cases: ClassVar[Mapping] = {
        CODEC: lambda start: start.options.of(TierFlags).host_codec not in (None, CODEC_NAMES[0])
    }
    conflicts = (
        Conflict(CASE, "sliding-window layers", "pages of windows are not copied to the host", "drop it"),
        Conflict(CASE, NODES, "host memory is not divided among nodes", "drop one of the two"),
        Conflict(CODES, CODEC, "the host's codec would round it again", "use exact", STAYS_WIDE),
    )

    def asked(self, start: Start) -> bool:
        return start.server_args.enable_hierarchical_cache

    def settle(self, start: Start) -> bool:
        refuse_storage(start.server_args.hicache_storage_backend)
        name_adapters_by_content(start.options.from_command_line)
        return bool(start.server_args.hicache_ratio or start.server_args.hicache_size)

    def sglang_settings(self, settings: bool, start: ModelStart) -> dict[str, Any]:
        # SGLang would leave 10 GiB of the host free, which is the device here; `host_pages` sizes the host's part.
        return {"hicache_host_memory_fraction": None} if start.view.device == "cpu" else {}

    def join(self, settings: bool, plan: ServingPlan, start: BudgetedStart) -> TierPlan:
        return plan_tier(plan, start, sized=settings)


def plan_tier(plan: ServingPlan, start: BudgetedStart, *, sized: bool) -> TierPlan:
    """Return the settings of the tier.

    Args:
        plan: all that decides what slabs hold has joined it.
        sized: True if the user gave the size of the host's part.

    Raises:
        RaggedConfigError: the codec cannot serve these budgets or this cache.
    """
    flags, view = start.options.of(TierFlags), start.view
    codec = flags.host_codec or CODEC_NAMES[0]
    for layout in plan.layouts:
        # A codec refuses what it cannot serve; here rather than in a worker.
        make_codec(codec, layout, start.kv_dtype)
    settings = {name: str(getattr(view, name, None)) for name in NAMED}
    # The path is not named: the same weights in another folder give the same slabs.
    folder = model_folder(view)
    model = [weights_identity(folder), _code(folder), settings, installed_release()]
    state = json.dumps([plan.digest, *model], sort_keys=True)
    return TierPlan(
        codec=codec,
        served=hashlib.sha256(state.encode()).hexdigest()[:16],
        sized=sized,
        restore=flags.restore or AUTO,
    )


def _code(folder: Path) -> list[tuple[str, str]]:
    """Return names and digests of the model's configurations and code; none with a GGUF file."""
    files = sorted({file for pattern in CODE for file in folder.glob(pattern)})
    # An index lists what is in the files of weights.
    read = [file for file in files if not file.name.startswith(READ_AS_TEXT) and not file.name.endswith(".index.json")]
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in read]


@functools.cache
def name_adapters_by_content(from_command_line: bool) -> None:
    """Make an adapter's contents part of its id, once per process; SGLang makes ids after the resolution."""
    wrap([(sglang.ADAPTER_ID, functools.partial(adapter_id, from_command_line))])


FEATURE = HostTier()
