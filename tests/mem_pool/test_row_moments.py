"""Moments of kept keys: by their definition, bit for bit the same wherever the keys lie, bounded at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.mem_pool.quantise import QuantisedRows, stored_rows
from sgl_ragged.mem_pool.row_moments import centred, row_moments
from sgl_ragged.mem_pool.slab_format import FORMATS, SlabFormat
from tests.examples import examples
from tests.harness import KEPT, SEGMENT, Harness, Sequence
from tests.mem_pool.test_quantise import compare
from tests.quantised_oracle import moments

PLAIN = SlabFormat("4 bits without moments", 4, 4)


def keys_of(length: int, dim: int, seed: int) -> torch.Tensor:
    """[length, dim], channels of all sizes, some of them far from zero."""
    generator = torch.Generator().manual_seed(seed)
    width, middle = 10 ** torch.linspace(-3, 2, dim), torch.randn(dim, generator=generator) * 30
    return torch.randn(length, dim, generator=generator) * width + middle * (torch.arange(dim) % 3 == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [32, 48, 256])
def test_moments_are_what_the_definition_says(length, dtype):
    keys = keys_of(length, 80, length).to(dtype)
    found, uncentred = row_moments(keys)
    assert found.shape == (2, 80)
    assert found.dtype == torch.float16
    *expected, counts = moments(keys)
    np.testing.assert_array_equal(~uncentred, counts)
    for own, want in zip(found.double().numpy(), expected, strict=True):
        # Half a unit of float16 apart, where sums in 32 and in 64 bits lie on two sides of the middle.
        np.testing.assert_allclose(own, want[0], rtol=2**-10, atol=2.0**-24)
        assert (own == want[0]).mean() > 0.9
    wide = found[1] > 0.05
    rest, spread = centred(keys, found, uncentred)[~uncentred][:, wide], found[1, wide].float()
    torch.testing.assert_close(rest.square().mean(dim=0).sqrt(), spread, atol=0, rtol=4e-3)


@examples(30)
@given(st.data())
def test_equal_rows_have_equal_bits(data):
    """Alone, among others, and in whatever order of strides."""
    length, count = data.draw(st.sampled_from([32, 64, 256])), data.draw(st.integers(1, 5))
    dim, one = data.draw(st.sampled_from([16, 80, 128])), data.draw(st.integers(0, count - 1))
    keys = torch.stack([keys_of(length, dim, seed) for seed in range(count)])
    keys[:, 3] /= 100
    every = row_moments(keys)
    for part, own in zip(every, row_moments(keys[one].clone()), strict=True):
        assert torch.equal(part[one], own)
    # As tokens of a chunk lie: [tokens, heads, d].
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert all(map(torch.equal, every, row_moments(strided)))


def restored_by(form: SlabFormat, keys: torch.Tensor) -> torch.Tensor:
    return QuantisedRows.of(stored_rows(keys, keys, form), len(keys), keys.shape[1], form).restored()[0]


def test_what_rows_have_in_common_takes_no_bits():
    """Logits of queries that are alike in all channels, against those of the exact keys, up to what all keys share."""
    keys = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 0.5, 64)
    queries = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))

    def error(middle: torch.Tensor, form: SlabFormat) -> float:
        logits, exact = (queries @ (x - middle).T for x in (restored_by(form, keys + middle), keys + middle))
        return float((logits - exact).std() / exact.std())

    near, far = torch.zeros(64), torch.randn(64, generator=torch.Generator().manual_seed(3)) * 30
    assert error(far, PLAIN) > 5 * error(near, PLAIN)
    assert error(far, FORMATS["k4v4"]) == pytest.approx(error(near, FORMATS["k4v4"]), rel=0.05)
    assert error(near, FORMATS["k4v4"]) < 0.8 * error(near, PLAIN)


def test_edges_are_bounded():
    """Zeros, a channel that never changes, an outlier, what is no number: the row's error is half a scale."""
    keys = torch.randn(48, 16, generator=torch.Generator().manual_seed(2))
    keys[:, 1], keys[:, 2], keys[:, 3] = 0.0, 7.25, 1e-9
    keys[5, 4] = 1e4
    found, uncentred = row_moments(keys)
    assert found[1, 1:3].tolist() == [2.0**-24] * 2
    back = restored_by(FORMATS["k4v4"], keys)
    assert back[:, 1].abs().max() < 1e-6
    assert (back[:, 2] - 7.25).abs().max() < 1e-6
    # Half a code of eight, in rotated units, of the channel's own root mean square.
    limit = centred(keys, found, uncentred).norm(dim=-1, keepdim=True) * 4 / 16 * 1.01
    assert ((back - keys).abs() <= limit * found[1].float() + 1e-6).all()
    assert restored_by(FORMATS["k4v4"], torch.zeros(32, 16)).abs().max() < 1e-6

    broken = keys.clone()
    broken[7, 0], broken[8, 6], broken[9, 6] = torch.nan, torch.inf, 3e38
    found, back = row_moments(broken)[0], restored_by(FORMATS["k4v4"], broken)
    assert found.isfinite().all()
    assert back[7].isnan().all()
    assert back[[row for row in range(48) if row not in (7, 8)]].isfinite().all()
    huge, _ = row_moments(torch.full((32, 4), 3e38))
    assert huge.tolist() == [[65504.0] * 4, [2.0**-24] * 4]


def test_a_row_that_is_nearer_to_zero_stays_uncentred():
    """A row near zero, like a first token, is left out of the moments of the others, and keeps precise codes."""
    form = FORMATS["k4v4"]
    generator = torch.Generator().manual_seed(4)
    others = torch.randn(63, 16, generator=generator) + 20 * torch.randn(16, generator=generator)
    first = torch.randn(1, 16, generator=generator)
    assert not row_moments(others[:48])[1].any()
    keys = torch.cat([first, others])
    found, uncentred = row_moments(keys)
    assert uncentred.tolist() == [True] + [False] * 63
    torch.testing.assert_close(found[0], others.mean(dim=0).half(), atol=0, rtol=1e-3)
    back = restored_by(form, keys)
    # In any direction, at most half a code of eight of its largest rotated number, divided by the spread.
    assert (back - keys)[0].norm() < 0.2 * first.norm()
    assert (back - keys)[1:].norm(dim=1).max() < 0.2 * (others - others.mean(dim=0)).norm(dim=1).max()
    scales = QuantisedRows.of(stored_rows(keys, keys, form), 64, 16, form).scales
    assert ((scales[:, 0] < 0) == uncentred).all()
    assert (scales[:, 1] > 0).all()


def test_a_channel_that_only_uncentred_rows_change_leaves_them_their_other_channels():
    keys = torch.randn(48, 16, generator=torch.Generator().manual_seed(5)) + 10
    keys[:, 2] = 7.25
    keys[0] = torch.randn(16, generator=torch.Generator().manual_seed(6))
    assert row_moments(keys)[1].tolist() == [True] + [False] * 47
    assert (restored_by(FORMATS["k4v4"], keys) - keys)[0].abs().max() < 0.5


def test_heads_that_keep_little_of_outlying_channels():
    """Attention to keys with channels that four bits without them would not bear."""
    lengths = [SEGMENT + 1, 3 * SEGMENT + 5]
    sequences = [Sequence(length + 1, *KEPT.shape, 2, 16, "keydiff", seed) for seed, length in enumerate(lengths)]
    for sequence in sequences:
        sequence.k[..., 3] = sequence.k[..., 3] * 0.01 + 20
        sequence.k[..., 11] *= 8
        sequence.q[..., [3, 11]] *= 0.05
    harness = Harness(KEPT, 16, "keydiff", 2, 6, form=FORMATS["k4v4"])
    outputs = harness.extend(sequences, [0, 0], lengths)
    expected = [sequence.expected(KEPT, form="k4v4") for sequence in sequences]
    compare(outputs, [e[:n] for e, n in zip(expected, lengths, strict=True)], FORMATS["k4v4"], alike=0.97)
    decoded = torch.stack([e[n] for e, n in zip(expected, lengths, strict=True)])
    compare([harness.decode(sequences, lengths)], [decoded], FORMATS["k4v4"], alike=0.9)
