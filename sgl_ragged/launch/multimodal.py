"""Models that take pictures, sound or films: which are served, and what of the plugin does not go with them.

Their language model is what --kv-pool ragged compresses; to it, a picture is a run of tokens like any other, as long as
its attention stays causal. SGLang's models hand masks of their own to backends that they know by class, and say nothing
to other backends: a model that is not listed here could lose its mask in silence.
"""

from __future__ import annotations

from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.scorers import get_scorer

SERVED = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Glm4vForConditionalGeneration",
    }
)
"""Architectures under test with pictures, against Hugging Face (docs/models.md)."""

_OWN_MASKS = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
    }
)
"""Architectures whose tokens of one picture attend to each other in both directions, by a mask for SGLang's Triton
backend alone."""


def media_reason(model_config: Any, arch: str) -> str | None:
    """Return why a model that takes more than text is not served; None if it is served or takes text alone.

    Args:
        model_config: SGLang's ModelConfig; it does not call a model multimodal whose other towers it leaves out.
        arch: the model's architecture.
    """
    if not model_config.is_multimodal or arch in SERVED:
        return None
    if arch in _OWN_MASKS:
        return "the tokens of a picture attend to each other in both directions, by a mask of the model's own"
    return "multimodal models of this architecture have not been tested"


def counts_pictures(text_config: Any) -> bool:
    """Return True if RoPE positions differ from places in the sequence (M-RoPE); `text_config` as below."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    return "mrope_section" in rope


def refuse_positions(text_config: Any, scorer: str) -> None:
    """Raise RaggedConfigError for a scorer that turns keys by their place in the sequence, where that is not RoPE's.

    With M-RoPE the tokens of a picture have three positions each, and the text after it continues from the largest.

    Args:
        text_config: of the language model, as SGLang reads it.
        scorer: its name.
    """
    if get_scorer(scorer).counts_positions and counts_pictures(text_config):
        raise RaggedConfigError(
            f"scorer {scorer!r} takes a token's place in the sequence for its position under RoPE, and this model has "
            f"three positions per token (M-RoPE); use another --ragged-scorer"
        )
