"""A store whose segments are fitted: the same slabs from tails and chunks, in every format, and heads in parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sgl_ragged.fitting.fitted import StoreFit, without_codebook
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.kv_dtype import KvScales, is_fp8, movable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.quantise import QuantisedRows
from sgl_ragged.mem_pool.segments import InChunk
from sgl_ragged.mem_pool.slab_format import FORMATS
from sgl_ragged.mem_pool.slab_store import Sealer, SlabStore, seal_in_torch
from sgl_ragged.scorers import SegmentData, get_scorer, keep_positions, rank_positions
from tests.fitting.test_attention_matching import DIM, HEADS, SEGMENT, codebook, matched, segments
from tests.open_segments import full_segments

LAYERS = 2
KEPT = np.array([[16, 48], [64, 32]])
NUMBERS, SLOTS, ROWS = torch.tensor([0, 3, 7]), torch.tensor([4, 1, 2]), torch.tensor([2, 1, 3])
BESIDE = 5
"""The slot from which on open segments have pages beside their own."""


def store(
    form: str = "wide",
    dtype: torch.dtype = torch.float32,
    fitted: bool = True,
    make_sealer: Callable[[SlabLayout], Sealer] = lambda _: seal_in_torch,
    **parts,
) -> SlabStore:
    layout = SlabLayout(parts.pop("kept", KEPT), DIM, SEGMENT, form=FORMATS[form], **parts)
    statistics, scales = [codebook(layer) if fitted else {} for layer in range(LAYERS)], [DIM**-0.5] * LAYERS
    corrector = StoreFit.from_statistics(layout, statistics, scales, fp8=is_fp8(dtype))
    assert (corrector is not None) == fitted
    return SlabStore(
        layout,
        get_scorer("keydiff"),
        BESIDE + 3 * SEGMENT,
        4,
        dtype,
        "cpu",
        statistics=without_codebook(statistics),
        query_dtype=torch.float32,
        softmax_scales=scales,
        kv_scales=[KvScales(0.05, 0.03)] * LAYERS,
        sealer=make_sealer(layout),
        corrector=corrector,
    )


def sealed(made: SlabStore, *, in_tails: bool) -> SlabStore:
    every = [segments(len(NUMBERS), layer) for layer in range(LAYERS)]
    if in_tails:
        tokens = torch.stack([torch.stack(pair, dim=1) for pair in every], dim=1)
        made.seal(None, full_segments(made, ROWS, SLOTS, NUMBERS, tokens, BESIDE))
        return made
    for layer, pair in enumerate(every):
        chunk = made.to_cache(layer, *(x.transpose(1, 2).flatten(0, 1) for x in pair))
        firsts = torch.arange(len(SLOTS)) * SEGMENT
        made.seal(layer, InChunk(firsts, SLOTS, NUMBERS, *chunk, None, 0))
    return made


def rows(made: SlabStore, layer: int) -> list[torch.Tensor]:
    """What each band kept, as numbers."""
    bands = made.layout.bands[layer]
    return [made.kept_rows(layer, band, SLOTS, torch.float32) for band in bands if band.kept]


CASES = [("wide", torch.float32), ("wide", torch.bfloat16), ("wide", torch.float8_e4m3fn)]
CASES += [
    (form, dtype) for form in ("int8", "k8v4", "k6v4", "k4v4", "k3v3") for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_tails_and_chunks_give_the_same_slabs(form, dtype):
    from_tails, from_chunk = (sealed(store(form, dtype), in_tails=own) for own in (True, False))
    assert torch.equal(*(movable(one.slabs)[SLOTS] for one in (from_tails, from_chunk)))
    plain = sealed(store(form, dtype, fitted=False), in_tails=False)
    assert not torch.equal(*(movable(one.slabs)[SLOTS] for one in (from_tails, plain)))
    # In wide slabs, heads that keep everything lose nothing.
    everything = from_tails.layout.bands[1][0]
    assert everything.total == SEGMENT
    same = torch.equal(*(movable(one.band_elems(1, everything)[SLOTS].contiguous()) for one in (from_tails, plain)))
    assert same == (form == "wide")


def error(made: SlabStore, layer: int, head: int) -> float:
    """Of the codebook's outputs, squares summed over all segments: what a head's slabs give against all its tokens."""
    from tests import fit_oracle
    from tests.fitting.test_attention_matching import FREQUENCIES, SCALE, book

    (index,) = (n for n, band in enumerate(made.layout.bands[layer]) if head in band.heads)
    band = made.layout.bands[layer][index]
    kept = rows(made, layer)[index][:, band.heads.index(head)].double().numpy()
    own, total = book(codebook(layer), head), 0.0
    for number, every_key, every_value, (kept_keys, kept_values) in zip(
        NUMBERS.tolist(), *(x[:, head].double().numpy() for x in segments(len(NUMBERS), layer)), kept, strict=True
    ):
        queries = fit_oracle.turned(own.queries * SCALE, (number + 1) * SEGMENT - 1, FREQUENCIES)
        first, found = int(number == 0), []
        for keys, values in ((every_key, every_value), (kept_keys, kept_values)):
            shares, others = np.exp(queries @ keys.T), np.exp(own.masses[first])
            found.append((shares @ values + others[:, None] * own.outputs[first]) / (shares.sum(1) + others)[:, None])
        total += np.square(found[0] - found[1]).sum()
    return total


@pytest.mark.parametrize("form", ["wide", "int8", "k8v4", "k6v6", "k5v4", "k4v4", "k4v3"])
def test_what_is_stored_is_nearer_than_what_was_chosen(form):
    fitted, plain = (sealed(store(form, fitted=own), in_tails=False) for own in (True, False))
    for layer, head in ((0, 0), (0, 1), (1, 1)):
        # Of random segments, one in three may have grown too much and keep its own.
        assert error(fitted, layer, head) < 0.8 * error(plain, layer, head)


@pytest.mark.parametrize(("layer", "head", "kept"), [(0, 1, 48), (1, 0, SEGMENT), (1, 1, 32)])
@pytest.mark.parametrize("form", ["k8v4", "k5v4", "k4v4"])
def test_slabs_have_the_codes_of_the_fit(form, layer, head, kept):
    """Slabs have the codes that the definition gives. Another head of the layer keeps more, or all."""
    (keys, values), coded = segments(len(NUMBERS), layer), FORMATS[form]
    scores = get_scorer("keydiff").score(SegmentData(keys, values, segment_indices=NUMBERS))
    own = torch.tensor([head])
    places = keep_positions(rank_positions(scores, NUMBERS == 0)[:, own], kept)
    references = References.from_statistics(codebook(layer), DIM**-0.5).heads(own)
    codes = matched(keys[:, own], values[:, own], places, NUMBERS, references, coded)[2]
    found = sealed(store(form), in_tails=False)
    (index,) = (n for n, band in enumerate(found.layout.bands[layer]) if head in band.heads)
    numbers = torch.stack(QuantisedRows.of(codes.stored(coded), kept, DIM, coded).restored(), dim=2)
    differ = (rows(found, layer)[index][:, 0] - numbers[:, 0]).abs() > 1e-4
    # The last bits of a fit may take a code to its neighbour.
    assert differ.float().mean() < 0.01


@pytest.mark.parametrize("form", ["wide", "k8v4", "k4v4"])
def test_ranks_store_their_parts_of_what_the_whole_head_would(form):
    """But for moments of keys, which are those of a part: such heads stay as they are."""
    whole, found = sealed(store(form), in_tails=False), {}
    for first, kept in ((np.zeros_like(KEPT), np.full_like(KEPT, 16)), (np.full_like(KEPT, 16), KEPT - 16)):
        for fitted in (True, False):
            part = store(form, fitted=fitted, kept=kept, total=KEPT, first=first, full_heads=HEADS)
            found[int(first.max()), fitted] = sealed(part, in_tails=True)

    def of_head(made: SlabStore, layer: int, head: int) -> torch.Tensor:
        bands = [band for band in made.layout.bands[layer] if band.kept]
        pairs = zip(bands, rows(made, layer), strict=True)
        own = [x[:, band.heads.index(head)] for band, x in pairs if head in band.heads]
        return own[0] if own else torch.empty(len(SLOTS), 2, 0, DIM)

    for layer, head in np.ndindex(*KEPT.shape):
        parts = [of_head(found[first, True], layer, head) for first in (0, 16)]
        if form == "k4v4" and KEPT[layer, head] > 16:
            assert all(
                torch.equal(x, of_head(found[n, False], layer, head)) for n, x in zip((0, 16), parts, strict=True)
            )
        else:
            every = of_head(whole, layer, head)
            torch.testing.assert_close(torch.cat(parts, dim=2), every, atol=1e-5, rtol=1e-5)
