"""Drafts on CPUs without AMX: SGLang's worker, with functions in torch where it has no kernels for this platform."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sgl_ragged.drafts import torch_verify

_LINKS = "sglang.kernels.ops.speculative.reconstruct_tree"
"""Cannot be imported without a GPU, and holds one function."""


def ngram_worker() -> type:
    """SGLang's worker for drafts by n-grams, once what it calls is there; for this process."""
    links: Any = ModuleType(_LINKS)
    links.reconstruct_indices_from_tree_mask_func = torch_verify.links
    sys.modules[_LINKS] = links

    from sglang.kernels.ops.speculative import verify_sampling
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import eagle_utils, spec_utils
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    replaced: tuple[tuple[ModuleType, str, Callable], ...] = (
        (verify_sampling, "tree_speculative_sampling_target_only", torch_verify.verify_by_sampling),
        (eagle_utils, "tree_speculative_sampling_target_only", torch_verify.verify_by_sampling),
        (eagle_utils, "top_k_renorm_prob", torch_verify.top_k_renormalised),
        (eagle_utils, "top_p_renorm_prob", torch_verify.top_p_renormalised),
        (eagle_utils, "verify_tree_greedy_func", torch_verify.verify_greedily),
        (spec_utils, "fill_front_out_cache_loc_func", torch_verify.fill_front),
        (spec_utils, "fill_accept_out_cache_loc_func", torch_verify.fill_accepted),
        (allocation, "assign_req_to_token_pool_func", torch_verify.write_locations),
        (allocation, "get_last_loc", allocation.get_last_loc_torch),
    )
    for module, name, function in replaced:
        assert hasattr(module, name), f"SGLang has no {module.__name__}.{name}"
        setattr(module, name, function)
    return NGRAMWorker
