"""Our side of the contract with FlashInfer. Not FlashInfer itself: that needs a GPU, and nothing here has one.

A stand-in that does in torch what FlashInfer's documentation says of its decode wrapper, and asserts what it is given,
takes its place. What is checked: the views of the slabs, page indices, plans, order of heads, base of the logarithm,
the tail, the merge, and that the names in use exist in the installed FlashInfer. What is not: FlashInfer's kernels,
their access to pages by stride, streams and pinned memory.
"""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest
import torch

from sgl_ragged.attention import flashinfer_ops
from sgl_ragged.attention.flashinfer_ops import FlashInferOps, flashinfer_wrapper
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from tests.harness import SEGMENT, Harness, Kernel, Sequence
from tests.kernels.operations import triton_sealer
from tests.kernels.paged_decode import PagedDecode

DIM = 64
# In both layers one band of two heads, in one of them no neighbours, and two bands of one: three plans for six bands.
KEPT = np.array([[16, 48, 16, 64], [48, 16, 16, 64]])


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch):
    monkeypatch.setattr(flashinfer_ops, "FLOAT_WORKSPACE_BYTES", 1 << 16)


@pytest.mark.parametrize(
    ("lengths", "per_head", "scales", "plans"),
    [
        ([1, SEGMENT - 1, SEGMENT, SEGMENT + 1], 2, [0.5, 0.5], 3),
        ([SEGMENT + 1, 3 * SEGMENT - 1], 4, [0.5, 0.25], 6),
        ([5, 1], 1, [0.5, 0.5], 3),
    ],
    ids=["some requests have sealed segments", "all have", "none has"],
)
def test_prefill_then_decode_at_ragged_edges(lengths, per_head, scales, plans):
    """Three decode steps, with padded rows where some requests have no sealed segment, over a segment border."""
    steps = 3
    padding = 0 if min(lengths) > SEGMENT else 3
    sequences = [
        Sequence(length + steps, *KEPT.shape, per_head, DIM, "key_norm", seed) for seed, length in enumerate(lengths)
    ]
    for sequence in sequences:
        # What the cache cannot hold is not what is compared.
        sequence.q, sequence.k, sequence.v = sequence.q.half(), sequence.k.half(), sequence.v.half()
    expected = [sequence.expected(KEPT) for sequence in sequences]
    for sequence in sequences:
        # The dense attention's scale is 0.5 throughout.
        sequence.q *= torch.tensor([0.5 / scale for scale in scales])[:, None, None, None].half()
    wrappers: list[PagedDecode] = []

    def make_wrapper(*args, **kwargs) -> PagedDecode:
        wrappers.append(PagedDecode(*args, **kwargs))
        return wrappers[-1]

    def operations(store: SlabStore, max_segments: int, in_view: torch.Tensor | None) -> FlashInferOps:
        return FlashInferOps(store, len(lengths) + 3, max_segments, make_wrapper, in_view)

    harness = Harness(
        KEPT,
        DIM,
        "key_norm",
        len(lengths),
        8,
        per_head,
        kernel=Kernel(operations, triton_sealer),
        softmax_scales=list(scales),
        dtype=torch.float16,
    )
    # Scratch that was not written must not show.
    harness.operations._partial.fill_(torch.nan)
    assert len(wrappers) == plans
    assert all(wrapper.use_tensor_cores == (per_head == 4) for wrapper in wrappers)
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    for output, want, length in zip(outputs, expected, lengths, strict=True):
        torch.testing.assert_close(output.double(), want[:length], atol=4e-3, rtol=4e-3)
    for step in range(steps):
        positions = [length + step for length in lengths]
        output = harness.decode(sequences, positions, padding)
        assert output.dtype == torch.float16
        want = torch.stack([e[p] for e, p in zip(expected, positions, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=4e-3, rtol=4e-3)

    # The first plan is the start-up's. After that one per step and kind of band, shared by the bands of both layers.
    steps_with_pages = sum(max(lengths) + step >= SEGMENT for step in range(steps))
    for wrapper in wrappers:
        assert wrapper.runs == [0] + [2 if plans == 3 else 1] * steps_with_pages


def test_padding_of_no_length_gives_zeros():
    """As the Triton operations do: no garbage goes on through the model."""
    kernel = Kernel(lambda store, most, _: FlashInferOps(store, 2, most, PagedDecode), triton_sealer)
    harness = Harness(KEPT, DIM, "key_norm", 1, 2, kernel=kernel, dtype=torch.half)
    harness.operations._partial.fill_(torch.nan)
    lengths = torch.tensor([1, 0])
    batch = harness.operations.describe_decode(harness.table, torch.tensor([1, 0]), lengths, lengths)
    ones = torch.ones(2, 4, 2, DIM, dtype=torch.half)
    output = harness.operations.decode(0, ones, ones[:, :, 0], ones[:, :, 0] * 3, batch)
    assert (output[0] == 3).all()
    assert (output[1] == 0).all()


def test_names_in_use_exist_in_flashinfer():
    """A release that renames what we pass must fail here, not on a user's GPU."""
    decode = pytest.importorskip("flashinfer.decode")
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper
    # `plan` takes its options as keywords and hands them on.
    real = {
        "__init__": wrapper.__init__,
        "reset_workspace_buffer": wrapper.reset_workspace_buffer,
        "plan": getattr(wrapper, "_plan_impl", wrapper.plan),
        "run": wrapper.run,
    }
    for name, function in real.items():
        ours = inspect.signature(getattr(PagedDecode, name)).parameters
        theirs = inspect.signature(function).parameters
        assert set(ours) <= set(theirs), name
        positional = [p for p, kind in ours.items() if kind.kind is kind.POSITIONAL_OR_KEYWORD]
        if name != "__init__":
            assert list(theirs)[: len(positional)] == positional, name
    options = {"q_data_type", "kv_data_type", "sm_scale", "non_blocking"}
    assert options <= set(inspect.signature(real["plan"]).parameters)
    assert (
        list(inspect.signature(wrapper.plan).parameters)[1:8]
        == list(inspect.signature(PagedDecode.plan).parameters)[1:8]
    )


def store(dim: int = DIM, dtype: torch.dtype = torch.float16) -> SlabStore:
    layout = SlabLayout(kept=KEPT, head_dim=dim, segment=SEGMENT)
    return SlabStore(layout, get_scorer("key_norm"), 2, 2, dtype, "cpu")


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [(32, torch.float16, "head dimensions"), (64, torch.float32, "float32"), (64, torch.float16, "CUDA")],
)
def test_what_flashinfer_cannot_do_is_refused(dim, dtype, reason):
    with pytest.raises(RaggedConfigError, match=reason) as refused:
        FlashInferOps(store(dim, dtype), 4, 4)
    assert "--ragged-kernel" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_flashinfer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(RaggedConfigError, match="install flashinfer-python"):
        flashinfer_wrapper(torch.device("cuda"))


def test_a_failing_build_is_named():
    class Unbuildable(PagedDecode):
        def plan(self, *_, **__) -> None:
            raise RuntimeError("no nvcc\nmany lines of output")

    with pytest.raises(RaggedConfigError, match="no nvcc") as refused:
        FlashInferOps(store(), 4, 4, Unbuildable)
    assert "\n" not in str(refused.value)


def test_only_triton_alone_captures_graphs():
    assert [ops.captures_graphs for ops in (TorchOps, TritonOps, FlashInferOps)] == [False, True, False]
