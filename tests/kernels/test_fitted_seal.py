"""Segments that are fitted between kernels: the slabs that sealing in torch gives, but for the order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention import triton_seal
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.fitting import attention_matching
from sgl_ragged.mem_pool.kv_dtype import movable
from tests.fitting.test_fitted import BESIDE, CASES, KEPT, LAYERS, SLOTS, rows, sealed, store

KEEPS_ALL_BUT_SOME = np.array([[64, 64], [64, 32]])


def sealed_by_kernels(in_tails: bool, form: str, dtype: torch.dtype, **more):
    made = store(form, dtype, make_sealer=lambda layout: TritonSealer(layout, torch.device("cpu")), **more)
    return sealed(made, in_tails=in_tails)


def assert_near(found, wanted) -> None:
    for layer in range(LAYERS):
        for one, other in zip(rows(found, layer), rows(wanted, layer), strict=True):
            scale = other.abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
            differ = ((one - other).abs() > 2e-3 * scale).float().mean()
            # The last bits of a fit may take a code to its neighbour, and what was to be stored before it, too.
            assert differ < 0.03, (layer, differ)


USUAL = (("wide", torch.float8_e4m3fn), ("k8v4", torch.float32), ("k6v4", torch.bfloat16))


@pytest.mark.parametrize("in_tails", [True, False])
@pytest.mark.parametrize(
    ("form", "dtype"), [pytest.param(*one, marks=[] if one in USUAL else pytest.mark.thorough) for one in CASES]
)
def test_kernels_store_what_torch_fits(form, dtype, in_tails):
    found, wanted = sealed_by_kernels(in_tails, form, dtype), sealed(store(form, dtype), in_tails=in_tails)
    assert_near(found, wanted)
    plain = sealed_by_kernels(in_tails, form, dtype, fitted=False)
    assert not torch.equal(*(movable(one.slabs)[SLOTS] for one in (found, plain)))
    untouched = [slot for slot in range(BESIDE) if slot not in SLOTS]
    assert not movable(found.slabs)[untouched].any()


def test_layers_with_nothing_to_fit_keep_their_own():
    found, plain = (
        sealed_by_kernels(True, "wide", torch.float32, kept=KEEPS_ALL_BUT_SOME, fitted=own) for own in (True, False)
    )
    layer = found.layout.bands[0][0]
    assert torch.equal(*(one.band_view(0, layer)[SLOTS] for one in (found, plain)))
    assert_near(found, sealed(store("wide", kept=KEEPS_ALL_BUT_SOME), in_tails=True))


def test_layers_are_fitted_together_or_one_by_one(monkeypatch):
    """What memory has room for does not change what is stored, nor does the way by which a segment is sealed."""
    together = sealed_by_kernels(True, "k8v4", torch.float32)
    assert len(together.corrector._runs) == 1
    monkeypatch.setattr(triton_seal, "ROWS_BYTES", 1)
    monkeypatch.setattr(attention_matching, "AT_ONCE_BYTES", 1)
    alone = sealed_by_kernels(True, "k8v4", torch.float32)
    assert len(alone.corrector._runs) == LAYERS
    assert_near(alone, together)


@pytest.mark.parametrize("form", ["wide", "k8v4"])
def test_parts_of_heads_are_parts_of_what_the_whole_is_fitted_to(form):
    whole = sealed_by_kernels(True, form, torch.float32)
    parts = [
        sealed_by_kernels(True, form, torch.float32, kept=kept, total=KEPT, first=first, full_heads=2)
        for first, kept in ((np.zeros_like(KEPT), np.full_like(KEPT, 16)), (np.full_like(KEPT, 16), KEPT - 16))
    ]

    def head_rows(made, layer: int, head: int) -> torch.Tensor:
        bands = [band for band in made.layout.bands[layer] if band.kept]
        pairs = zip(bands, rows(made, layer), strict=True)
        own = [x[:, band.heads.index(head)] for band, x in pairs if head in band.heads]
        return own[0] if own else torch.empty(len(SLOTS), 2, 0, whole.layout.head_dim)

    for layer, head in np.ndindex(*KEPT.shape):
        joined = torch.cat([head_rows(part, layer, head) for part in parts], dim=2)
        torch.testing.assert_close(joined, head_rows(whole, layer, head), atol=1e-5, rtol=1e-5)
