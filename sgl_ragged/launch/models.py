"""Judge which models --kv-pool ragged serves, for the launcher, the workers and the command line.

Only SGLang's ModelConfig is read, before weights are. Properties that only the loaded model shows, such as layers that
share their keys, are refused where the attention backend is made.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.known_models import has_class
from sgl_ragged.launch.multimodal import media_reason
from sgl_ragged.mem_pool.kv_dtype import FP8
from sgl_ragged.profiles.fingerprint import config_fingerprint
from sgl_ragged.profiles.geometry import ModelGeometry, windowed_layers

NAMED_KV_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Values of --kv-cache-dtype that are served, in addition to auto."""

_BIDIRECTIONAL = (
    "BertModel",
    "BertForSequenceClassification",
    "Contriever",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
    "EmbeddingGemma2Model",
)


def load_model_config(folder: Path, draft: bool = False, dtype: str = "auto") -> Any:
    """Return SGLang's ModelConfig of a model on disk, as a server reads it when only the folder is given.

    Args:
        draft: True for a draft model, which may be some layers of the checkpoint.
        dtype: value of --dtype.

    Raises:
        RaggedConfigError: there is no config.json, or SGLang cannot make sense of it.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RaggedConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise RaggedConfigError(f"{path} is no configuration of a model that can be served: it names no architectures")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.configs.model_config import ModelConfig

        try:
            return ModelConfig(model_path=str(folder), is_draft_model=draft, dtype=dtype)
        except Exception as error:
            # SGLang, transformers and the config's own code raise whatever they like.
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RaggedConfigError(f"cannot read {path} as a model's configuration: {reason}") from None


def model_geometry(model_config: Any) -> ModelGeometry:
    """Return the geometry of the whole model from SGLang's ModelConfig."""
    heads = model_config.get_total_num_kv_heads()
    config = model_config.hf_text_config.to_dict() | {"architectures": model_config.hf_config.architectures}
    windowed = windowed_layers(config, heads, model_config.head_dim)
    return ModelGeometry(
        name=model_config.model_path,
        fingerprint=config_fingerprint(config),
        num_layers=model_config.num_hidden_layers - (len(windowed.layers) if windowed else 0),
        num_heads=heads,
        q_per_kv=model_config.get_total_num_attention_heads() // heads,
        head_dim=model_config.head_dim,
        windowed=windowed,
    )


def pipeline_stages(geometry: ModelGeometry, count: int) -> tuple[tuple[int, int], ...]:
    """Return [first, end) layers of each of --pp-size stages, as SGLang divides them; empty for one stage.

    Raises:
        RaggedConfigError: there are fewer layers than stages, or SGLANG_PP_LAYER_PARTITION does not fit them.
    """
    from sglang.srt.distributed.utils import get_pp_indices

    if count == 1:
        return ()
    try:
        stages = tuple(get_pp_indices(geometry.all_layers, number, count) for number in range(count))
    except ValueError as error:
        raise RaggedConfigError(f"SGLANG_PP_LAYER_PARTITION: {error}; correct it, or unset it") from None
    if any(first >= end for first, end in stages):
        raise RaggedConfigError(
            f"--pp-size {count}: {geometry.name} has {geometry.all_layers} layers, and each stage needs one; use fewer"
        )
    return stages


def refuse_model(model_config: Any) -> None:
    """Raise RaggedConfigError for a model whose attention is not causal MHA/GQA, some layers of it to a window.

    Args:
        model_config: SGLang's ModelConfig.
    """
    arch = architecture(model_config)
    if getattr(model_config, "model_impl", None) not in ("transformers", "mindspore") and not has_class(arch):
        raise RaggedConfigError(
            f"{arch} cannot be served with --kv-pool ragged: this release of SGLang has no model class for it; install "
            f"a release of sgl-ragged and SGLang that has one, or use --kv-pool token"
        )
    try:
        _refuse_attention(model_config, arch)
    except RaggedConfigError:
        raise
    except Exception as error:
        # Configs bring code of their own, and SGLang's reading of them raises whatever it likes.
        raise RaggedConfigError(
            f"{arch} cannot be served with --kv-pool ragged: reading its configuration failed ({_first_line(error)}); "
            f"use --kv-pool token"
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _refuse_attention(model_config: Any, arch: str) -> None:
    """Raise RaggedConfigError for attention that slabs cannot hold. SGLang must have a class for the model."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

    text = model_config.hf_text_config
    media = media_reason(model_config, arch)
    reasons = (
        (
            model_config.attention_arch == AttentionArch.MLA,
            "MLA attention keeps one latent per token, not one per head",
        ),
        (mambaish_config(model_config) is not None, "its state-space or linear-attention layers have no KV cache"),
        (model_config.attention_arch != AttentionArch.MHA, "its attention is of another kind than MHA and GQA"),
        *_window_reasons(model_config),
        (is_minimax_sparse(model_config.hf_config), "its sparse attention indexes single tokens"),
        (model_config.is_encoder_decoder, "cross-attention is not supported"),
        (
            arch in _BIDIRECTIONAL or getattr(text, "use_bidirectional_attention", None) not in (None, False),
            "its attention is not causal",
        ),
        (media is not None, str(media)),
        (bool(getattr(text, "attn_logit_softcapping", None)), "its attention caps logits"),
        (bool(getattr(text, "num_kv_shared_layers", 0)), "some of its layers share keys and values"),
        (model_config.head_dim != model_config.v_head_dim, "keys and values have different head dimensions"),
    )
    for applies, reason in reasons:
        if applies:
            raise RaggedConfigError(f"{arch} cannot be served with --kv-pool ragged: {reason}; use --kv-pool token")


def architecture(model_config: Any) -> str:
    """Return the model's architecture for messages."""
    return (model_config.hf_config.architectures or ["this model"])[0]


def expected_kv_dtype(model_config: Any, kv_cache_dtype: str) -> torch.dtype:
    """Return the cache's dtype in the workers, as far as the launcher can know without weights.

    SGLang decides in the worker, and `refuse_kv_dtype` sees what it decided. A checkpoint turns --kv-cache-dtype auto
    into FP8 by what ModelOpt or compressed-tensors write into config.json or, on this disk, into hf_quant_config.json.
    """
    if kv_cache_dtype in NAMED_KV_DTYPES:
        return NAMED_KV_DTYPES[kv_cache_dtype]
    return torch.float8_e4m3fn if any(map(_is_fp8_kv, _quantization(model_config))) else model_config.dtype


def refuse_kv_scheme(model_config: Any, kv_cache_dtype: str) -> None:
    """Raise RaggedConfigError for an FP8 cache of a checkpoint that wants other scales than one for each layer.

    SGLang leaves out such scales, with a warning, and stores keys and values as if they were 1.
    """
    if expected_kv_dtype(model_config, kv_cache_dtype) not in FP8:
        return
    for section in _quantization(model_config):
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, dict) and not _is_static(scheme):
            raise RaggedConfigError(
                f"the checkpoint of {architecture(model_config)} asks for scales of its FP8 KV cache that are dynamic, "
                f"or not one for each layer, which SGLang does not have; pass --kv-cache-dtype bfloat16"
            )


def _quantization(model_config: Any) -> list[dict[str, Any]]:
    sections = [model_config.hf_quant_config]
    with contextlib.suppress(OSError, ValueError):
        sections.append(json.loads((Path(model_config.model_path) / "hf_quant_config.json").read_text()))
    return [section.get("quantization") or section for section in sections if isinstance(section, dict)]


def _is_fp8_kv(section: dict[str, Any]) -> bool:
    if str(section.get("kv_cache_quant_algo")).upper() == "FP8":
        return True
    scheme = section.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        return False
    if section.get("quant_method") == "compressed-tensors":
        return scheme.get("strategy") == "tensor" and _is_static(scheme)
    return str(section.get("quant_method", "modelopt")).startswith("modelopt")


def _is_static(scheme: dict[str, Any]) -> bool:
    symmetric = scheme.get("symmetric", True) and not scheme.get("dynamic", False)
    return symmetric and scheme.get("strategy", "tensor") == "tensor"


def _window_reasons(model_config: Any) -> tuple[tuple[bool, str], ...]:
    """Return (applies, reason) for sliding windows that are not served."""
    text = model_config.hf_text_config
    geometry = model_geometry(model_config)
    windowed = geometry.windowed.layers if geometry.windowed else ()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    known = model_config.swa_attention_layer_ids if model_config.is_hybrid_swa else None
    shapes = {
        (model_config.get_total_num_kv_heads(), model_config.head_dim, model_config.v_head_dim),
        (model_config.get_swa_num_kv_heads(1), model_config.swa_head_dim, model_config.swa_v_head_dim),
    }
    return (
        (
            bool(kinds),
            f"some of its layers are of another kind than full and sliding attention: {', '.join(sorted(kinds))}",
        ),
        (getattr(model_config, "attention_chunk_size", None) is not None, "some of its layers attend to chunks"),
        (
            bool(model_config.is_hybrid_swa_compress) or (bool(windowed) and len(shapes) > 1),
            "its sliding-window layers have heads of another shape",
        ),
        (
            model_config.is_hybrid_swa and known != list(windowed),
            f"SGLang takes layers {known} for sliding-window layers, and its config lists {list(windowed)}",
        ),
        (
            bool(windowed) and geometry.num_layers == 0,
            "all its layers attend to a window: there is nothing to compress",
        ),
    )


def hybrid_overrides(geometry: ModelGeometry, given: str | None) -> str | None:
    """Return --json-model-override-args with which SGLang gives sliding-window layers a pool of their own, or None.

    SGLang lists some models as hybrid itself; of the other ones it keeps all tokens in all layers.

    Args:
        given: the user's overrides.
    """
    if geometry.windowed is None:
        return None
    pattern = [int(number in geometry.windowed.layers) for number in range(geometry.all_layers)]
    return json.dumps(json.loads(given or "{}") | {"is_hybrid_swa": True, "hybrid_layer_pattern": pattern})
