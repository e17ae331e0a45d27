"""Merging attention over two sets of keys: closed forms, and sets without keys."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_ragged.attention.merge import merge_states


def attention(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (logits.softmax(-1) @ values).float(), logits.logsumexp(-1).float()


@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0])
def test_two_parts_give_the_whole(offset):
    """Attention over 3 + 5 keys is that over 8, however large the logits; float16 outputs are taken, too."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 2, 8, generator=generator, dtype=torch.float64) * 5 + offset
    values = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    a, b = attention(logits[..., :3], values[:3]), attention(logits[..., 3:], values[3:])
    want, want_lse = attention(logits, values)
    output, lse = merge_states(*a, *b)
    torch.testing.assert_close(output, want, atol=1e-5, rtol=1e-4 if offset else 1e-5)
    torch.testing.assert_close(lse, want_lse)
    half, _ = merge_states(a[0].half(), a[1], b[0].half(), b[1])
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, want, atol=2e-3, rtol=2e-3)


def test_weights_are_the_sums_of_exponentials():
    """3 / 4 of the mass lies in one set: 0.75 * 1 + 0.25 * 5 = 2."""
    output, lse = merge_states(
        torch.ones(1, 2), torch.tensor([math.log(3.0)]), torch.full((1, 2), 5.0), torch.tensor([0.0])
    )
    torch.testing.assert_close(output, torch.full((1, 2), 2.0))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0)]))


def test_sets_without_keys_count_for_nothing():
    """Their outputs, here NaN and infinity, do not show; without any key the output is 0."""
    nothing = torch.tensor([-torch.inf])
    something = torch.tensor([[1.0, -2.0]])
    lse = torch.tensor([3.0])
    for garbage in (torch.nan, torch.inf):
        bad = torch.full((1, 2), garbage)
        for output, merged in (
            merge_states(something, lse, bad, nothing),
            merge_states(bad, nothing, something, lse),
        ):
            assert torch.equal(output, something)
            assert torch.equal(merged, lse)
        output, merged = merge_states(bad, nothing, bad, nothing)
        assert torch.equal(output, torch.zeros(1, 2))
        assert torch.equal(merged, nothing)
