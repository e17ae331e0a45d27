"""SGLang's flags of drafts: served values, and reasons for refusing all other values. Loads without SGLang."""

from __future__ import annotations

import os
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.draft_model import BACKENDS
from sgl_ragged.launch.flags import RefusedValues, refuse_values
from sgl_ragged.launch.start import ModelStart

ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Served algorithms: n-grams, a smaller model, and heads that read the served model's hidden states. NEXTN is SGLang's
other name of EAGLE."""

HEADS = ("EAGLE", "EAGLE3", "NEXTN")

USE = "use --speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1, or one of the others with a draft model"

WIDTHS = {"NGRAM": 12, "STANDALONE": 4, "EAGLE": 4, "EAGLE3": 4, "NEXTN": 4}
"""SGLang's default tokens of a chain, by algorithm."""

PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
"""Environment variable of SGLang that plans a step before the drafts of the step are known."""

_OF_ALL: RefusedValues = (
    (
        "speculative_adaptive",
        (False,),
        "chains of drafts have one length with --kv-pool ragged; drop --speculative-adaptive",
    ),
    (
        "speculative_use_rejection_sampling",
        (False,),
        "rejection sampling has not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "enable_watermark",
        (False,),
        "watermarks have not been tested with drafts and --kv-pool ragged; drop one of the two",
    ),
)

_OF_NGRAMS: RefusedValues = (
    (
        "speculative_ngram_max_bfs_breadth",
        (1,),
        "with --kv-pool ragged drafts are chains, no trees: set --speculative-ngram-max-bfs-breadth 1",
    ),
    (
        "speculative_ngram_external_corpus_path",
        (None,),
        "drafts from an external corpus have not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "speculative_ngram_external_sam_budget",
        (0,),
        "drafts from an external corpus have not been tested with --kv-pool ragged; drop the flag",
    ),
)

_OF_A_MODEL: RefusedValues = (
    (
        "speculative_eagle_topk",
        (None, 1),
        "with --kv-pool ragged drafts are chains, no trees: set --speculative-eagle-topk 1",
    ),
    (
        "speculative_draft_kv_cache_dtype",
        (None, "auto"),
        "the draft model's cache has the model's dtype with --kv-pool ragged; drop the flag",
    ),
    (
        "enable_multi_layer_eagle",
        (False,),
        "draft heads of several layers, each for one step, have not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "speculative_token_map",
        (None,),
        "drafts from a part of the vocabulary have been tested with EAGLE3 alone, whose heads name it; drop the flag",
    ),
    (
        "speculative_draft_window_size",
        (None,),
        "a sliding window in a draft model has not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "speculative_use_block_verification",
        (False,),
        "verification by blocks has not been tested with --kv-pool ragged; drop the flag",
    ),
    (
        "decoupled_spec_role",
        (None, "null"),
        "drafts from another server have not been tested with --kv-pool ragged; drop the flag",
    ),
)


def by_model(server_args: Any) -> bool:
    """Return True if a model or head drafts: it has a cache of its own."""
    return (server_args.speculative_algorithm or "").upper() in ("STANDALONE", *HEADS)


def by_head(server_args: Any) -> bool:
    """Return True if a head drafts from the served model's hidden states."""
    return (server_args.speculative_algorithm or "").upper() in HEADS


def refuse(server_args: Any) -> None:
    """Raise RaggedConfigError for drafts that cannot be served."""
    algorithm = server_args.speculative_algorithm
    if algorithm.upper() not in ALGORITHMS:
        raise RaggedConfigError(
            f"--speculative-algorithm {algorithm} is not supported with --kv-pool ragged, where "
            f"{', '.join(ALGORITHMS)} are; {USE}"
        )
    refuse_values(server_args, _OF_ALL + (_OF_A_MODEL if by_model(server_args) else _OF_NGRAMS))
    # The draft model of EAGLE may be a part of the served model's checkpoint.
    if algorithm.upper() in ("STANDALONE", "EAGLE3") and not server_args.speculative_draft_model_path:
        raise RaggedConfigError(
            f"{algorithm.upper()} has drafts by a model: add --speculative-draft-model-path, or use NGRAM"
        )
    if by_model(server_args):
        _refuse_steps(server_args)
    if by_model(server_args) and os.environ.get(PLAN_STREAM, "").lower() in ("1", "true", "yes", "y"):
        raise RaggedConfigError(f"{PLAN_STREAM} plans verification before drafts are known; unset it")


def _refuse_steps(server_args: Any) -> None:
    """Raise RaggedConfigError for sizes that SGLang asserts, and for trees that it chooses for some models."""
    topk, steps = server_args.speculative_eagle_topk, server_args.speculative_num_steps
    if steps is None and (topk is not None or server_args.speculative_num_draft_tokens is not None):
        raise RaggedConfigError("SGLang needs --speculative-num-steps with the other sizes of drafts: add it")
    if by_head(server_args) and topk is None:
        raise RaggedConfigError(
            "for some models SGLang drafts trees by itself: set --speculative-eagle-topk 1 and --speculative-num-steps"
        )


def refuse_resolved(view: Any) -> None:
    """Raise RaggedConfigError for resolved settings that cannot be served; view: SGLang's resolved settings."""
    if view.speculative_algorithm not in ALGORITHMS or view.enable_multi_layer_eagle:
        what = "several layers" if view.enable_multi_layer_eagle else view.speculative_algorithm
        raise RaggedConfigError(
            f"for these models SGLang drafts by {what}, which --kv-pool ragged does not serve; {USE}"
        )


def draft_backend(start: ModelStart) -> str:
    """Return the draft model's attention backend. Raise RaggedConfigError if the flags name another backend."""
    asked, device = start.server_args.speculative_draft_attention_backend, start.view.device
    served = BACKENDS.get(device)
    if served is None:
        raise RaggedConfigError(f"a draft model has not been tested on {device} with --kv-pool ragged; use NGRAM")
    if asked not in (None, served):
        raise RaggedConfigError(
            f"--speculative-draft-attention-backend {asked} has not been tested with --kv-pool ragged; drop the flag"
        )
    return served


def width(start: ModelStart) -> int:
    """Return the tokens of a chain as SGLang has resolved them, or as it would for `layout`."""
    if start.served:
        return start.view.speculative_num_draft_tokens
    return WIDTHS[start.server_args.speculative_algorithm.upper()]
