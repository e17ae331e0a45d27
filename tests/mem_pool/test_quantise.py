"""Codes of few bits: what they stand for, at the edges, and attention to them against a dense mask in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.quantise import (
    QuantisedRows,
    packed,
    quantised,
    rotated,
    rotation_matrix,
    stored_rows,
    unpacked,
)
from sgl_ragged.mem_pool.slab_format import BY_WIDTHS, FORMATS, INT8, PLANES, WIDE, Share, settle_share
from tests.attention.test_torch_ops import BOUNDS
from tests.examples import examples
from tests.harness import KEPT, SEGMENT, Harness, Sequence
from tests.quantised_oracle import BITS, restored, restored_keys, rotation
from tests.rounded import mostly_close

K8V4, K6V4, K5V4, K4V4 = (BY_WIDTHS[widths] for widths in ((8, 4), (6, 4), (5, 4), (4, 4)))
QUANTISED = [INT8, K8V4, K6V4, K5V4, K4V4, BY_WIDTHS[3, 3], BY_WIDTHS[6, 6], BY_WIDTHS[5, 5]]


@pytest.mark.parametrize("dim", [2, 16, 64, 80, 96, 128, 256])
def test_rotations_are_hadamard_matrices_and_their_own_inverses(dim):
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim))
    np.testing.assert_allclose(rotated(x).double(), x.double().numpy() @ rotation(dim), atol=1e-5)
    torch.testing.assert_close(rotated(rotated(x)), x, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(rotation_matrix(dim, torch.device("cpu")), rotation(dim), atol=1e-6)
    if dim & (dim - 1) == 0:
        # The halves of dimensions stay apart but for one sum and one difference.
        half = hadamard(dim // 2) if dim > 2 else np.ones((1, 1))
        np.testing.assert_array_equal(hadamard(dim), np.block([[half, half], [half, -half]]))


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_codes_stand_for_what_the_definition_says(bits, dim):
    x = (
        torch.randn(300, dim, generator=torch.Generator().manual_seed(bits + dim))
        * 10 ** torch.linspace(-3, 3, 300)[:, None]
    )
    found = quantised(x, bits)
    codes, scales = found.codes, found.scales
    assert (codes.min(), codes.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rows = ((codes.double() + 0.5) * scales.double()[:, None]).numpy() @ rotation(dim)
    difference = (torch.from_numpy(rows) - restored(x, bits)).abs().amax(dim=-1) / scales.double()
    assert difference.max() < 1e-3
    assert torch.equal(unpacked(packed(codes, bits), bits, dim), codes)


@pytest.mark.parametrize(("bits", "most"), [(8, 7e-5), (6, 8.1e-4), (5, 2.8e-3), (4, 9.4e-3), (3, 3.4e-2)])
def test_errors_of_normal_numbers(bits, most):
    """Mean squared error of rows of 64, in units of their variance. One scale for all would give .0116 in 4 bits."""
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(bits))
    found = quantised(x, bits)
    rows = (found.codes + 0.5) * found.scales.float()[:, None]
    assert (rows - rotated(x)).square().mean() < most


@pytest.mark.parametrize(("dim", "block"), [(16, 16), (80, 16), (8, 8), (128, 128)])
@pytest.mark.parametrize("bits", [6, 5, 4, 3])
def test_planes_lie_where_the_format_says(bits, dim, block):
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (3, dim), generator=torch.Generator().manual_seed(dim), dtype=torch.int8)
    planes = packed(codes, bits)
    assert [plane.shape[1] * 8 // dim for plane in planes] == list(PLANES[bits])
    for number in range(dim):
        found, place = torch.zeros(3, dtype=torch.uint8), 0
        for plane, width in zip(planes, PLANES[bits], strict=True):
            in_block = block * width // 8
            byte = number // block * in_block + number % block % in_block
            found |= (plane[:, byte] >> (number % block // in_block * width) & (2**width - 1)) << place
            place += width
        assert torch.equal(found.to(torch.int8) - half, codes[:, number])
    assert torch.equal(unpacked(planes, bits, dim), codes)


@examples(50)
@given(st.data())
def test_codes_of_a_row_depend_on_the_row_alone(data):
    """Bit for bit, whatever lies beside it, and in whatever order of strides."""
    rows, dim = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([16, 64, 96]))
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    row, bits = data.draw(st.integers(0, rows - 1)), data.draw(st.sampled_from(list(PLANES)))
    every, alone, strided = (
        (found.codes, found.scales)
        for found in (quantised(x, bits), quantised(x[row].clone(), bits), quantised(x.T.contiguous().T, bits))
    )
    for part, own, other in zip(every, alone, strided, strict=True):
        torch.testing.assert_close(part[row], own, atol=0, rtol=0)
        torch.testing.assert_close(part, other, atol=0, rtol=0)


@pytest.mark.parametrize("bits", PLANES)
def test_edges_are_bounded(bits):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    x[1, 3] = 1e4
    x[2] = 0
    x[3, 5] = torch.nan
    x[4, 0] = 3e38
    x[5] *= 1e-9
    rounded = quantised(x, bits)
    codes, scales = rounded.codes, rounded.scales
    found = ((codes + 0.5) * scales.float()[:, None]) @ rotation_matrix(64, x.device)
    # As much as half of the largest scale in each rotated dimension, at most: any other was better.
    for row in (0, 1, 2, 5):
        largest = rotated(x[row]).abs().max() / 2 ** (bits - 1)
        assert (found[row] - x[row]).norm() <= 0.51 * 8 * largest + 1e-6
    assert found[2].abs().max() < 1e-6
    assert found[3].isnan().all()
    assert not codes[3].any()
    assert found[4].isfinite().all()
    assert found[[0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("form", QUANTISED, ids=lambda one: one.name)
@pytest.mark.parametrize("dim", [16, 80])
def test_rows_lie_as_the_format_says(form, dim):
    keys, values = torch.randn(2, 3, 2, 32, dim, generator=torch.Generator().manual_seed(4)).unbind(0)
    stored = stored_rows(keys, values, form)
    assert stored.shape == (3, 2, form.part_elems(32, dim))
    assert form.part_elems(32, dim) == 32 * form.row_elems(dim) + (4 * dim if form.key_bits < 8 else 0)
    found = QuantisedRows.of(stored, 32, dim, form).restored()
    own = torch.stack([restored_keys(one, form.name) for one in keys.flatten(0, 1)]).view_as(keys)
    for got, want in zip(found, (own, restored(values, BITS[form.name][1])), strict=True):
        torch.testing.assert_close(got.double(), want, atol=0.02, rtol=0.02)


def test_layouts_of_codes_are_counted_in_bytes():
    for form, row, header in ((WIDE, 256, 0), (INT8, 132, 0), (K8V4, 100, 0), (K6V4, 84, 256), (K4V4, 68, 256)):
        layout = SlabLayout(KEPT, 64, SEGMENT, form=form)
        assert layout.slab_bytes(2) == KEPT.sum() * row + KEPT.size * header
        assert layout.byte_share(2) == pytest.approx(layout.slab_bytes(2) / (KEPT.size * SEGMENT * 256))
        starts = layout.key_offset - header
        ends = layout.key_offset + KEPT * form.row_elems(64)
        assert sorted([*starts.ravel(), layout.slab_elems]) == sorted([0, *ends.ravel()])
        assert not (layout.key_offset % 16).any()
        assert not (layout.value_offset % 16).any()
    # Twice as many numbers of 16 bits as bytes, and what scales take.
    assert K8V4.token_share(0.2, 128, 2, 256) == pytest.approx(0.2 * 512 / 196)
    assert INT8.token_share(0.5, 64, 2, 256) == pytest.approx(0.5 * 256 / 132)
    assert K8V4.token_share(0.5, 64, 2, 256) == 1
    assert K4V4.token_share(0.1, 64, 2, 256) == pytest.approx((0.1 * 256 * 256 - 256) / (68 * 256))
    assert WIDE.token_share(0.3, 64, 2, 256) == 0.3
    for dim, form in ((6, K6V4), (6, K4V4), (4, K5V4), (7, INT8)):
        with pytest.raises(RaggedConfigError, match=f"{form.name} needs a head dimension that . divides, not {dim}"):
            SlabLayout(KEPT, dim, SEGMENT, form=form)


def test_formats_by_name_and_by_ratio():
    with pytest.raises(RaggedConfigError, match="'int3'; known: auto, wide, int8, k8v6, k8v5, k8v4"):
        settle_share("int3", 0.5, 128, 2)
    for name, form in FORMATS.items():
        assert settle_share(name, 0.3, 128, 2) == Share(0.3, form)
    ratios = (1, 0.9, 0.47, 0.46, 0.3, 0.25, 0.2, 0.15, 0.1, 0.075, 0.05)
    chosen = {ratio: settle_share("auto", ratio, 128, 2).form.name for ratio in ratios}
    names = ["wide", *["int8"] * 2, *["k6v6"] * 3, "k5v4", *["k4v4"] * 2, "k4v3", "k3v3"]
    assert chosen == dict(zip(ratios, names, strict=True))
    # Of 32 bits the same bytes are half the ratio.
    assert settle_share("auto", 0.15, 128, 4).form.name == "k6v6"
    assert settle_share("auto", 0.3, 128, 2, readable=False).form is WIDE
    assert settle_share("auto", 0.3, 7, 2).form is WIDE
    assert settle_share("auto", 0.05, 6, 2).form is settle_share("auto", 0.3, 6, 2).form is K8V4
    assert settle_share("auto", 0.2, 12, 2).form is K8V4
    # Without a ratio.
    assert settle_share("auto", None, 128, 2) == Share(0.3, FORMATS["k6v6"])
    assert settle_share("k8v4", None, 128, 2) == Share(0.3, K8V4)
    assert settle_share("wide", None, 128, 2) == settle_share("auto", None, 128, 1, readable=False) == Share(0.5, WIDE)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("scorer", "per_head", "dim"),
    [("keydiff", 1, 64), ("keydiff", 4, 128), ("snapkv", 2, 80), ("fastkvzip", 3, 96), ("key_norm", 2, 256)],
)
def test_attention_reads_what_was_stored(form, scorer, per_head, dim):
    """Lengths at ragged edges in one batch, then decode over a segment border together."""
    lengths, steps = [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 4 * SEGMENT + 7], 3
    sequences = [Sequence(n + steps, *KEPT.shape, per_head, dim, scorer, seed) for seed, n in enumerate(lengths)]
    harness = Harness(KEPT, dim, scorer, len(lengths), 6, per_head, form=form)
    expected = [sequence.expected(KEPT, form=form.name) for sequence in sequences]
    outputs = harness.extend(sequences, [0] * len(lengths), lengths)
    for step in range(steps):
        outputs.append(harness.decode(sequences, [length + step for length in lengths], padding=1))
    want = [e[:n] for e, n in zip(expected, lengths, strict=True)]
    want += [torch.stack([e[n + step] for e, n in zip(expected, lengths, strict=True)]) for step in range(steps)]
    compare(outputs, want, form)


def compare(outputs, want, form=K8V4, alike=None) -> None:
    """Where two ways of rounding differ by a code, one output differs by a code's share of it.

    A code of a key in 4 bits is 16 times one in 8, of one in 6 bits 4 times, and moves a logit as much; these logits
    spread over 8 at d = 256.
    """
    least, most = {8: (0.99, 0.05), 6: (0.97, 0.3), 5: (0.97, 0.4), 4: (0.95, 0.6), 3: (0.95, 1.0)}[form.key_bits]
    for output, right in zip(outputs, want, strict=True):
        mostly_close(output.numpy(), right.numpy(), share=alike or least, atol=1e-4, most=most)


def sealed_slots(harness: Harness, lengths: list[int]) -> torch.Tensor:
    """Of the finished segments of sequences with so many tokens: all others are pages, or hold nothing."""
    own = [harness.table[row, : n // SEGMENT * SEGMENT : SEGMENT] for row, n in enumerate(lengths, start=1)]
    return torch.cat(own) // SEGMENT


@examples(20)
@given(
    cuts=st.lists(st.integers(1, 4 * SEGMENT + 9), max_size=6),
    mix=st.integers(0, 3),
    scorer=st.sampled_from(["keydiff", "snapkv", "fastkvzip"]),
    form=st.sampled_from(QUANTISED),
)
def test_chunks_of_any_length_give_the_same_slabs(cuts, mix, scorer, form):
    """From tails and from chunks, bit for bit: the rows are the same numbers."""
    total = 4 * SEGMENT + 10
    sequence = Sequence(total, *KEPT.shape, 2, 16, scorer, seed=3)
    harness, whole = (Harness(KEPT, 16, scorer, 1, 5, form=form) for _ in range(2))
    borders = [0, *sorted(set(cuts)), total]
    outputs = []
    for begin, end in itertools.pairwise(borders):
        for step in range(min(mix, end - begin)):
            outputs.append(harness.decode([sequence], [begin + step]))
        outputs += harness.extend([sequence], [begin + min(mix, end - begin)], [end])
    at_once = whole.extend([sequence], [0], [total])[0]
    harness.store.flush_pending_seals()
    sealed = sealed_slots(whole, [total])
    torch.testing.assert_close(*(one.store.slabs[sealed] for one in (harness, whole)), atol=0, rtol=0)
    torch.testing.assert_close(torch.cat(outputs), at_once, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda one: one.name)
def test_a_foreign_nan_does_not_spread(form):
    harness = Harness(KEPT, 16, "keydiff", 2, 4, form=form)
    poisoned = Sequence(3 * SEGMENT - 1, *KEPT.shape, 2, 16, "keydiff", seed=5)
    for tensor in (poisoned.q, poisoned.k, poisoned.v):
        tensor.fill_(torch.nan)
    harness.extend([poisoned, poisoned], [0, 0], [3 * SEGMENT - 1] * 2)
    lengths = [5, 2 * SEGMENT + 3]
    sequences = [Sequence(length + 1, *KEPT.shape, 2, 16, "keydiff", seed=6 + length) for length in lengths]
    harness.extend(sequences, [0, 0], lengths)
    output = harness.decode(sequences, lengths)
    want = torch.stack([s.expected(KEPT, form=form.name)[n] for s, n in zip(sequences, lengths, strict=True)])
    # One head and segment in which a code differs is a twentieth of so few outputs.
    compare([output], [want], form, alike=0.9)


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_bounded_histories_of_codes(bound):
    length = 6 * SEGMENT + 7
    sequence = Sequence(length, *KEPT.shape, 2, 16, "keydiff", seed=0)
    harness = Harness(KEPT, 16, "keydiff", 1, 8, bound=bound, form=K8V4)
    expected = sequence.expected(KEPT, sequence.seen(bound), form="k8v4")
    for begin in range(0, length, SEGMENT):
        end = min(begin + SEGMENT, length)
        compare(harness.extend([sequence], [begin], [end]), [expected[begin:end]])
