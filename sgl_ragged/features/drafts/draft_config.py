"""Read the config of a draft model or head, and refuse those that do not fit the served model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.draft_model import DraftModel
from sgl_ragged.features.drafts.sglang_flags import by_head
from sgl_ragged.launch.models import architecture, expected_kv_dtype, load_model_config, model_geometry, refuse_model
from sgl_ragged.launch.start import ModelStart

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Key in the config of an EAGLE-3 head: the layers after which it reads hidden states."""

_OF_EAGLE = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MiMoMTP")

HEADS = {"EAGLE": _OF_EAGLE, "NEXTN": _OF_EAGLE, "EAGLE3": ("LlamaForCausalLMEagle3",)}
"""Architectures that draft from hidden states, by algorithm: as config.json names heads, and as SGLang names the layers
of a checkpoint that draft (MTP)."""


def read_draft_model(start: ModelStart) -> DraftModel:
    """Read the sizes of the draft model's cache.

    Raises:
        RaggedConfigError: the draft model is not found, its attention is of a kind that `--kv-pool ragged` does not
            serve, or it is a head for another model.
    """
    path = start.server_args.speculative_draft_model_path or start.model.model_path
    # Where no server is started, SGLang has resolved nothing.
    config = (
        load_model_config(Path(path), draft=True) if not start.served else _as_workers_read_it(start.server_args, path)
    )
    try:
        refuse_model(config)
    except RaggedConfigError as error:
        raise RaggedConfigError(f"as a draft model, {error}") from None
    if by_head(start.server_args):
        _refuse_head(config, start)
    geometry = model_geometry(config)
    if geometry.windowed is not None:
        raise RaggedConfigError(f"{path} has sliding windows, which have not been tested in a draft model; use another")
    kv_dtype = start.kv_dtype if not start.served else expected_kv_dtype(config, start.view.kv_cache_dtype)
    layers = config.num_nextn_predict_layers or geometry.num_layers
    return DraftModel(Path(path).name, layers, geometry.num_heads, geometry.head_dim, kv_dtype.itemsize)


def _refuse_head(head: Any, start: ModelStart) -> None:
    """Raise RaggedConfigError unless a head drafts from this model's hidden states; both are SGLang's ModelConfigs."""
    algorithm, model, config = start.server_args.speculative_algorithm.upper(), start.model, head.hf_config
    path, found = start.server_args.speculative_draft_model_path, architecture(head)
    known = HEADS[algorithm]
    if path is None and found not in known:
        raise RaggedConfigError(
            f"the checkpoint of {architecture(model)} has no layers that draft and are tested with --kv-pool ragged: "
            f"add --speculative-draft-model-path, or use NGRAM"
        )
    if found not in known:
        raise RaggedConfigError(
            f"{path} is of architecture {found}, and with --kv-pool ragged {algorithm} has been tested with "
            f"{' and '.join(known)}; use such a head, or another --speculative-algorithm"
        )
    own = {name: getattr(config, name, None) for name in ("eagle_config", "target_hidden_size")}
    read, aux = head.hidden_size, list[int]()
    if algorithm == "EAGLE3":
        read, aux = own["target_hidden_size"] or read, (own["eagle_config"] or {}).get(AUX_LAYERS) or []
    wrong = (
        (read != model.hidden_size, f"reads hidden states of {read} elements, and they have {model.hidden_size}"),
        (head.vocab_size != model.vocab_size, f"has {head.vocab_size} tokens, and the model {model.vocab_size}"),
        (
            any(not -1 <= layer < model.num_hidden_layers - 1 for layer in aux),
            f"reads after layers {aux} of {model.num_hidden_layers}, and not the last one can be read",
        ),
        (
            found.endswith("Eagle") and bool(config.tie_word_embeddings),
            "has tie_word_embeddings in its config.json, and SGLang gives it embeddings and output of the model apart",
        ),
    )
    for applies, why in wrong:
        if applies:
            raise RaggedConfigError(
                f"{path or model.model_path} is no head for this model: it {why}; use one that was made for it"
            )


def _as_workers_read_it(server_args: Any, path: str) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig

    revision = resolving_view(server_args).speculative_draft_model_revision
    return ModelConfig.from_server_args(server_args, model_path=path, model_revision=revision, is_draft_model=True)
