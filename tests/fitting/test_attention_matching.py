"""Fitted keys and values: their definition, what they are for, and what they never do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.fitting import attention_matching, torch_steps
from sgl_ragged.fitting.attention_matching import MOST_GROWTH, corrections
from sgl_ragged.fitting.fitted import HeadFit
from sgl_ragged.fitting.references import References
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.quantise import QuantisedRows
from sgl_ragged.mem_pool.slab_format import FORMATS, WIDE
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE
from tests import fit_oracle
from tests.quantised_oracle import restored_keys, restored_values

SEGMENT, DIM, HEADS, QUERIES_PER_HEAD = 64, 16, 2, 126
FREQUENCIES = 10000.0 ** -(np.arange(DIM // 2) / (DIM // 2))
SCALE = DIM**-0.5


def codebook(seed: int = 0, order: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng([7, seed])
    order = np.arange(DIM) if order is None else order
    made = {
        QUERIES: rng.normal(size=(HEADS, QUERIES_PER_HEAD, DIM)) + 3,
        MASSES: rng.normal(size=(HEADS, 2, QUERIES_PER_HEAD)) + 4,
        OUTPUTS: 0.3 * rng.normal(size=(HEADS, 2, QUERIES_PER_HEAD, DIM)),
        ROPE[0]: FREQUENCIES[None],
        ROPE[1]: order[None].astype(float),
    }
    half = {QUERIES, OUTPUTS}
    return {name: torch.from_numpy(x).to(torch.float16 if name in half else torch.float32) for name, x in made.items()}


def matched(keys, values, places, numbers, references, form=None):
    """What is kept of keys and values, corrected."""
    kept = torch.zeros(keys.shape[:3], dtype=torch.bool).scatter_(2, places, True)
    layout = SlabLayout(np.full((1, keys.shape[1]), places.shape[-1]), DIM, SEGMENT, form=form or WIDE)
    fit = HeadFit.for_layer(layout, 0, references)

    order = kept.int().argsort(dim=-1, descending=True, stable=True)
    ranked = (x.gather(2, order[..., None].expand_as(x)) for x in (keys, values))
    found = corrections(*ranked, fit.kept, numbers, references, form or WIDE, lambda rows: rows, torch_steps)
    assert (found.codes is None) == (form is None)
    return (found.keys, found.values) if form is None else (found.keys, found.values, found.codes)


def book(statistics: dict[str, torch.Tensor], head: int) -> fit_oracle.Book:
    queries, masses, outputs = (statistics[name][head].double().numpy() for name in (QUERIES, MASSES, OUTPUTS))
    # What the device holds: queries times the scale, in float16.
    queries = (statistics[QUERIES][head].float() * SCALE).half().double().numpy() / SCALE
    return fit_oracle.Book(queries, masses, outputs, statistics[ROPE[0]][0].double().numpy())


def segments(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng([3, seed])
    shape = (count, HEADS, SEGMENT, DIM)
    keys, values = rng.normal(size=shape), 0.5 * rng.normal(size=shape) + 1.5
    return torch.from_numpy(keys).float(), torch.from_numpy(values).float()


def chosen(count: int, kept: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([5, seed])
    every = [np.sort(rng.permutation(SEGMENT)[:kept]) for _ in range(count * HEADS)]
    return torch.from_numpy(np.stack(every)).view(count, HEADS, kept)


@pytest.mark.parametrize(
    ("form", "kept"),
    [(None, 16), (None, 48), *itertools.product(map(FORMATS.get, ("k8v4", "k6v4", "k4v4")), (16, 48, SEGMENT))],
)
def test_keys_and_values_are_what_the_definition_says(form, kept):
    (keys, values), places, numbers = segments(3), chosen(3, kept), torch.tensor([0, 5, 1])
    statistics = codebook()
    references = References.from_statistics(statistics, SCALE)
    fitted = matched(keys, values, places, numbers, references, form)
    corrected_heads, close, alike = 0, [], []
    decoded = decode(fitted[2], form) if form else (None, None)
    for segment, number in enumerate(numbers.tolist()):
        for head in range(HEADS):

            def stored(x, asked, own=fitted[0][segment, head]):
                """Codes of the keys as found: where these differ in their last bits, codes may be neighbours."""
                own = own if np.allclose(x, own, atol=2e-4) else torch.from_numpy(x)
                return x if form is None else restored_keys(own, form.name, asked).numpy()

            expected = fit_oracle.fitted(
                keys[segment, head].double().numpy(),
                values[segment, head].double().numpy(),
                places[segment, head].numpy(),
                number,
                book(statistics, head),
                SCALE,
                stored,
                form is not None,
            )
            corrected_heads += expected.gram is not None
            pairs = [(fitted[0], expected.keys), (fitted[1], expected.values)]
            for found, wanted in pairs:
                close.append(np.isclose(found[segment, head].numpy(), wanted, atol=2e-4))
            if form is not None and expected.gram is not None:
                wanted_keys = stored(expected.keys, expected.asked)
                wanted_values = restored_values(expected.values, form.value_bits, expected.gram)
                for found, wanted in zip(decoded, (wanted_keys, wanted_values), strict=True):
                    alike.append(np.isclose(found[segment, head].numpy(), wanted, atol=2e-3))
    # A number at the border between two codes may go to either, and then those after it, too.
    assert np.all(close) if form is None else np.mean(close) > 0.9
    assert form is None or np.mean(alike) > 0.9
    assert corrected_heads >= 3 * HEADS - 1, "one may have grown too much"


def test_the_regression_is_as_exact_as_with_more_digits():
    """Shares of keys that all queries attend to alike, so that the normal equations have a large condition number."""
    rng = np.random.default_rng(3)
    kept, count, ridge = 96, 168, 1e-5 * 168
    exps = np.exp(3 * rng.normal(size=(8, kept, 1)) + 0.2 * rng.normal(size=(8, kept, count)))
    shares = torch.from_numpy(exps / exps.sum(axis=1, keepdims=True)).float()
    target = (torch.from_numpy(1 + rng.normal(size=(8, DIM, kept))) @ shares.double()).float()
    found = attention_matching._ridge_regression(target, shares, ridge)
    own, columns = target.double().numpy(), shares.double().numpy()
    rows = columns.swapaxes(1, 2)
    wanted = np.linalg.solve(columns @ rows + ridge * np.eye(kept), (own @ rows).swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_allclose(found.solution.numpy(), wanted, rtol=0, atol=1e-4)


def decode(codes, form) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that slabs give back."""
    _, _, kept, dim = codes.keys.codes.shape
    return QuantisedRows.of(codes.stored(form), kept, dim, form).restored()


@pytest.mark.parametrize("name", ["k6v6", "k5v4", "k4v4", "k3v3"])
def test_errors_that_are_fed_back_cost_less(monkeypatch, name):
    """Squared errors of the codebook's outputs, beside those with codes that are rounded one by one."""
    (keys, values), places, numbers = segments(4), chosen(4, 48), torch.arange(4)
    references, form = References.from_statistics(codebook(), SCALE), FORMATS[name]

    def error() -> float:
        decoded, total = decode(matched(keys, values, places, numbers, references, form)[2], form), 0.0
        for segment, head in np.ndindex(4, HEADS):
            true = outputs(keys[segment, head], values[segment, head], segment, head)
            total += np.square(outputs(*(x[segment, head] for x in decoded), segment, head) - true).sum()
        return total

    fed = error()
    own = torch_steps.feed_back
    monkeypatch.setattr(torch_steps, "feed_back", lambda units, factor, bits: own(units, 0 * factor, bits))
    assert fed < 0.9 * error()


def outputs(keys: torch.Tensor, values: torch.Tensor, number: int, head: int) -> np.ndarray:
    own = book(codebook(), head)
    queries = fit_oracle.turned(own.queries * SCALE, (number + 1) * SEGMENT - 1, FREQUENCIES)
    shares, others = np.exp(queries @ keys.double().numpy().T), np.exp(own.masses[int(number == 0)])
    total = shares @ values.double().numpy() + others[:, None] * own.outputs[int(number == 0)]
    return total / (shares.sum(1) + others)[:, None]


def test_outputs_come_nearer_than_by_selection():
    (keys, values), places, numbers = segments(4), chosen(4, 32), torch.arange(4)
    fitted = matched(keys, values, places, numbers, References.from_statistics(codebook(), SCALE))
    for segment, number in enumerate(numbers.tolist()):
        for head in range(HEADS):
            own = places[segment, head]
            true = outputs(keys[segment, head], values[segment, head], number, head)
            plain = outputs(keys[segment, head, own], values[segment, head, own], number, head)
            better = outputs(fitted[0][segment, head], fitted[1][segment, head], number, head)
            assert np.square(better - true).sum() < 0.3 * np.square(plain - true).sum()


def test_segments_do_not_see_each_other_and_heads_have_their_own_queries():
    (keys, values), places, numbers = segments(5), chosen(5, 32), torch.tensor([0, 1, 2, 3, 4])
    references = References.from_statistics(codebook(), SCALE)
    together = matched(keys, values, places, numbers, references)
    for one in range(5):
        own = slice(one, one + 1)
        alone = matched(keys[own], values[own], places[own], numbers[own], references)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[own], b, atol=1e-5, rtol=1e-5)
    last = torch.tensor([1])
    alone = matched(keys[:, last], values[:, last], places[:, last], numbers, references.heads(last))
    torch.testing.assert_close(together[1][:, last], alone[1], atol=1e-5, rtol=1e-5)


def test_dimensions_may_be_rotated_in_another_order():
    """Pairs that lie side by side: the same fit, with dimensions moved."""
    order = np.arange(DIM).reshape(-1, 2).T.ravel()
    back = torch.from_numpy(order.argsort())
    (keys, values), places, numbers = segments(2), chosen(2, 32), torch.tensor([0, 3])
    here = matched(keys, values, places, numbers, References.from_statistics(codebook(), SCALE))
    moved = References.from_statistics(codebook(order=order), SCALE)
    there = matched(keys[..., back], values, places, numbers, moved)
    # Sums over dimensions are in another order, and the ridge is small.
    torch.testing.assert_close(there[0][..., torch.from_numpy(order)], here[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(there[1], here[1], atol=2e-4, rtol=1e-4)


def test_values_do_not_grow_beyond_their_bound(monkeypatch):
    """What is kept has small values, what is dropped large ones: the head keeps its own."""
    (keys, values), places = segments(1), chosen(1, 16)
    index = places[..., None].expand(*places.shape, DIM)
    values = (10 * values).scatter(2, index, 0.01 * values.gather(2, index))
    arguments = keys, values, places, torch.tensor([3]), References.from_statistics(codebook(), SCALE)
    own = values.gather(2, index)
    assert torch.equal(matched(*arguments)[1], own)
    monkeypatch.setattr(attention_matching, "MOST_GROWTH", 1e9)
    assert matched(*arguments)[1].abs().max() > MOST_GROWTH * own.abs().max()


KINDS = ("random", "equal", "one dominates", "zeros", "huge", "nan", "inf", "far beyond the rest")


@given(
    st.sampled_from(KINDS),
    st.sampled_from([16, 48]),
    st.integers(0, 9),
    st.sampled_from([None, FORMATS["k8v4"], FORMATS["k6v4"], FORMATS["k4v4"]]),
)
def test_degenerate_segments_keep_what_they_had(kind, kept, seed, form):
    (keys, values), places = segments(2, seed), chosen(2, kept, seed)
    if kind == "equal":
        keys[:], values[:] = keys[:, :, :1], values[:, :, :1]
    elif kind == "one dominates":
        keys[:, :, 3] = 30.0
    elif kind == "zeros":
        keys[:] = 0.0
        values[:] = 0.0
    elif kind == "huge":
        keys[:, :, 5] = 1e4
    elif kind in ("nan", "inf"):
        keys[0, 0, int(places[0, 0, 2])] = float(kind)
        values[1, 1, 4] = float(kind)
    elif kind == "far beyond the rest":
        keys *= 50
    fitted = matched(
        keys, values, places, torch.tensor([0, 4]), References.from_statistics(codebook(seed), SCALE), form
    )
    index = places[..., None].expand(*places.shape, DIM)
    if form is not None:
        # A row that is undefined leaves the others as they are.
        whole = torch.isfinite(keys.gather(2, places[..., None].expand(*places.shape, DIM))).all(dim=-1)
        assert torch.isfinite(decode(fitted[2], form)[0])[whole].all()
    for found, given_rows in zip(fitted, (keys, values), strict=False):
        own = given_rows.gather(2, index)
        assert (torch.isfinite(found) | ~torch.isfinite(own)).all(), "nothing finite becomes anything else"
    finite = torch.isfinite(keys).all(-1).all(-1) & torch.isfinite(values).all(-1).all(-1)
    most = values.gather(2, index).abs().amax(dim=(-1, -2))
    assert (fitted[1].abs().amax(dim=(-1, -2)) <= MOST_GROWTH * most)[finite].all()
