"""Which segments stay in view, how much memory that can take, and that nothing depends on how one got there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.history.bound import BoundedHistory, HistoryBound, history_bound
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.segment_scores import value_key_norm, value_novelty
from sgl_ragged.features.windows.sizes import window_pages
from tests.bounded_oracle import segment_scores, views
from tests.examples import examples

SEGMENT = 16


def advanced(bound: HistoryBound, scores: list[float], steps: list[int]) -> BoundedHistory:
    """A history that is told the scores it asks for, and no others."""
    history = BoundedHistory(bound)
    for sealed in steps:
        asked = history.unscored(sealed)
        history.learn(asked, [scores[number] for number in asked])
        history.advance(sealed)
    return history


def test_the_lowest_leaves_but_never_the_first_nor_the_latest():
    scores = [0.0, 5.0, 1.0, 4.0, 3.0, 0.5, 0.1, 9.0]
    history = advanced(HistoryBound(4, "value_key_norm"), scores, list(range(1, 9)))
    # 2 goes when the fifth is sealed, then 1 or 3, 1 or 4 by score; 6 and 7 are the latest.
    assert history.in_view == [0, 1, 6, 7]
    assert history.left == {2, 3, 4, 5}
    assert advanced(HistoryBound(4, "recency"), scores, [8]).in_view == [0, 5, 6, 7]


@given(
    limit=st.integers(3, 9),
    scores=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.9]), min_size=1, max_size=30),
    by_age=st.booleans(),
    data=st.data(),
)
def test_a_view_follows_from_the_scores_alone(limit, scores, by_age, data):
    """However many segments are sealed at once, as in chunks, hits and after retraction."""
    bound = HistoryBound(limit, "recency" if by_age else "value_key_norm")
    steps = sorted(data.draw(st.sets(st.integers(1, len(scores)))) | {len(scores)})
    history = advanced(bound, scores, steps)
    ranks = np.arange(len(scores), dtype=float) if by_age else np.array(scores)
    seen = views(ranks, limit, bound.latest)[len(scores)]
    assert history.in_view == seen
    assert history.left == set(range(len(scores))) - set(seen)


@given(limit=st.integers(3, 9), sealed=st.integers(0, 20), ahead=st.integers(0, 5))
def test_a_chunk_needs_no_score_of_its_own(limit, sealed, ahead):
    """What queries see up to `latest` segments behind the last sealed one follows from scores that are there."""
    bound = HistoryBound(limit, "value_key_norm")
    history = advanced(bound, [1.0] * 40, [sealed])
    assert all(number < sealed for number in history.unscored(sealed + min(ahead, bound.latest)))


@pytest.mark.parametrize("tokens", [100, 32, 0])
def test_bounds_that_are_refused(tokens):
    with pytest.raises(RaggedConfigError, match="must be a multiple of the segment length 16, and at least 3 segments"):
        history_bound(tokens, "recency", SEGMENT)


def test_the_score_of_pagedeviction():
    keys, values = torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 3)
    keys[..., 0], values[..., 1] = 2.0, torch.tensor([[[1.0, 2, 3, 4]], [[4, 4, 4, 4]]])
    torch.testing.assert_close(value_key_norm(keys, values), torch.tensor([[1.25], [2.0]]))


def test_novelty_is_what_the_oracle_says():
    rng = np.random.default_rng(0)
    keys, values, means = rng.normal(size=(3, 2, 32, 5)), rng.normal(size=(3, 2, 32, 5)), rng.normal(size=(2, 5))
    values[1, :, 9:14] += 5
    found = value_novelty(*(torch.from_numpy(x).float() for x in (keys, values, means)))
    of_heads = [
        segment_scores("value_novelty", keys[:, head].reshape(-1, 5), values[:, head].reshape(-1, 5), 32, means[head])
        for head in range(2)
    ]
    np.testing.assert_allclose(found, np.transpose(of_heads), rtol=1e-5)
    # Nothing is strange in a segment that says one thing.
    assert value_novelty(torch.ones(1, 1, 16, 3), torch.ones(1, 1, 16, 3), torch.zeros(1, 3)).abs().max() < 1e-6


class Given:
    """Scores of slots: the slot's number, read backwards."""

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        return -slots.float()


def table_of(rows: int, segments: int) -> torch.Tensor:
    """A request table in which row r has the slots r * segments + 1, ..."""
    slots = 1 + torch.arange(rows * segments).view(rows, segments)
    tokens = slots[:, :, None] * SEGMENT + torch.arange(SEGMENT)
    return tokens.view(rows, -1).to(torch.int32)


def test_rows_hold_what_decode_sees():
    histories = Histories(HistoryBound(4, "value_key_norm"), table_of(3, 12), SEGMENT, Given())
    assert histories.advance(1, 3) is None
    for sealed in range(4, 9):
        histories.refresh()
        # Decode has the scores by now: none is asked for in the step itself.
        held = histories.get(1)
        assert held is None or not held.unscored(sealed)
        histories.advance(1, sealed)
    histories.refresh()
    # Later slots have lower scores here: what has just stopped being one of the two latest leaves.
    assert histories.get(1).in_view == [0, 1, 6, 7]
    assert histories.table.tolist() == [[0, 1, 2, 3], [0, 1, 6, 7], [0, 1, 2, 3]]
    assert histories.dropped == 4
    histories.forget(1)
    histories.refresh()
    assert histories.get(1) is None
    assert histories.table[1].tolist() == [0, 1, 2, 3]


def test_chunks_see_the_same_as_decode():
    whole = Histories(HistoryBound(4, "value_key_norm"), table_of(2, 12), SEGMENT, Given())
    found = {}
    for start in range(0, 10 * SEGMENT + 5, 2 * SEGMENT):
        length = min(2 * SEGMENT, 10 * SEGMENT + 5 - start)
        seen = whole.seen([1], [start], [length])
        for number in range(start // SEGMENT, -(-(start + length) // SEGMENT)):
            found[number] = seen(0, number) if seen else None
    stepwise = Histories(HistoryBound(4, "value_key_norm"), table_of(2, 12), SEGMENT, Given())
    for number, seen in found.items():
        history = stepwise.advance(1, number)
        assert seen == (tuple(history.in_view) if history and history.left else None)


@dataclass
class Life:
    """A request as `HistoryBound.growth` knows it: segments of the tree's and of its own, tokens still to come."""

    prefix: int
    prompt: int
    new: int
    done: int = 0
    shared: int = 0
    own: int = 0
    in_view: list[int] = field(default_factory=list)
    window: int | None = None
    interval: int = 1
    freed: int = 0
    held: set[int] = field(default_factory=set)

    def slide(self, done: int, interval: int) -> None:
        """SGLang frees what windows have left, whole segments of it, once it is so much; then left segments go back."""
        if self.window is not None and done - self.window >= self.freed + interval:
            whole = -(-max(self.window, SEGMENT) // SEGMENT) * SEGMENT
            self.freed = max(self.freed, (done - whole) // SEGMENT * SEGMENT)

    def give_back(self) -> None:
        behind = {number for number in self.held if self.window is None or (number + 1) * SEGMENT <= self.freed}
        self.held -= behind
        self.own -= len(behind)

    @property
    def extend(self) -> int:
        return max(self.prompt - self.done, 0)

    def growth(self, bound: HistoryBound) -> int:
        coming = self.new if self.extend else self.prompt + self.new - self.done
        return bound.growth(self.shared, self.own, self.extend, coming, SEGMENT)


@examples(300)
@given(
    limit=st.integers(3, 8),
    prefix=st.integers(0, 5),
    prompt=st.integers(1, 500),
    new=st.integers(1, 250),
    window=st.none() | st.integers(1, 120),
    interval=st.integers(1, 60),
    data=st.data(),
)
def test_nobody_comes_to_hold_more_than_is_said(limit, prefix, prompt, new, window, interval, data):
    """Whatever leaves, from any moment of a request's life on: so what is admitted by `growth` fits to the end."""
    lag = 0 if window is None else window_pages(window, interval, SEGMENT) - 1
    bound = HistoryBound(limit, "value_key_norm", lag)
    life = Life(min(prefix, (prompt - 1) // SEGMENT, limit), prompt, new, window=window, interval=interval)
    life.shared, life.done, life.in_view = life.prefix, life.prefix * SEGMENT, list(range(life.prefix))
    most: list[int] = []
    while life.done < life.prompt + life.new:
        most.append(life.shared + life.own + -(-life.growth(bound) // SEGMENT))
        prefilling = life.extend > 0
        step = min(bound.latest * SEGMENT, life.extend) if prefilling else 1
        for number in range(-(-life.done // SEGMENT), -(-(life.done + step) // SEGMENT)):
            # In prefill pages are allocated first; in decode what leaves goes back before the next page is taken.
            if not prefilling:
                _leave(life, number, bound, data)
                life.give_back()
            life.own += 1
            assert life.shared + life.own <= min(most)
        if not prefilling:
            # With overlap scheduling SGLang knows of a token one step late.
            life.slide(life.done - 1, life.interval)
        life.done += step
        if prefilling:
            handed = max(min(life.done // SEGMENT, limit) - life.shared, 0)
            life.shared += handed
            life.own -= handed
            life.slide(life.done - 1, 1)
            _leave(life, life.done // SEGMENT, bound, data)
            life.give_back()


def _leave(life: Life, sealed: int, bound: HistoryBound, data: st.DataObject) -> None:
    """Let the request have `sealed` segments; those of its own that leave can go back."""
    for number in range(life.in_view[-1] + 1 if life.in_view else 0, sealed):
        life.in_view.append(number)
        if len(life.in_view) > bound.limit:
            leaving = data.draw(st.sampled_from(life.in_view[1 : -bound.latest]))
            life.in_view.remove(leaving)
            if leaving >= life.shared:
                life.held.add(leaving)
