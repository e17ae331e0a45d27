"""The check of attention at a start, in torch: what it passes, and faults that it finds."""

import dataclasses

import numpy as np
import pytest
import torch

from sgl_ragged.attention import self_check, torch_ops
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.mem_pool.tails import Tails
from sgl_ragged.serve.store_maker import StoreMaker
from tests.self_checked import checked
from tests.split_heads import PLACEMENTS


@pytest.mark.parametrize(
    ("form", "scorer", "dtype", "fitted"),
    [
        ("wide", "keydiff", torch.float32, False),
        ("wide", "snapkv", torch.float8_e4m3fn, False),
        ("wide", "key_norm", torch.float8_e5m2, True),
        ("int8", "fastkvzip", torch.bfloat16, False),
        ("k8v4", "keydiff", torch.bfloat16, True),
        ("k6v4", "h2o", torch.float16, False),
        ("k4v4", "keydiff", torch.float32, True),
    ],
)
def test_servers_pass(form, scorer, dtype, fitted):
    found = checked("torch", form, scorer, dtype, fitted, chain_tokens=4)
    assert 0 < max(found.differences.values()) <= found.tolerance
    assert {"prefill", "decode after sealed segments", "drafts after sealed segments"} <= set(found.differences)
    assert found.segments == 5
    assert found.device in str(found)


@pytest.mark.parametrize("case", sorted(PLACEMENTS))
def test_parts_of_heads_pass(case):
    _, placement = PLACEMENTS[case]
    for rank in range(placement.ranks):
        totals = np.take_along_axis(PLACEMENTS[case][0], placement.heads[:, rank], axis=1)
        layout = SlabLayout(placement.kept[:, rank], 16, 64, totals, placement.first[:, rank])
        assert checked("torch", layout=layout).differences


def test_some_layers_stand_for_all():
    layout = SlabLayout(np.full((30, 2), 32), 16, 64)
    assert checked("torch", layout=layout).layers == [0, 10, 19, 29]


def first_pages(original):
    """Pages of open segments as they were when requests were first seen."""
    seen = {}
    return lambda self, rows, own, which: seen.setdefault(tuple(rows.tolist()), original(self, rows, own, which))


FAULTS = {
    "the chunk's last token is not seen": (
        torch_ops,
        "_entries",
        lambda original: lambda *args: (*(one := original(*args))[:2], one[2] & one[2].roll(1, -1)),
    ),
    "pages of open segments are stale": (Tails, "pages", first_pages),
    "values are not scaled": (torch_ops, "scale_values", lambda original: lambda output, scale: None),
    "tokens are appended one place late": (
        SlabStore,
        "append",
        lambda original: (
            lambda self, layer, pages, places, *rows: original(self, layer, pages, (places + 1) % 64, *rows)
        ),
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_faults_end_the_start_with_one_line(monkeypatch, fault):
    owner, name, broken = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    with pytest.raises(RaggedConfigError, match=r"--ragged-kernel torch on this CPU: .*; use --kv-pool token") as error:
        checked("torch", dtype=torch.float8_e4m3fn)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fault", "line"),
    [("tokens", "keeps 16 tokens other than the reference does"), ("numbers", "stores other numbers")],
)
def test_a_sealer_that_differs_from_the_reference_is_found(monkeypatch, fault, line):
    """Attention reads what a sealer wrote, so only the comparison with another sealer can find its faults."""

    def wrong(store, layers, segments):
        orders = self_check.seal_in_torch(store, layers, segments)
        if fault == "tokens":
            return [None if order is None else order.flip(2) for order in orders]
        # The last row that the first head of a layer keeps.
        for layer in layers:
            begin = int(store.layout.layer_start[layer]) + int(store.layout.bands[layer][0].kept - 1) * 16
            store.slabs[segments.slots.long(), begin : begin + 16] *= 1.01
        return orders

    def make(self, *args):
        made = StoreMaker_make(self, *args)
        made._sealer = wrong
        return made

    StoreMaker_make = StoreMaker.make
    monkeypatch.setattr(StoreMaker, "make", make)
    with pytest.raises(RaggedConfigError, match=f"sealing segment 0 of request 0 in layer 0 {line}"):
        checked("torch")


def test_nan_is_a_difference(monkeypatch):
    original = torch_ops._attend
    monkeypatch.setattr(torch_ops, "_attend", lambda *args: original(*args) * torch.nan)
    with pytest.raises(RaggedConfigError, match="without log-sum-exps differs from dense attention by nan"):
        checked("torch")


def test_results_are_json(monkeypatch):
    import json

    assert json.loads(json.dumps(dataclasses.asdict(checked("torch"))))["segments"] == 5
