"""Overlays beside what the Triton kernels give, in the interpreter."""

from __future__ import annotations

from tests.harness import SEGMENT
from tests.kernels.operations import TRITON
from tests.overlaid import check_overlays


def test_heads_attend_to_slabs_tails_and_overlays():
    check_overlays(TRITON, [3 * SEGMENT + 7, 2 * SEGMENT, SEGMENT + 1])
