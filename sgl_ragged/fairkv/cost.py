"""What a decode step costs: the bytes that its slowest rank reads, from a handful of numbers of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError

MATRICES_OF_A_BLOCK = 3
"""Gate, up and down projection of a gated feed-forward block."""


@dataclass(frozen=True)
class CostModel:
    """Bytes read in one decode step. Time is these bytes over the bandwidth; nothing else is modelled.

    Ranks meet at the all-reduce behind the attention of every layer, so each layer takes as long as the rank that
    reads most. A rank reads what its places keep of every request, the weights of all its places (rows of q, k and v,
    columns of o), whether they store anything or not, and its part of all other weights, which is the same for all.

    Args:
        hidden: width of the model.
        head_dim: elements per key and per value.
        q_per_kv: query heads that a head serves.
        segment: tokens per segment S.
        batch: requests decoded at once.
        context: tokens of each of them before compression.
        other_bytes: weights of the whole model that are no head's, read once per step: every rank has an equal part.
        weight_itemsize, kv_itemsize: bytes per element; of codes of few bits a fraction, with their scales.
        header_bytes: of what a place reads of every segment beside its rows; places that store nothing are few.
    """

    hidden: int
    head_dim: int
    q_per_kv: int
    segment: int
    batch: int = 32
    context: int = 16384
    other_bytes: int = 0
    weight_itemsize: int = 2
    kv_itemsize: float = 2
    header_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            least = {"other_bytes": 0, "header_bytes": 0, "kv_itemsize": 1 / 4}.get(name, 1)
            if getattr(self, name) < least:
                raise RaggedConfigError(f"cost model: {name} must be at least {least}, not {getattr(self, name)}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], segment: int, batch: int = 32, context: int = 16384) -> CostModel:
        """Of a dense model's Hugging Face config, in 16-bit weights and KV; KeyError if it lacks a size.

        Other weights are the three matrices of each feed-forward block and the output projection. Of the embedding a
        step reads a few rows, which are left out like norms and biases.
        """
        hidden, query_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        blocks = int(config["num_hidden_layers"]) * MATRICES_OF_A_BLOCK * int(config["intermediate_size"])
        return cls(
            hidden=hidden,
            head_dim=int(config.get("head_dim") or hidden // query_heads),
            q_per_kv=query_heads // int(config.get("num_key_value_heads") or query_heads),
            segment=segment,
            batch=batch,
            context=context,
            other_bytes=2 * hidden * (blocks + int(config["vocab_size"])),
        )

    @property
    def place_bytes(self) -> int:
        """Weights of one place in one layer: q_per_kv heads' rows of q, one head's of k and v, columns of o."""
        return 2 * (self.q_per_kv + 1) * self.head_dim * self.hidden * self.weight_itemsize

    @property
    def place_headers(self) -> float:
        """Bytes of the headers that one place reads in one layer."""
        return self.batch * self.context / self.segment * self.header_bytes

    def kv_bytes(self, load: np.ndarray) -> np.ndarray:
        """Float64, shaped like `load` (kept tokens per segment): bytes of keys and values that are read."""
        tokens = self.batch * self.context * np.asarray(load, dtype=np.float64) / self.segment
        return tokens * (2 * self.head_dim * self.kv_itemsize)

    def step_bytes(self, load: np.ndarray, places: int) -> float:
        """Bytes of the slowest rank, layer by layer, in one step.

        Args:
            load: [num_layers, ranks], tokens of each sealed segment that a rank reads.
            places: places of each rank in each layer.
        """
        num_layers, ranks = load.shape
        attention = float(self.kv_bytes(load).max(axis=1).sum()) + num_layers * places * (
            self.place_bytes + self.place_headers
        )
        return attention + self.other_bytes / ranks
