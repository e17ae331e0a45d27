"""What a pool holds whose open segments lie in its pages, beside the ideal and an uncompressed cache."""

from __future__ import annotations

import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import fit_pool
from sgl_ragged.profiles.budgets import uniform_kept


def llama_layout(ratio: float) -> tuple[SlabLayout, OpenPages]:
    """Of Llama-3.1-8B in bfloat16, and its open segments."""
    layout = SlabLayout(kept=uniform_kept(32, 8, ratio, 256), head_dim=128, segment=256)
    return layout, OpenPages.of(256, layout.slab_bytes(2), layout.full_bytes_per_token(2))


def test_a_small_pool_serves_few_requests():
    """--max-total-tokens 4096 in 80 GB of free memory: no more requests than can have an open segment."""
    layout, pages = llama_layout(0.3)
    plan = fit_pool(layout, 2, pages, 80 * 10**9, None, max_tokens=4096)
    assert (plan.max_total_tokens, plan.max_requests) == (4096, 3)


def test_the_smallest_pool_serves_a_page_of_prompt_and_a_page_of_answer():
    """Both, and twice the pages of a full open segment; `tests/server/test_scarce_memory.py` asks such a server."""
    layout, pages = llama_layout(0.3)
    least = (1 + 1 + 2 * pages.most) * 256
    assert fit_pool(layout, 2, pages, 80 * 10**9, None, max_tokens=least).max_total_tokens == least
    words = f"--max-total-tokens {least - 1} is too few for one request: .* at least {least}"
    with pytest.raises(RaggedConfigError, match=words):
        fit_pool(layout, 2, pages, 80 * 10**9, None, max_tokens=least - 1)


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.1])
@pytest.mark.parametrize("tokens", [300, 1024, 8192])
def test_requests_pay_for_what_they_hold(ratio, tokens):
    """What a pool holds, beside the ideal: kept bytes of sealed tokens, and open tokens in pages, uncompressed."""
    layout, pages = llama_layout(ratio)
    plan = fit_pool(layout, 2, pages, 60 * 10**9, 1024)
    lengths = range(tokens - 128, tokens + 128)
    each = [n // 256 * 256 * layout.byte_share(2) + -(-(n % 256) // pages.tokens) * pages.tokens for n in lengths]
    ideal = plan.total_bytes / layout.full_bytes_per_token(2) / (sum(each) / len(each))
    requests, full = plan.requests_of(tokens)
    assert requests == pytest.approx(ideal, rel=0.05)
    assert full == plan.full_tokens // tokens
    assert requests > full


def test_what_is_beside_requests_may_eat_the_gain():
    """Llama-3.1-8B with a scorer that keeps queries of each request."""
    layout, pages = llama_layout(0.5)
    plan = fit_pool(layout, 2, pages, 6 * 10**9, 1024, side_bytes=32 * 8 * 12 * 4 * 128 * 2)
    assert plan.max_total_tokens / plan.full_tokens < 1
    assert f"the rows of 1024 requests take {plan.rows_bytes}" in plan.warning
    assert fit_pool(layout, 2, pages, 6 * 10**9, 1024).warning is None
    full, pages = llama_layout(1.0)
    assert fit_pool(full, 2, pages, 6 * 10**9, 64).warning is None
    assert "at ratio 1 nothing is compressed" in fit_pool(full, 2, pages, 6 * 10**9, 64, side_bytes=2**20).warning
