"""Verification against SGLang's own pool on CPUs, beside attention of one query to what it sees."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sgl_ragged.features.drafts.cpu_verify import with_verification

WIDTH, HEADS, Q_PER_KV, DIM = 4, 2, 3, 8
LENGTHS = (5, 1, 9)
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)


class TokenPool:
    """As SGLang's, of one layer."""

    def __init__(self) -> None:
        self.keys, self.values = torch.randn(2, 60, HEADS, DIM)

    def set_kv_buffer(self, layer, locations, keys, values):
        self.keys[locations.loc], self.values[locations.loc] = keys, values

    def get_key_buffer(self, number):
        return self.keys

    def get_value_buffer(self, number):
        return self.values


@pytest.fixture
def backend():
    torch.manual_seed(0)
    table = torch.randperm(60).view(4, 15)
    request_table = SimpleNamespace(req_to_token=table)
    return SimpleNamespace(token_to_kv_pool=TokenPool(), req_to_token_pool=request_table, swa_out_cache_loc=None)


@pytest.mark.parametrize("tree", [True, False])
def test_drafts_see_the_request_and_what_they_are_drafted_behind(backend, tree):
    """Of n-grams a tree, of a model a chain."""
    pool, table = backend.token_to_kv_pool, backend.req_to_token_pool.req_to_token
    seen = TREE if tree else torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    rows = (2, 0, 3)
    locations = torch.cat([table[row, n : n + WIDTH] for row, n in zip(rows, LENGTHS, strict=True)])
    masks = TREE.repeat(len(rows), 1, 1).flatten()
    spec_info = NgramVerifyInput(None, masks, None, None, None, None, WIDTH) if tree else None
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=spec_info or SimpleNamespace(draft_token_num=WIDTH),
        req_pool_indices=torch.tensor(rows),
        seq_lens_cpu=torch.tensor(LENGTHS),
        out_cache_loc=locations,
    )
    sizes = dict(tp_q_head_num=HEADS * Q_PER_KV, tp_k_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM)
    layer = SimpleNamespace(layer_id=0, sliding_window_size=-1, scaling=0.4, **sizes)
    queries = torch.randn(len(rows) * WIDTH, HEADS * Q_PER_KV * DIM)
    keys, values = torch.randn(2, len(rows) * WIDTH, HEADS, DIM)
    found = with_verification(pytest.fail)(backend, queries, keys, values, layer, batch)
    np.testing.assert_array_equal(pool.keys[locations], keys)
    for index, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        for draft in range(WIDTH):
            tokens = torch.cat([table[row, :length], table[row, length : length + WIDTH][seen[draft]]])
            query = queries[index * WIDTH + draft].view(HEADS, Q_PER_KV, DIM)
            logits = 0.4 * torch.einsum("hqd,thd->hqt", query, pool.keys[tokens])
            expected = torch.einsum("hqt,thd->hqd", logits.softmax(-1), pool.values[tokens])
            np.testing.assert_allclose(found[index * WIDTH + draft], expected.flatten(), atol=1e-5)


def test_other_batches_are_sglangs():
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    assert with_verification(lambda *args: args)(1, 2, 3, 4, 5, batch) == (1, 2, 3, 4, 5, batch)
