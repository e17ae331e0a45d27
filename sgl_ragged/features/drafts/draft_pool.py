"""A draft model beside the pool of slabs: what its cache takes, where it lies, and its attention on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.draft_model import DraftModel
from sgl_ragged.features.drafts.sglang_flags import BACKENDS, by_head
from sgl_ragged.features.windows.pool import slab_pool
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.start import Launch

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""In the config of an EAGLE-3 head: behind which layers of the model it reads."""

_OF_EAGLE = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MiMoMTP")

HEADS = {"EAGLE": _OF_EAGLE, "NEXTN": _OF_EAGLE, "EAGLE3": ("LlamaForCausalLMEagle3",)}
"""Architectures that draft from hidden states, by algorithm: as config.json names heads, and as SGLang names the layers
of a checkpoint that draft (MTP)."""


def read_draft_model(launch: Launch) -> DraftModel:
    """What the cache of a start's draft model takes.

    Raises:
        RaggedConfigError: there is no such model, its attention is of a kind that `--kv-pool ragged` does not serve, or
            it is a head for another model.
    """
    from sgl_ragged.launch.models import expected_kv_dtype, load_model_config, model_geometry, refuse_model

    path = launch.server_args.speculative_draft_model_path or launch.model.model_path
    # Where no server is started, SGLang has resolved nothing.
    config = (
        load_model_config(Path(path), draft=True)
        if launch.view is None
        else _as_workers_read_it(launch.server_args, path)
    )
    try:
        refuse_model(config)
    except RaggedConfigError as error:
        raise RaggedConfigError(f"as a draft model, {error}") from None
    if by_head(launch.server_args):
        _refuse_head(config, launch)
    geometry = model_geometry(config)
    if geometry.windowed is not None:
        raise RaggedConfigError(f"{path} has sliding windows, which have not been tested in a draft model; use another")
    kv_dtype = launch.kv_dtype if launch.view is None else expected_kv_dtype(config, launch.view.kv_cache_dtype)
    assert kv_dtype is not None, "the cache is known"
    layers = config.num_nextn_predict_layers or geometry.num_layers
    return DraftModel(Path(path).name, layers, geometry.num_heads, geometry.head_dim, kv_dtype.itemsize)


def _refuse_head(head: Any, launch: Launch) -> None:
    """Raise RaggedConfigError unless a head drafts from this model's hidden states; both are SGLang's ModelConfigs."""
    from sgl_ragged.launch.models import architecture

    algorithm, model, config = launch.server_args.speculative_algorithm.upper(), launch.model, head.hf_config
    path, found = launch.server_args.speculative_draft_model_path, architecture(head)
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
            f"reads behind layers {aux} of {model.num_hidden_layers}, and not the last one can be read",
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


def build_beside(model: DraftModel, configurator: Any, build: Callable[[], Any]) -> Any:
    """SGLang's own pool for the draft model, at the locations of the pool of slabs; copies of open segments have its
    tokens, too.

    Raises:
        RaggedConfigError: it is not of the size that was counted.
    """
    pool, slabs = build(), slab_pool(configurator.token_to_kv_pool_allocator.get_kvcache())
    counted = model.token_bytes * slabs.page_size * slabs.sizes.num_slots
    if sum(pool.get_kv_size_bytes()) != counted:
        raise RaggedConfigError(
            f"the draft model's cache takes {sum(pool.get_kv_size_bytes())} bytes, and {counted} were counted for it; "
            f"use --speculative-algorithm NGRAM"
        )
    places = torch.arange(slabs.page_size, device=slabs.device)

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        first = (pages[:, None] * slabs.page_size + places for pages in (target, source))
        pool.move_kv_cache(*(locations.flatten() for locations in first))

    slabs.open_segments.on_copy.append(copy)
    return pool


def steps_of_drafting(options: RaggedOptions, original: Callable, factory: Any) -> Any:
    """Attention of the steps in which drafts are made; SGLang has none on CPUs."""
    if factory.draft_attn_backend != BACKENDS["cpu"] or factory.speculative_num_steps <= 1:
        return original(factory)
    from sgl_ragged.features.drafts.draft_backend import DraftSteps

    return DraftSteps(factory.draft_model_runner, factory.speculative_num_steps)


def behind_drafting(options: RaggedOptions, original: Callable, factory: Any) -> Any:
    """Attention of the draft model to what was accepted: on CPUs the one that it has already."""
    return None if factory.draft_attn_backend == BACKENDS["cpu"] else original(factory)
