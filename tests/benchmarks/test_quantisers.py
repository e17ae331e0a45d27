"""Schemes that quantise every token: levels, errors and sizes in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.quality.quantisers import SCHEMES, Fp8, Kivi, TurboQuant, byte_share, lloyd_max, quantise, uniform


def cache(tokens: int, seed: int = 0) -> torch.Tensor:
    """float32 [1, 2, tokens, 64]."""
    return torch.randn(1, 2, tokens, 64, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("bits", [2, 4])
def test_the_error_of_the_uniform_quantiser_on_a_known_grid(bits):
    """With n evenly spaced numbers per step, the mean squared error is (n^2 + 2) / (12 n^2) steps squared."""
    per_step, steps = 64, 2**bits - 1
    numbers = torch.arange(steps * per_step + 1) / per_step
    found = uniform(numbers - 5, bits) + 5
    assert set(found.tolist()) == set(range(steps + 1))
    error = (found - numbers)[:-1].square().mean()
    torch.testing.assert_close(error, torch.tensor((per_step**2 + 2) / (12 * per_step**2)))


def test_the_uniform_quantiser_keeps_equal_numbers():
    torch.testing.assert_close(uniform(torch.full((2, 32), 3.0), 2), torch.full((2, 32), 3.0))


def test_points_and_errors_for_the_normal_distribution_are_the_published_ones():
    torch.testing.assert_close(lloyd_max(1)[1:], torch.tensor([math.sqrt(2 / math.pi)], dtype=torch.float64))
    assert lloyd_max(2).tolist() == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=5e-5)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    for bits, error in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        points = lloyd_max(bits)
        shares = torch.cat([torch.zeros(1), normal.cdf((points[1:] + points[:-1]) / 2), torch.ones(1)]).diff()
        # Each point is the mean of its cell, so the error is the variance less that of the points.
        assert 1 - float((shares * points.square()).sum()) == pytest.approx(error, rel=5e-4)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.009497), (3, 0.03454)])
def test_turboquant_has_the_error_of_its_points_whatever_the_vectors(bits, error):
    """A rotation makes vectors with one large channel like any other; norms are stored apart."""
    vectors = cache(512)
    vectors[..., 7] += 30
    vectors *= torch.logspace(-2, 2, 512)[:, None]
    found = TurboQuant(bits).round_keys(vectors)
    each = (found - vectors).square().sum(-1) / vectors.square().sum(-1)
    assert float(each.mean()) == pytest.approx(error, rel=0.25)
    assert float(each.max()) < 4 * error


def test_kivi_groups_keys_by_channel_and_values_by_token():
    keys = cache(256)
    louder = keys.clone()
    louder[..., 3] *= 100
    found, changed = (quantise(Kivi(2), one, one, 0, 256) for one in (keys, louder))
    others = torch.arange(64) != 3
    assert torch.equal(found[0][..., others], changed[0][..., others])
    assert not torch.equal(found[1][..., :128, :32], changed[1][..., :128, :32].where(others[:32], 0))
    assert torch.equal(found[1][..., :128, 32:], changed[1][..., :128, 32:])
    # 32 numbers share a step: at 2 bits no error is beyond half a third of their range.
    groups = keys[0, 0, :32, 0]
    assert float((found[0][0, 0, :32, 0] - groups).abs().max()) <= float(groups.max() - groups.min()) / 6 * 1.01


def test_kivi_leaves_the_latest_values_as_they_are_and_rounds_nothing_twice():
    keys, values = cache(512), cache(512, 1)
    at_once = quantise(Kivi(4), keys, values, 0, 512)
    assert torch.equal(at_once[1][..., 384:, :], values[..., 384:, :])
    assert not torch.equal(at_once[1][..., 383, :], values[..., 383, :])
    first = quantise(Kivi(4), keys[..., :256, :], values[..., :256, :], 0, 256)
    grown = [torch.cat([old, new[..., 256:, :]], -2) for old, new in zip(first, (keys, values), strict=True)]
    second = quantise(Kivi(4), *grown, 256, 512)
    assert all(map(torch.equal, at_once, second))


def test_an_open_segment_stays_as_it_is():
    keys = cache(300)
    for name, scheme in SCHEMES.items():
        found = quantise(scheme, keys, keys, 0, 256)
        assert [torch.equal(one[..., 256:, :], keys[..., 256:, :]) for one in found] == [True, True], name
        assert 0 < relative_error(found[0], keys) < 0.2, name


def test_fp8_has_three_bits_of_mantissa():
    numbers = torch.tensor([1.0625, 0.3, 448.0, 1000.0, -1000.0])
    assert Fp8().round_keys(numbers).tolist() == [1.0, 0.3125, 448.0, 448.0, -448.0]


def test_bytes_by_hand():
    """Bytes of one head with 64 channels and 256 tokens, keys and values in 16 bits: 65,536."""
    for bits in (2, 4):
        codes = 2 * 256 * 64 * bits // 8
        groups = 64 * (256 // 32) + 256 * (64 // 32)
        assert byte_share(f"KIVI-{bits}", 64) == (codes + groups * 4) / 65536
    for bits in (3, 4):
        assert byte_share(f"TurboQuant-{bits}", 64) == 2 * 256 * (64 * bits // 8 + 2) / 65536
    assert byte_share("FP8", 64) == 0.5
