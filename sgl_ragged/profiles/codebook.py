"""The codebook: queries that calibration recorded, by which sealed segments are fitted.

One set per head of the model, in the profile. Arrays are functions of the calibration alone, so what is fitted with
them is a function of the segment alone. L layers, H heads, m queries, d dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

QUERIES = "codebook_queries"
"""float16 [L, H, m, d]: queries as later tokens would ask them, seen from the last token of a segment: turned by RoPE
to the distance from there, dimensions in `rope_order`."""

MASSES = "codebook_masses"
"""float32 [L, H, 2, m]: log of the sum of exponentials of the logits that each query had where it was recorded; then
the same without its sequence's first segment, which holds the sinks."""

OUTPUTS = "codebook_outputs"
"""float16 [L, H, 2, m, d]: the attention's outputs over these two sets of keys."""

CODEBOOK = (QUERIES, MASSES, OUTPUTS)
"""Statistics of heads."""

ROPE = ("rope_frequencies", "rope_order")
"""How keys are turned, the same for all heads of a layer: [L, 1, r / 2] radians per position, and [L, 1, d], the
dimensions with the first and the second ones of rotated pairs in front."""


def codebook_faults(statistics: Mapping[str, np.ndarray], heads: tuple[int, ...], head_dim: int) -> Iterator[str]:
    """The first defect of the codebook among a profile's statistics, if it has one. heads: (L, H)."""
    if not set(CODEBOOK) & set(statistics):
        return
    missing = [name for name in (*CODEBOOK, *ROPE) if name not in statistics]
    if missing:
        yield f"a codebook needs {', '.join(missing)}, too"
        return
    queries, order = statistics[QUERIES], statistics[ROPE[1]]
    count = queries.shape[2] if queries.ndim > 2 else 0
    pairs = statistics[ROPE[0]].shape[-1]
    for name, shape in (
        (QUERIES, (*heads, count, head_dim)),
        (MASSES, (*heads, 2, count)),
        (OUTPUTS, (*heads, 2, count, head_dim)),
        (ROPE[0], (heads[0], 1, pairs)),
        (ROPE[1], (heads[0], 1, head_dim)),
    ):
        if statistics[name].shape != shape:
            yield f"statistic {name} {statistics[name].shape} must be {list(shape)}"
    if 2 * pairs > head_dim or (np.sort(order, axis=-1) != np.arange(order.shape[-1])).any():
        yield f"{' and '.join(ROPE)} are no rotation of {head_dim} dimensions"
