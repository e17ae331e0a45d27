"""Cost of a decode step: bytes that its slowest rank reads, computed from sizes of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError

MATRICES_OF_A_BLOCK = 3
"""Number of matrices in a gated feed-forward block: gate, up and down projection."""


@dataclass(frozen=True)
class CostModel:
    """Model of the bytes read in one decode step. The time is these bytes over the bandwidth; nothing else is modelled.

    Ranks synchronise at the all-reduce after attention in every layer, so each layer takes as long as the rank that
    reads most. A rank reads the kept rows of its places for every request, the weights of all its places (rows of q, k
    and v, columns of o), including places that store nothing, and an equal part of all other weights.

    Args:
        hidden: hidden size of the model.
        head_dim: elements per key and per value.
        q_per_kv: query heads per KV head.
        segment: tokens per segment S.
        batch: requests per decode step.
        context: tokens of each request before compression.
        other_bytes: weights of the whole model that belong to no head, read once per step, in equal parts by the ranks.
        weight_itemsize, kv_itemsize: bytes per element; a fraction, including scales, for codes of few bits.
        header_bytes: bytes that a place reads in every segment in addition to its rows. Places that store nothing are
            counted, too; they are few.
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
        """Read a dense model's Hugging Face config, with 16-bit weights and KV. Raises KeyError if it lacks a size.

        Other weights are the three matrices of each feed-forward block and the output projection. Norms, biases and the
        few rows that a step reads from the embedding are left out.
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
        """Bytes of one place's weights in one layer: rows of q, k and v, columns of o."""
        return 2 * (self.q_per_kv + 1) * self.head_dim * self.hidden * self.weight_itemsize

    @property
    def place_headers(self) -> float:
        """Bytes of the headers that one place reads in one layer."""
        return self.batch * self.context / self.segment * self.header_bytes

    def kv_bytes(self, load: np.ndarray) -> np.ndarray:
        """Compute the bytes of keys and values that are read: float64, shaped like `load` (kept tokens per segment)."""
        tokens = self.batch * self.context * np.asarray(load, dtype=np.float64) / self.segment
        return tokens * (2 * self.head_dim * self.kv_itemsize)

    def step_bytes(self, load: np.ndarray, places: int) -> float:
        """Sum the bytes of the slowest rank in each layer of one step.

        Args:
            load: [num_layers, ranks], tokens per sealed segment that a rank reads.
            places: number of places on each rank in each layer.
        """
        num_layers, ranks = load.shape
        attention = float(self.kv_bytes(load).max(axis=1).sum()) + num_layers * places * (
            self.place_bytes + self.place_headers
        )
        return attention + self.other_bytes / ranks
