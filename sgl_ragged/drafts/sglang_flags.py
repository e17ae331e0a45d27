"""SGLang's flags of drafts: which are served, and what the others are refused for. Loads without SGLang."""

from __future__ import annotations

import os
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.launch import Launch

ALGORITHMS = ("NGRAM", "STANDALONE")
"""Whose drafts are verified: n-grams, and a model of its own."""

USE = "use --speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1, or STANDALONE with a draft model"

IN_LAYOUTS = ("speculative_algorithm", "speculative_draft_model_path")
"""Settings on which sizes depend."""

WIDTHS = {"NGRAM": 12, "STANDALONE": 4}
"""Tokens of a chain where nobody says, in SGLang."""

BACKENDS = {"cpu": "torch_native", "cuda": "triton"}
"""Attention of the draft model, by device."""

PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
"""A variable of SGLang's environment."""

Forbidden = tuple[tuple[str, tuple[Any, ...], str], ...]
"""Fields, values that are fine, and reasons."""

_OF_ALL: Forbidden = (
    (
        "speculative_adaptive",
        (False,),
        "chains of drafts have one length with --kv-pool ragged; drop --speculative-adaptive",
    ),
    (
        "speculative_use_rejection_sampling",
        (False,),
        "rejection sampling needs drafts by EAGLE, which --kv-pool ragged does not serve; drop the flag",
    ),
    (
        "enable_watermark",
        (False,),
        "watermarks have not been tested with drafts and --kv-pool ragged; drop one of the two",
    ),
)

_OF_NGRAMS: Forbidden = (
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

_OF_A_MODEL: Forbidden = (
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
        "decoupled_spec_role",
        (None, "null"),
        "drafts from another server have not been tested with --kv-pool ragged; drop the flag",
    ),
)


def by_model(server_args: Any) -> bool:
    """True if a model of its own drafts."""
    return (server_args.speculative_algorithm or "").upper() == "STANDALONE"


def refuse(server_args: Any) -> None:
    """Raise RaggedConfigError for drafts that cannot be served."""
    algorithm = server_args.speculative_algorithm
    if algorithm.upper() not in ALGORITHMS:
        raise RaggedConfigError(
            f"--speculative-algorithm {algorithm} is not supported with --kv-pool ragged, where "
            f"{' and '.join(ALGORITHMS)} are; {USE}"
        )
    for name, fine, reason in _OF_ALL + (_OF_A_MODEL if by_model(server_args) else _OF_NGRAMS):
        value = getattr(server_args, name)
        if value not in fine:
            raise RaggedConfigError(f"{reason} ({name} is {value!r})")
    if by_model(server_args) and not server_args.speculative_draft_model_path:
        raise RaggedConfigError("STANDALONE has drafts by a model: add --speculative-draft-model-path, or use NGRAM")
    if by_model(server_args) and os.environ.get(PLAN_STREAM, "").lower() in ("1", "true", "yes", "y"):
        raise RaggedConfigError(f"{PLAN_STREAM} plans verification before drafts are known; unset it")


def draft_backend(launch: Launch) -> str:
    """The draft model's attention. Raises RaggedConfigError for another one that was asked for."""
    asked, device = launch.server_args.speculative_draft_attention_backend, launch.view.device
    served = BACKENDS.get(device)
    if served is None:
        raise RaggedConfigError(f"a draft model has not been tested on {device} with --kv-pool ragged; use NGRAM")
    if asked not in (None, served):
        raise RaggedConfigError(
            f"--speculative-draft-attention-backend {asked} has not been tested with --kv-pool ragged; drop the flag"
        )
    return served


def width(launch: Launch) -> int:
    """Tokens of a chain: as SGLang has resolved them, or as it would."""
    if launch.view is not None:
        return launch.view.speculative_num_draft_tokens
    return WIDTHS[launch.server_args.speculative_algorithm.upper()]
