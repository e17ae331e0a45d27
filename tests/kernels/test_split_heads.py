"""Heads that are split over ranks, by the Triton operations: the same checks as of the torch operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention.cta_map import build_cta_map
from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.mem_pool.slab_store import SlabStore
from tests.harness import Kernel
from tests.kernels.operations import triton_sealer
from tests.split_heads import check_parts


def operations(store: SlabStore, max_segments: int, in_view: torch.Tensor | None) -> TritonOps:
    cta_map = build_cta_map(np.maximum(store.layout.kept, 1), 24, [1, 2, 4, 8], "exact")
    return TritonOps(store, cta_map, 8, max_segments, in_view=in_view)


@pytest.mark.parametrize(
    ("case", "scorer"),
    [
        ("parts of nothing", "keydiff"),
        pytest.param("all tokens in parts", "h2o", marks=pytest.mark.thorough),
    ],
)
def test_parts_add_up_to_the_whole(case, scorer):
    check_parts(case, scorer, 2, Kernel(operations, triton_sealer))
