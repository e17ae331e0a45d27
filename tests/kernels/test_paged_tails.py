"""Open segments in pages, in Triton's interpreter, at ragged edges."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.operations import TRITON
from tests.mem_pool.test_paged_tails import FULL, MIXED, SEGMENT, check_pages

thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("kept", "scorer", "tokens", "form", "dtype"),
    [
        (MIXED, "fastkvzip", 7, "wide", torch.float32),
        thorough(MIXED, "snapkv", 12, "wide", torch.float16),
        (FULL, "keydiff", SEGMENT, "wide", torch.float32),
        (MIXED, "key_norm", 2, "k6v4", torch.float32),
        (MIXED, "value_key_norm", 9, "wide", torch.float8_e5m2),
        thorough(MIXED, "h2o", 5, "wide", torch.float32),
        thorough(MIXED, "keydiff", 1, "wide", torch.float32),
        thorough(MIXED, "keydiff", 5, "k8v4", torch.float32),
        thorough(MIXED, "fastkvzip", 3, "k4v4", torch.float32),
        thorough(MIXED, "h2o", 9, "wide", torch.float8_e4m3fn),
        thorough(FULL, "snapkv", SEGMENT, "wide", torch.float32),
    ],
)
def test_pages_of_any_size(kept, scorer, tokens, form, dtype):
    check_pages(TRITON, kept, scorer, tokens, form, dtype)
