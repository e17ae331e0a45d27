"""The codebook: queries that calibration recorded, with which sealed segments are fitted.

A profile has one set of queries per head of the model. They are constant while serving, so a fitted segment depends on
its own tokens only. L layers, H heads, m queries, d dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

QUERIES = "codebook_queries"
"""float16 [L, H, m, d]: queries of tokens after a segment, rotated by RoPE to their distance from the segment's last
token, dimensions in `rope_order`."""

MASSES = "codebook_masses"
"""float32 [L, H, 2, m]: log-sum-exp of the logits that each query had in its sample; then the same without the sample's
first segment, which has the sinks."""

OUTPUTS = "codebook_outputs"
"""float16 [L, H, 2, m, d]: attention outputs over these two sets of keys."""

CODEBOOK = (QUERIES, MASSES, OUTPUTS)
"""Names of the codebook's statistics per head."""

ROPE = ("rope_frequencies", "rope_order")
"""Names of the statistics about RoPE, equal for all heads of a layer: [L, 1, r / 2], radians per position; [L, 1, d],
dimensions: first elements of the rotated pairs, then second elements, then the rest."""

FIT_VERSION = 2
"""Version of what fitting makes of a codebook; part of the plan's digest, so that no other version reads the slabs."""


def codebook_faults(statistics: Mapping[str, np.ndarray], heads: tuple[int, ...], head_dim: int) -> Iterator[str]:
    """Yield what is wrong with the codebook in a profile's statistics, one reason each; nothing without a codebook.

    Args:
        heads: (L, H).
    """
    if not set(CODEBOOK) & set(statistics):
        return
    missing = [name for name in (*CODEBOOK, *ROPE) if name not in statistics]
    if missing:
        yield f"the codebook lacks {', '.join(missing)}"
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
        yield f"{' and '.join(ROPE)} do not describe a rotation of {head_dim} dimensions"
