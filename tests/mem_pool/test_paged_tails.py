"""Open segments in pages, at ragged edges: pages of any size, the last partly filled, and NaN wherever nobody wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.mem_pool.slab_format import FORMATS
from tests.harness import KEPT, LARGEST, SCALES, SEGMENT, TORCH, Harness, Kernel, Sequence
from tests.mem_pool.test_quantise import compare

DIM = 16
MIXED, FULL = KEPT[:1], KEPT[2:]


def check_pages(
    kernel: Kernel,
    kept: np.ndarray,
    scorer: str,
    tokens: int,
    form: str = "wide",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
) -> None:
    """Prefill that ends at pages' borders and beside them, chunks that go on and finish segments, decode over a border.

    Args:
        tokens: of an open segment in a page. steps: of decode.
    """
    starts = [1, tokens, min(tokens + 1, SEGMENT - 1), SEGMENT + 2 * tokens % SEGMENT, SEGMENT - 7]
    ends = [starts[0] + 1, starts[1] + tokens, SEGMENT - 1, 2 * SEGMENT + 1, SEGMENT - 2]
    tolerance = 5e-3 if dtype == torch.float16 else 1e-4
    sequences = [Sequence(n + steps, *kept.shape, 2, DIM, scorer, seed) for seed, n in enumerate(ends)]
    sizes = dict(kernel=kernel, form=FORMATS[form], dtype=dtype, page_tokens=tokens)
    harness = Harness(kept, DIM, scorer, len(ends), 4, **sizes)
    assert harness.store.tails.open_pages.most == -(-SEGMENT // tokens)
    # NaN in whatever dtype it is read; the padding page is written to, and never full of it.
    harness.store.slabs[1:].view(torch.uint8).fill_(255)
    found = [[first, then] for first, then in zip(
        harness.extend(sequences, [0] * len(ends), starts), harness.extend(sequences, starts, ends), strict=True
    )]  # fmt: skip
    for step in range(steps):
        outputs = harness.decode(sequences, [end + step for end in ends], padding=2)
        for own, output in zip(found, outputs, strict=True):
            own.append(output[None])
    for own, sequence in zip(found, sequences, strict=True):
        want = sequence.stored(dtype, SCALES).expected(kept, form=form)
        if form == "wide":
            torch.testing.assert_close(torch.cat(own).double(), want, atol=tolerance, rtol=tolerance)
        else:
            # One head and segment in which a code differs is a good part of so few outputs.
            compare([torch.cat(own)], [want], FORMATS[form], alike=0.9)


CASES = [
    # Queries and gates lie in pages, the last queries of a segment beside them.
    (KEPT, "keydiff", 1),
    (KEPT, "fastkvzip", 2),
    (KEPT, "h2o", 7),
    (KEPT, "snapkv", 12),
    (KEPT, "value_key_norm", 38),
    (FULL, "h2o", 31),
    (FULL, "keydiff", SEGMENT),
    (FULL, "snapkv", SEGMENT),
]


@pytest.mark.parametrize(("kept", "scorer", "tokens"), CASES)
def test_pages_of_any_size(kept, scorer, tokens):
    check_pages(TORCH, kept, scorer, tokens, steps=8)


@pytest.mark.parametrize("form", ["int8", "k8v4", "k6v4", "k4v4"])
@pytest.mark.parametrize(("scorer", "tokens"), [("keydiff", 3), ("fastkvzip", 5)])
def test_pages_beside_codes(form, scorer, tokens):
    check_pages(TORCH, KEPT, scorer, tokens, form, steps=8)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize(("scorer", "tokens"), [("keydiff", 9), ("h2o", 3)])
def test_pages_of_an_fp8_cache(dtype, scorer, tokens):
    check_pages(TORCH, KEPT, scorer, tokens, dtype=dtype)
