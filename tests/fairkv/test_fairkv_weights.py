"""Attention weights in the order of a placement: what is moved, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.weights import HeadOrder, require_projections
from sgl_ragged.profiles.geometry import ModelGeometry

HEADS, GROUP, DIM, HIDDEN = 4, 2, 8, 24
GEOMETRY = ModelGeometry(name="model", fingerprint="", num_layers=2, num_heads=HEADS, q_per_kv=GROUP, head_dim=DIM)
# Two ranks; layer 1 has head 0 on both.
ORDER = np.array([[[2, 0], [3, 1]], [[0, 3], [0, 2]]])
PLACEMENT = Placement(ORDER, np.full(ORDER.shape, 16), "split")


def checkpoint() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(10, HIDDEN), "lm_head.weight": torch.randn(10, HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        rows = {"q": HEADS * GROUP * DIM, "k": HEADS * DIM, "v": HEADS * DIM}
        for letter, size in rows.items():
            tensors[f"{prefix}self_attn.{letter}_proj.weight"] = torch.randn(size, HIDDEN)
            tensors[f"{prefix}self_attn.{letter}_proj.bias"] = torch.randn(size)
        tensors[f"{prefix}self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * GROUP * DIM)
        tensors[f"{prefix}self_attn.o_proj.bias"] = torch.randn(HIDDEN)
        tensors[f"{prefix}self_attn.q_norm.weight"] = torch.randn(DIM)
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.randn(HIDDEN, 32)
    return tensors


def reordered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = HeadOrder(PLACEMENT, GEOMETRY)
    moved = dict(order.reorder(tensors.items()))
    order.require_all()
    return moved


def test_projections_follow_the_places():
    """Spelled out head by head; a head at two places is there twice."""
    before, after = checkpoint(), reordered(checkpoint())
    assert list(before) == list(after)
    for layer, heads in enumerate(ORDER.reshape(2, -1)):
        prefix = f"model.layers.{layer}.self_attn."
        for letter, block in (("q", GROUP * DIM), ("k", DIM), ("v", DIM)):
            for kind in ("weight", "bias"):
                old, new = before[f"{prefix}{letter}_proj.{kind}"], after[f"{prefix}{letter}_proj.{kind}"]
                for place, head in enumerate(heads):
                    want = old[head * block : (head + 1) * block]
                    torch.testing.assert_close(new[place * block : (place + 1) * block], want, rtol=0, atol=0)
        old, new = before[f"{prefix}o_proj.weight"], after[f"{prefix}o_proj.weight"]
        for place, head in enumerate(heads):
            block = GROUP * DIM
            want = old[:, head * block : (head + 1) * block]
            torch.testing.assert_close(new[:, place * block : (place + 1) * block], want, rtol=0, atol=0)


def test_everything_else_stays():
    tensors = checkpoint()
    moved = reordered(tensors)
    for name, tensor in tensors.items():
        if "_proj" not in name or name.endswith("o_proj.bias") or ".mlp." in name:
            assert moved[name] is tensor


def test_layers_of_draft_heads_stay():
    extra = {"model.layers.2.self_attn.fused_qkv.weight": torch.zeros(3)}
    assert reordered(checkpoint() | extra)["model.layers.2.self_attn.fused_qkv.weight"] is next(iter(extra.values()))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(3), "in one tensor"),
        ("transformer.layers.1.attn.Wqkv.weight", torch.zeros(3), "in one tensor"),
        ("model.layers.0.self_attention.query_key_value.weight", torch.zeros(3), "in one tensor"),
        ("model.layers.0.self_attn.q_proj.weight_scale", torch.zeros(3), "is quantised"),
        ("model.layers.0.self_attn.q_proj.qweight", torch.zeros(3), "is quantised"),
        ("model.layers.0.self_attn.v_proj.weight", torch.zeros(HEADS * DIM, HIDDEN, dtype=torch.int8), "is quantised"),
        ("model.layers.0.self_attn.sinks", torch.zeros(HEADS), "not known to be the same for all heads"),
        ("model.layers.0.self_attn.q_norm.weight", torch.zeros(HEADS * GROUP * DIM), "over all heads together"),
        ("model.layers.0.self_attn.q_proj.weight", torch.zeros(2 * HEADS * GROUP * DIM, HIDDEN), "4 heads of 16"),
        ("model.layers.0.self_attn.o_proj.weight", torch.zeros(HIDDEN), "axis 1"),
        ("draft.layers.0.self_attn.k_proj.weight", torch.zeros(HEADS * DIM, HIDDEN), "are the same weight"),
    ],
)
def test_what_is_not_covered_is_refused(name, tensor, words):
    with pytest.raises(RaggedConfigError, match="use --ragged-fairkv none") as refused:
        reordered(checkpoint() | {name: tensor})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_projections_are_refused():
    tensors = checkpoint()
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(RaggedConfigError, match=r"no self_attn\.o_proj\.weight of layer 1"):
        reordered(tensors)
    with pytest.raises(RaggedConfigError, match="layer 0"):
        require_projections(["model.embed_tokens.weight"], 1)
