"""What the launcher decides about tiers below the device (`--enable-hierarchical-cache`)."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.codecs import make_codec
from sgl_ragged.features.host_tier.launch import TierFlags
from sgl_ragged.features.host_tier.restore_schedule import AUTO
from sgl_ragged.features.host_tier.tier_plan import CODEC_NAMES, TierPlan
from sgl_ragged.launch.model_source import model_folder
from sgl_ragged.launch.plan import ServingPlan
from sgl_ragged.launch.start import Launch
from sgl_ragged.profiles.profile_cache import weights_identity
from sgl_ragged.serve.hooks import ADAPTER_ID, hook_launcher, installed_release

STORAGE_BACKENDS = ("file",)
"""Where pages may go beside the host: SGLang's backends whose keys name the model, as far as they were tried."""

NAMED = (
    *("dtype", "quantization", "quantization_param_path", "torchao_config", "modelopt_quant", "rl_quant_profile"),
    *("modelopt_checkpoint_restore_path", "load_format", "model_loader_extra_config", "custom_weight_loader"),
    *("decrypted_config_file", "json_model_override_args", "model_impl", "enable_tf32_matmul"),
    *("enable_quant_communications", "forward_hooks", "lora_target_modules", "experts_shared_outer_loras"),
    *("mm_process_config", "image_processor_backend", "disable_fast_image_processor"),
    "enable_precise_embedding_interpolation",
)
"""Settings of the server that change what a model computes for given tokens and pictures, beside its files.

Not the tokenizer's: tokens are what slabs are named by. Adapters of LoRA are in the ids that requests carry
(`adapters`).
"""

READ_AS_TEXT = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config")
"""How files of a model begin that change which tokens a text becomes, or which are chosen, and nothing behind that."""

CODE = ("*.json", "*.py")
"""Files beside the weights that say what is computed: configurations, and the code of --trust-remote-code."""


def plan_tier(plan: ServingPlan, launch: Launch, *, sized: bool) -> TierPlan:
    """Plan the tiers.

    Args:
        plan: all that decides what slabs hold has joined it.
        sized: whether the user said how large the host's part is.

    Raises:
        RaggedConfigError: the codec cannot serve these budgets or this cache.
    """
    flags, view = launch.options.of(TierFlags), launch.view
    codec = flags.host_codec or CODEC_NAMES[0]
    assert launch.kv_dtype is not None, "the model is known"
    for layout in plan.layouts:
        # A codec refuses what it cannot serve; here rather than in a worker.
        make_codec(codec, layout, launch.kv_dtype)
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
    """Names and contents of a model's files that say what is computed from its weights; none beside a GGUF file."""
    files = sorted({file for pattern in CODE for file in folder.glob(pattern)})
    # An index lists what is in the files of weights.
    read = [file for file in files if not file.name.startswith(READ_AS_TEXT) and not file.name.endswith(".index.json")]
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in read]


def refuse_storage(backend: str | None) -> None:
    """Raise RaggedConfigError for a storage backend that pages of slabs are not given to."""
    if backend is not None and backend not in STORAGE_BACKENDS:
        raise RaggedConfigError(
            f"--hicache-storage-backend {backend} was not tried with --kv-pool ragged, or its keys do not name the "
            f"model, so that it could give slabs of another ratio or profile; use {' or '.join(STORAGE_BACKENDS)}"
        )


@functools.cache
def name_adapters_by_content(from_command_line: bool) -> None:
    """Let what is in an adapter be part of its id; SGLang asks for it behind the resolution. Once per process."""
    from sgl_ragged.features.host_tier.adapters import adapter_id

    hook_launcher(ADAPTER_ID, functools.partial(adapter_id, from_command_line))
