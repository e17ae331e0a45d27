"""Verification of chains in torch for CPUs, where SGLang has kernels for AMX alone. Without SGLang.

Functions have the arguments of SGLang's kernels of the same purpose, and change the same arguments in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def links(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    following: torch.Tensor,
    siblings: torch.Tensor,
    requests: int,
    width: int,
) -> None:
    """Compute positions and links of trees from their ancestor masks.

    Args:
        mask: bool [requests * width * width]. lengths: integers [requests], tokens before the trees.
        positions: int64 [requests * width]. indices, following, siblings: int64 [requests, width], each token's number
            in the batch, its first child and its next sibling, -1 where there is none.
    """
    trees = mask.view(requests, width, width).tril(-1)
    positions.copy_((trees.sum(-1) + lengths[:, None]).flatten())
    indices.copy_(torch.arange(requests * width).view(requests, width))
    order = torch.arange(width)
    parents = torch.where(trees, order, -1).amax(-1)
    child = (parents[:, None, :] == order[:, None]) & (order > order[:, None])
    sibling = (parents[:, None, :] == parents[:, :, None]) & (order > order[:, None]) & (parents[:, :, None] >= 0)
    for found, which in ((following, child), (siblings, sibling)):
        found.copy_(torch.where(which.any(-1), which.int().argmax(-1), -1))


def verify_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts while they equal the model's predictions.

    Args:
        predicts: int32 [requests * width], the token after each accepted one.
        accept_index: int32 [requests, depth], numbers of accepted tokens, then -1.
        accept_token_num: int32 [requests], number of accepted drafts.
        candidates: int64 [requests, width]. target_predict: integers [requests, width].
    """

    def goes_on(request: int, token: int, draft: int) -> bool:
        return bool(candidates[request, draft] == target_predict[request, token])

    def next_token(request: int, token: int, _rejected: list[int]) -> int:
        return int(target_predict[request, token])

    links = retrieve_index, retrieve_next_token, retrieve_next_sibling
    _walk(predicts, accept_index, accept_token_num, candidates, *links, goes_on, next_token)
    return predicts, accept_index, accept_token_num


def verify_by_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept each draft with the probability that the model gives it; else draw from what remains of its distribution.

    Args:
        predicts to retrive_next_sibling: as in `verify_greedily`.
        uniform_samples: float32 [requests, width], in [0, 1), by candidate.
        uniform_samples_for_final_sampling: float32 [requests].
        target_probs: float32 [requests, width, vocabulary].
        threshold_single, threshold_acc: 1 for exact sampling; less accepts drafts of lower probability.
    """

    def goes_on(request: int, token: int, draft: int) -> bool:
        chance = float(target_probs[request, token, candidates[request, draft]])
        return float(uniform_samples[request, draft]) < chance / threshold_acc or chance >= threshold_single

    def next_token(request: int, token: int, rejected: list[int]) -> int:
        chances = target_probs[request, token].double()
        chances[candidates[request, rejected]] = 0
        sums = chances.cumsum(0)
        return int(torch.searchsorted(sums, uniform_samples_for_final_sampling[request] * sums[-1], right=True))

    links = retrive_index, retrive_next_token, retrive_next_sibling
    _walk(predicts, accept_index, accept_token_num, candidates, *links, goes_on, next_token)


def _walk(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    indices: torch.Tensor,
    following: torch.Tensor,
    siblings: torch.Tensor,
    goes_on: Callable[[int, int, int], bool],
    next_token: Callable[[int, int, list[int]], int],
) -> None:
    """Follow accepted children down each request's tree, and append the token that `next_token` returns.

    Args:
        goes_on: takes a request, a token and a draft after it; returns True if the draft is accepted.
        next_token: takes a request, its last accepted token and the rejected drafts after it; returns the token that
            follows.
    """
    for request, numbers in enumerate(indices.tolist()):
        token, path = 0, [0]
        while True:
            rejected: list[int] = []
            draft = int(following[request, token])
            while draft != -1 and not goes_on(request, token, draft):
                rejected.append(draft)
                draft = int(siblings[request, draft])
            if draft == -1:
                break
            predicts[numbers[token]] = candidates[request, draft]
            token = draft
            path.append(token)
        predicts[numbers[token]] = next_token(request, token, rejected)
        accept_index[request, : len(path)] = torch.tensor([numbers[one] for one in path])
        accept_token_num[request] = len(path) - 1


def extend_locations(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Return the locations of tokens `start_offset` to `end_offset` of each request, int64, request by request."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).long()


def write_locations(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write locations, ordered by request, to the request table."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def fill_front(num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor) -> None:
    """Pack the first `num_front` of each request's locations, [requests * width]."""
    width = len(out_cache_loc) // len(num_front)
    front = torch.arange(width) < num_front[:, None]
    found = out_cache_loc.view(-1, width)[front]
    front_out_cache_loc[: len(found)] = found


def fill_accepted(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, size: int
) -> None:
    """Pack the locations of accepted tokens by their indices, -1 for none."""
    found = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(found)] = found


def chain_locations(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: None = None,
    mrope: None = None,
) -> None:
    """Write the locations of each request's next `topk * num_cols` tokens, request by request."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], columns].flatten())


def last_accepted(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last accepted token of each request: column accept_lens of [requests, accept_stride]."""
    found = accept_tokens.view(batch_size, accept_stride).gather(1, accept_lens.long()[:, None] - 1)
    bonus_tokens.copy_(found[:, 0])


def carried_over(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the entries of these rows, integers [requests], from the buffers [rows, ...] of the step before."""
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden_states


def links_of_chains(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Compute positions and links of chains of `num_verify_tokens`; shapes as in `links`. The mask is not read."""
    assert topk == 1, "drafts are chains"
    order = torch.arange(num_verify_tokens)
    positions.copy_((seq_lens.long()[:, None] + order).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_(torch.where(order < num_verify_tokens - 1, order + 1, -1))
    retrieve_next_sibling.fill_(-1)


def next_of_chain(
    step: int,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    hidden_states: torch.Tensor | None,
    scores: torch.Tensor | None,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the next drafts, int64 [requests], after one draft each, [requests, 1]; a chain has no choice."""
    assert topk == 1, "drafts are chains"
    parents = torch.full_like(topk_index, step)
    return topk_index.flatten(), hidden_states, topk_p, (topk_p[:, None], topk_index, parents)


def top_k_renormalised(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Renormalise distributions [n, vocabulary] over the k most probable tokens, integers [n], and ties with them."""
    ordered = probs.sort(dim=-1, descending=True).values
    last = (top_ks.long().clamp(1, probs.shape[-1]) - 1)[:, None]
    return _renormalised(probs, probs >= ordered.gather(1, last))


def top_p_renormalised(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Renormalise distributions [n, vocabulary] over the fewest tokens that sum to p, float [n], and ties with them."""
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    last = ((before < top_ps[:, None]).sum(-1) - 1).clamp_min(0)[:, None]
    return _renormalised(probs, probs >= ordered.gather(1, last))


def _renormalised(probs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    found = probs.masked_fill(~kept, 0.0)
    return found / found.sum(dim=-1, keepdim=True)
