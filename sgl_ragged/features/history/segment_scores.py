"""Scores of sealed segments, which estimate how much later tokens would miss them; fixed at the seal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import avg_pool1d, cosine_similarity

from sgl_ragged.features.history.bound import NOVELTY
from sgl_ragged.mem_pool.segments import Sealed
from sgl_ragged.mem_pool.slab_store import SlabStore

TINY = 1e-6
"""Least norm of a key, so that nothing divides by 0."""

SMOOTHED_TOKENS = 8
"""Tokens whose values are averaged before they are compared with their segment."""

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Function from keys and values of a layer's segments, float32 [segments, heads, S, head_dim], and the mean values of
its heads [heads, head_dim] to scores, float32 [segments, heads]."""


def value_key_norm(keys: torch.Tensor, values: torch.Tensor, means: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of ||V|| / ||K|| over tokens (PagedEviction, Algorithm 1)."""
    return (values.norm(dim=-1) / keys.norm(dim=-1).clamp_min(TINY)).mean(dim=2)


def value_novelty(keys: torch.Tensor, values: torch.Tensor, means: torch.Tensor | None) -> torch.Tensor:
    """Return the distance of a segment's least typical tokens from the rest of the segment, by their values.

    The distance of a window is 1 - cos between the mean of SMOOTHED_TOKENS neighbours and the mean of the segment, both
    less the head's mean value; the score is the largest over all windows. A fact that occurs once in unrelated text
    cannot be found elsewhere, and gets a high score.
    """
    assert means is not None, "the plan has them for this score"
    centred = values - means[:, None]
    windows = avg_pool1d(centred.flatten(0, 1).transpose(1, 2), SMOOTHED_TOKENS, stride=1).transpose(1, 2)
    segment = centred.mean(dim=2).flatten(0, 1)[:, None]
    distance = 1 - cosine_similarity(windows, segment, dim=-1)
    return distance.amax(dim=-1).unflatten(0, values.shape[:2])


FORMULAS: dict[str, Score] = {"value_key_norm": value_key_norm, NOVELTY: value_novelty}
"""Score functions by name; recency is not here, because it needs only the segment's index."""


class SegmentScores:
    """Scores of the segments in the slots of a store, written when segments are sealed.

    Args:
        weights: float32 [layers, heads], weights of the heads' scores; the sum over a layer on all ranks is 1.
        means: mean values of the heads of each layer, float32 [heads, head_dim]; only `value_novelty` needs them.

    `values`: float32 [slots, layers], on the store's device. A score is the mean over layers and the model's heads.
    """

    def __init__(
        self,
        store: SlabStore,
        name: str,
        weights: torch.Tensor | None = None,
        means: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._formula, self._means = FORMULAS[name], means
        layers, heads = store.layout.kept.shape
        even = torch.full((layers, heads), 1 / heads)
        self._weights = (even if weights is None else weights).to(store.slabs.device)
        shape = (store.slabs.shape[0], store.layout.num_layers)
        self.values = torch.zeros(shape, dtype=torch.float32, device=store.slabs.device)
        store.add_seal_listener(self._sealed)

    def _sealed(self, store: SlabStore, sealed: Sealed) -> None:
        segments = sealed.segments
        for number in sealed.layers:
            rows = store.segment_rows(number, segments)
            keys, values = (store.from_cache(number, part, stored).float() for part, stored in enumerate(rows))
            means = None if self._means is None else self._means[number]
            self.values[segments.slots.long(), number] = self._formula(keys, values, means) @ self._weights[number]

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return scores of slots by this rank's heads, float32 [slots]; ranks' scores add up."""
        return self.values[slots].mean(dim=1)
