"""Gates by kernels: scores of tokens, written where their segments are, against the scorer and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.attention.kernels.append import GateInputs, append
from sgl_ragged.attention.kernels.gate import gate_scores
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.attention.view import filled
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.slab_store import Sealer, SlabStore, seal_in_torch
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.gate import STEP, FoldedGate, Gate
from tests.kernels.operations import triton_operations

HEADS, DIM, SEGMENT, LAYERS, HIDDEN = 3, 16, 64, 2, 24
LAYOUT = SlabLayout(np.array([[32, 64, 48], [48, 32, 64]]), DIM, SEGMENT)


def statistics(features: int, heads: int = HEADS, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    return {
        # Means far from 0, beside which what is left is small: what folding them must bear.
        "input_mean": 40 * torch.randn(1, hidden),
        "input_scale": torch.rand(1, hidden) + 0.5,
        "hidden": torch.randn(1, features, hidden) / hidden**0.5,
        "hidden_bias": torch.randn(1, features),
        "skip": torch.randn(heads, hidden) / hidden**0.5,
        "output": torch.randn(heads, features),
    }


@pytest.mark.parametrize(("features", "heads"), [(1, 1), (5, 3), (64, 8), (100, 2)])
def test_scores_are_those_of_the_scorer(features, heads):
    torch.manual_seed(features)
    own = statistics(features, heads)
    hidden_states = own["input_mean"] + torch.randn(33, HIDDEN)
    folded = FoldedGate.of(own)
    made = folded.features(hidden_states)
    assert made.shape == (33, features + heads)
    found = gate_scores(made, folded.output)
    exact = made.double()
    exact = exact[:, features:] + torch.nn.functional.gelu(exact[:, :features]) @ folded.output.double().T
    torch.testing.assert_close(found.double(), exact, atol=STEP / 2 + 1e-5, rtol=0)
    assert torch.equal(found, (found / STEP).round() * STEP)
    for other in (folded.scores(made), Gate().token_scores(hidden_states, own)):
        # Last bits may take what is midway to the other side.
        assert (found - other).abs().max() <= STEP
        assert (found == other).float().mean() > 0.95
    # Features may be a part of what a batch is padded to.
    assert torch.equal(gate_scores(torch.cat([made, made], dim=1)[7:, : made.shape[1]], folded.output), found[7:])
    assert gate_scores(made[:0], folded.output).shape == (0, heads)


def test_what_is_midway_goes_to_even_multiples():
    midway = (torch.arange(-8.0, 9.0) + 0.5) * STEP
    skipped = torch.cat([midway, torch.tensor([0.0, 5000.25, -3e6, 1e9])])
    features = torch.stack([torch.full_like(skipped, -1e4), skipped], dim=1)
    found = gate_scores(features, torch.ones(1, 1))
    assert torch.equal(found[:, 0], (skipped / STEP).round() * STEP)


def make_store(tokens: int, sealer: Sealer = seal_in_torch) -> SlabStore:
    torch.manual_seed(tokens)
    return SlabStore(
        LAYOUT,
        get_scorer("gate"),
        120,
        4,
        torch.float32,
        "cpu",
        q_per_kv=2,
        statistics=[statistics(5) for _ in range(LAYERS)],
        pages=OpenPages(SEGMENT, tokens),
        sealer=sealer,
    )


@pytest.mark.parametrize("tokens", [3, 9, 16])
def test_scores_are_written_beside_keys_and_values(tokens):
    store, wanted = make_store(tokens), make_store(tokens)
    folded = FoldedGate.of(store.statistics[1])
    features = folded.features(torch.randn(7, HIDDEN))
    keys, values = torch.randn(2, 7, HEADS, DIM)
    pages = torch.randperm(119)[: 3 * store.tails.open_pages.most].view(3, -1).to(torch.int32) + 1
    which, whose = torch.tensor([6, 2, 3, 0], dtype=torch.int32), torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    places = torch.tensor([0, SEGMENT - 1, 8, 5], dtype=torch.int32)
    append(
        store.tails.data, 1, keys, values, which, whose, places, pages,
        gate=GateInputs(features, folded.output, store.tails.inputs),
    )  # fmt: skip
    own, rows = pages[whose.long()], whose.long()
    wanted.tails.append(1, own, places, keys[which.long()], values[which.long()])
    scores = gate_scores(features, folded.output)[which.long(), :, None]
    wanted.tails.append_inputs(1, own, rows, places, scores)
    assert torch.equal(store.slabs, wanted.slabs)
    assert store.slabs.any()


def test_segments_are_the_same_whether_operations_score_tokens_or_are_given_scores():
    """Two requests, chunks that end anywhere, and decode over a border."""
    # The other store seals in torch.
    stores = make_store(9, TritonSealer(LAYOUT, torch.device("cpu"))), make_store(9)
    operations = [triton_operations(store, 4) for store in stores]
    most = stores[0].tails.open_pages.most
    table = torch.zeros((4, 3 * SEGMENT), dtype=torch.int32)
    for row in (1, 2):
        table[row] = ((torch.arange(3) + 3 * row)[:, None] * SEGMENT + torch.arange(SEGMENT)).flatten()
        for store in stores:
            store.tails.table[row] = torch.arange(2 * most).view(2, most) + 10 + 2 * most * row
    rows = torch.tensor([1, 2])
    torch.manual_seed(5)

    def step(describe, run, tokens):
        states = torch.randn(LAYERS, tokens, HIDDEN)
        queries, (keys, values) = torch.randn(tokens, HEADS, 2, DIM), torch.randn(2, tokens, HEADS, DIM)
        outputs = []
        for store, ops, scored in zip(stores, operations, (False, True), strict=True):
            store.flush_pending_seals()
            batch = describe(ops)
            for layer in range(LAYERS):
                inputs = ops.token_inputs(layer, states[layer])
                assert inputs.dim() == 2
                if scored:
                    inputs = gate_scores(inputs, ops._gates[layer].output)[:, :, None]
                outputs.append(getattr(ops, run)(layer, queries, keys, values, batch, inputs))
        for found, wanted in zip(outputs[:LAYERS], outputs[LAYERS:], strict=True):
            assert torch.equal(found, wanted)

    step(lambda ops: ops.describe_extend(table, rows, [0, 0], [20, SEGMENT + 5]), "extend", SEGMENT + 25)
    step(
        lambda ops: ops.describe_extend(table, rows, [20, SEGMENT + 5], [SEGMENT - 17, SEGMENT - 6]),
        "extend",
        2 * SEGMENT - 23,
    )
    for number in range(1, 4):
        lengths = torch.tensor([SEGMENT + 3, 2 * SEGMENT - 1]) + number
        step(lambda ops, lengths=lengths: ops.describe_decode(table, rows, lengths, lengths), "decode", 2)
        full = filled(table, rows, lengths.tolist(), stores[0].tails)
        if full is not None:
            for store in stores:
                store.defer_seals(full)
    for store in stores:
        store.flush_pending_seals()
    sealed = [3, 6, 7]
    assert torch.equal(stores[0].slabs[sealed], stores[1].slabs[sealed])
    assert stores[0].slabs[sealed].flatten(1).any(dim=1).all()
