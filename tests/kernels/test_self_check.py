"""The check of kernels at a start finds each kernel's faults; in Triton's interpreter."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sgl_ragged.attention.kernels import append, attend, decode, describe, extend, fit, quantize_fp8, seal
from sgl_ragged.attention.kernels.gate import gate_score
from sgl_ragged.errors import RaggedConfigError
from tests.fitting.test_attention_matching import HEADS
from tests.kernels.test_gate import statistics
from tests.self_checked import checked

KEPT = np.array([[16, 48]])


@triton.jit
def _one(bits):
    return (bits * 0 + 1).to(tl.float32)


@triton.jit
def _first_page(number, TOKENS: tl.constexpr):
    return number * 0


@triton.jit
def _negated(features_ptr, output_ptr, token, head, feature_stride, FEATURES: tl.constexpr):
    return -gate_score(features_ptr, output_ptr, token, head, feature_stride, FEATURES)


def late(of: int):
    """An argument of a launch, one later."""
    return lambda original: lambda *args, **more: original(*args[:of], args[of] + 1, *args[of + 1 :], **more)


def scaled(original):
    return lambda *args, **more: original(*args, **more) * 0.9


def rolled(original):
    return lambda *args, **more: original(*args, **more).roll(1, -1).contiguous()


def stale_next_pages(original):
    def described(*args):
        pages, _, *slots = original(*args)
        return pages, pages, *slots

    return described


def quieter(original):
    return lambda keys, values, scales, dtype: original(keys, values * 0.9, scales, dtype)


def another_layer(original):
    return lambda tails, layer, *args: original(tails, 0, *args)


def a_part_less(original):
    return lambda partial, lse, parts, *args: original(partial, lse, (parts - (parts > 1).int() * PART), *args)


PART = torch.tensor([0, 1], dtype=torch.int32)

GATED = {"scorer": "gate", "statistics": [statistics(5, HEADS)]}

FAULTS = {
    "append: stale pages after a segment's end": (describe, "describe_chunks", stale_next_pages, {}, "decode"),
    "append: a place late": (append, "append", late(6), {}, "decode"),
    "decode: a wrong offset": (decode, "decode_parts", late(8), {}, "decode"),
    "decode: a part is not merged": (decode, "combine_parts", a_part_less, {}, "decode"),
    "extend: a wrong offset": (extend, "extend", late(12), {}, "prefill"),
    "codes: a scale dropped": (attend, "float16_of", lambda _: _one, {"form": "k8v4"}, "prefill"),
    "codes: a scale of centred keys dropped": (attend, "float16_of", lambda _: _one, {"form": "k6v4"}, "prefill"),
    "tail: another page": (attend, "entry_of", lambda _: _first_page, {}, "decode"),
    "FP8: a scale": (quantize_fp8, "quantize_fp8", quieter, {"dtype": torch.float8_e4m3fn}, "prefill"),
    "seal: scores": (seal, "score", rolled, {}, "sealing"),
    "seal: a wrong offset": (seal, "gather", late(5), {}, "prefill"),
    "seal: other tokens": (seal, "choose", rolled, {}, "sealing"),
    "fit: weights": (fit, "weights", scaled, {"fitted": True, "form": "k8v4"}, "sealing"),
    "gate: scores": (append, "gate_score", lambda _: _negated, GATED, "sealing"),
}


@pytest.mark.parametrize(
    "of_server",
    [
        {"form": "k8v4", "fitted": True},
        pytest.param({"dtype": torch.float8_e4m3fn}, marks=pytest.mark.thorough),
        pytest.param({"form": "k6v4", "dtype": torch.float16}, marks=pytest.mark.thorough),
        pytest.param(GATED, marks=pytest.mark.thorough),
    ],
)
def test_servers_pass(of_server):
    found = checked("triton", **of_server, chain_tokens=4, kept=KEPT)
    assert "short prefill after sealed segments, heads in parts, learned sinks" in found.differences


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_broken_kernel_ends_the_start_with_its_line(monkeypatch, fault):
    owner, name, broken, of_server, operation = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    line = f"--ragged-kernel triton on this CPU: {operation}.*; use --ragged-kernel torch"
    with pytest.raises(RaggedConfigError, match=line):
        checked("triton", **of_server, kept=KEPT)
