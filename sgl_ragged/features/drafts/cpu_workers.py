"""Drafts on CPUs without AMX: SGLang's workers, with torch functions in place of kernels that CPUs lack."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from sgl_ragged.features.drafts import torch_verify

_LINKS = "sglang.kernels.ops.speculative.reconstruct_tree"
"""Module that cannot be imported without a GPU, and contains one function."""

Replaced = tuple[tuple[ModuleType | type, str, object], ...]


def worker_of_ngrams() -> type:
    """Return SGLang's worker for drafts by n-grams; changes SGLang's modules in this process."""
    links: Any = ModuleType(_LINKS)
    links.reconstruct_indices_from_tree_mask_func = torch_verify.links
    sys.modules[_LINKS] = links

    from sglang.srt.speculative import ngram_worker, spec_utils

    _replace_verification()
    _replace(
        (
            (ngram_worker, "USE_FULL_MASK", False),
            (spec_utils, "fill_front_out_cache_loc_func", torch_verify.fill_front),
            (spec_utils, "fill_accept_out_cache_loc_func", torch_verify.fill_accepted),
        )
    )
    return ngram_worker.NGRAMWorker


def draft_model_worker(algorithm: str) -> type:
    """Return SGLang's worker for drafts by a smaller model or a head; changes modules as `worker_of_ngrams` does."""
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2
    from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

    _replace_verification()
    _replace(
        (
            (overlap_utils, "gather_spec_extras", torch_verify.carried_over),
            (eagle_utils, "build_tree_kernel_efficient_func", torch_verify.links_of_chains),
            (eagle_worker_common, "assign_draft_cache_locs_contiguous_func", torch_verify.chain_locations),
            (eagle_worker_common, "fill_bonus_tokens_func", torch_verify.last_accepted),
            (eagle_worker_v2, "select_top_k_tokens", torch_verify.next_of_chain),
        )
    )
    return StandaloneWorkerV2 if algorithm == "STANDALONE" else eagle_worker_v2.EAGLEWorkerV2


def _replace_verification() -> None:
    from sglang.kernels.ops.speculative import verify_sampling
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import eagle_utils

    from sgl_ragged.features.drafts.cpu_verify import with_verification
    from sgl_ragged.serve.sglang_pools import MHATokenToKVPool

    _replace(
        (
            (verify_sampling, "tree_speculative_sampling_target_only", torch_verify.verify_by_sampling),
            (eagle_utils, "tree_speculative_sampling_target_only", torch_verify.verify_by_sampling),
            (eagle_utils, "top_k_renorm_prob", torch_verify.top_k_renormalised),
            (eagle_utils, "top_p_renorm_prob", torch_verify.top_p_renormalised),
            (eagle_utils, "verify_tree_greedy_func", torch_verify.verify_greedily),
            (MHATokenToKVPool, "_init_kv_copy_and_warmup", _copy_by_torch),
            (TorchNativeAttnBackend, "forward_extend", with_verification(TorchNativeAttnBackend.forward_extend)),
            (allocation, "assign_req_to_token_pool_func", torch_verify.write_locations),
            (allocation, "get_last_loc", allocation.get_last_loc_torch),
        )
    )


def _copy_by_torch(pool: Any) -> None:
    """Have a pool copy tokens without a Triton kernel."""
    pool._kv_copy_config, pool.use_native_move_kv_cache = None, True


def _replace(functions: Replaced) -> None:
    for module, name, function in functions:
        assert hasattr(module, name), f"SGLang has no {module.__name__}.{name}"
        setattr(module, name, function)
