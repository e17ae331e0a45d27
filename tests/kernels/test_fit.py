"""Kernels of fitting, in the interpreter, against the same steps in torch."""

from __future__ import annotations

import pytest
import torch

from sgl_ragged.attention.kernels import fit
from sgl_ragged.fitting import torch_steps
from sgl_ragged.fitting.references import References
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE

SEGMENTS, HEADS = 2, 3


@pytest.mark.parametrize(("dim", "queries"), [(16, 7), (24, 40)])
def test_queries_are_seen_from_the_ends_of_segments(dim, queries):
    """Of the first segment of a sequence and of a far one; of some heads, out of order, and where not all is turned."""
    generator = torch.Generator().manual_seed(dim)
    made = {
        QUERIES: torch.randn(HEADS, queries, dim, generator=generator).half(),
        MASSES: torch.rand(HEADS, 2, queries, generator=generator),
        OUTPUTS: torch.randn(HEADS, 2, queries, dim, generator=generator).half(),
        ROPE[0]: torch.rand(1, dim // 4, generator=generator).double(),
        ROPE[1]: torch.randperm(dim, generator=generator)[None],
    }
    references = References.from_statistics(made, 0.3)
    numbers = torch.tensor([0, 4000])
    for some in (references, references.heads(slice(1, 3)), references.heads(torch.tensor([2, 0]))):
        found, wanted = fit.seen_from(some, numbers, 64), torch_steps.seen_from(some, numbers, 64)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "queries"), [(1, 5), (17, 33), (192, 84)])
def test_weights_are_those_of_the_projected_gradient(tokens, queries):
    generator = torch.Generator().manual_seed(tokens)
    exps = torch.rand(SEGMENTS, HEADS, tokens, queries, generator=generator).square()
    # As if up to half of what the segment had were dropped; one token is not attended to.
    exps[0, 0, 0] = 0
    whole = 2 * exps.sum(dim=2, keepdim=True) + 1
    lost = (whole - 1) * torch.rand(whole.shape, generator=generator) / 2
    ridge = 1e-6 * queries
    found, wanted = (of.weights(exps, whole, lost, ridge) for of in (fit, torch_steps))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert wanted.std() > 0 or tokens == 1


@pytest.mark.parametrize(("numbers", "width"), [(16, 5), (48, 64), (80, 96)])
@pytest.mark.parametrize("bits", [3, 4, 6])
def test_errors_are_fed_back_in_order(bits, numbers, width):
    """One number in a hundred may be at a border between codes; what follows it in its column then differs, too."""
    generator = torch.Generator().manual_seed(numbers)
    units = torch.randn(SEGMENTS, HEADS, numbers, width, generator=generator) * 2 ** (bits - 2)
    factor = torch.randn(SEGMENTS, HEADS, numbers, numbers, generator=generator).triu(1) / numbers**0.5
    found, wanted = (of.feed_back(units, factor, bits) for of in (fit, torch_steps))
    assert found.dtype == torch.int8
    assert (found == wanted).float().mean() > 0.99
    assert (found.min(), found.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    plain = units.floor().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert (found != plain).float().mean() > 0.05
    none = fit.feed_back(units, torch.zeros_like(factor), bits)
    assert torch.equal(none[0, 0].float(), plain[0, 0])
