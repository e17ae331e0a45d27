"""Chains of drafts: the path of a tree that is verified, and where a chain ends. Without SGLang.

A chain holds a request's possible next tokens: one that is certain, then drafts, each after the one before. It ends at
the border of the open segment: tokens after the border see that segment sealed, which needs its last tokens to be
accepted. So every token reads the same keys and values as in decoding without drafts, and results are
equal. A step that reaches a border loses the drafts after it: at most one chain less one token per segment.
"""

from __future__ import annotations

import numpy as np
import torch


def as_chains(tokens: np.ndarray, mask: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce each request's tree to its longest path, padded with zeros, which are ordinary drafts.

    Args:
        tokens: int64 [requests * width], the first of each request is certain.
        mask: integers [requests * width * width], nonzero where the second token is an ancestor of the first or the
            token itself; ancestors precede their descendants.

    Returns:
        Tokens and masks of the chains, of the same shapes and dtypes.
    """
    trees = mask.reshape(-1, width, width) != 0
    chains = np.zeros_like(tokens).reshape(-1, width)
    for chain, drafted, tree in zip(chains, tokens.reshape(-1, width), trees, strict=True):
        path = drafted[tree[tree.sum(axis=1).argmax()]]
        chain[: len(path)] = path
    below = np.tri(width, dtype=mask.dtype).ravel()
    return chains.reshape(tokens.shape), np.tile(below, len(chains)).reshape(mask.shape)


def end_at_border(following: torch.Tensor, lengths: torch.Tensor, segment: int) -> None:
    """End chains with the last token of the open segment.

    Args:
        following: integers [requests, width], the index of each token's successor in its chain, -1 at its end; changed
            in place. lengths: integers [requests], tokens before the chains.
    """
    last = segment - 1 - lengths.to(following.device).long() % segment
    following.scatter_(1, last.clamp_max_(following.shape[1] - 1)[:, None], -1)


def require_chains(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise RuntimeError if accepted tokens would have to be moved; tokens of a chain are in place.

    Args:
        target, source: integers [n], locations. On a GPU the error comes with a later call; nothing waits for it here.
    """
    torch._assert_async((target == source).all(), "accepted drafts would have to be moved: they are no chain")
