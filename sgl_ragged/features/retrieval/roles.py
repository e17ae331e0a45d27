"""Pivots: heads that keep their whole history and watch attention on behalf of satellite heads.

Follows HeteroCache (section 4.1), but pivots are chosen by how well they foresee the attention of other heads, and
watch for heads of later layers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.budgets import GUARD, check_ratio, check_segment
from sgl_ragged.profiles.head_statistics import PIVOT_ORDER, WATCHED
from sgl_ragged.profiles.profile import Profile

ELSEWHERE = -1
"""Head number of a pivot that another rank has."""

_STEPS = 30
"""Halvings of the interval of ratios: far finer than one unit of one head in any model."""


@dataclass(frozen=True)
class HeadRoles:
    """Roles of heads; L layers, H heads.

    pivots: (layer, head) in the order in which calibration chose them, best first; in the roles of a rank, `head` is
        the rank's own number of the head, or ELSEWHERE.
    watched_by: int64 [L, H], index into `pivots` of the pivot that watches for the head; -1 for pivots themselves and
        for heads that no pivot of their layer or an earlier layer foresees.
    """

    pivots: tuple[tuple[int, int], ...]
    watched_by: np.ndarray

    @property
    def satellites(self) -> tuple[tuple[int, ...], ...]:
        """Heads with a pivot, by layer."""
        return tuple(tuple(int(head) for head in (own >= 0).nonzero()[0]) for own in self.watched_by)

    def on_rank(self, heads: np.ndarray) -> HeadRoles:
        """Return the roles on a rank that serves these heads, int64 [L, places]."""
        places = [np.flatnonzero(heads[layer] == head) for layer, head in self.pivots]
        pivots = tuple(
            (layer, int(place[0]) if len(place) else ELSEWHERE)
            for (layer, _), place in zip(self.pivots, places, strict=True)
        )
        return HeadRoles(pivots, np.take_along_axis(self.watched_by, heads, axis=1))


def head_roles(profile: Profile, count: int) -> HeadRoles:
    """Return the first `count` pivots of a profile; each other head gets the pivot that foresees most of its drops.

    Raises:
        RaggedConfigError: the profile has no pivots, or fewer than `count`, or `count` is less than one.
    """
    if PIVOT_ORDER not in profile.statistics or WATCHED not in profile.statistics:
        raise RaggedConfigError(f"the profile of {profile.model_id!r} has no pivots: calibrate again")
    order, watched = profile.statistics[PIVOT_ORDER], profile.statistics[WATCHED]
    known = int((order >= 0).sum())
    if not 1 <= count <= known:
        raise RaggedConfigError(
            f"--ragged-pivots is {count}, and the profile of {profile.model_id!r} names {known}: "
            + (f"ask for 1 to {known}" if known else "calibrate with longer samples")
        )
    places = [np.argwhere(order == number)[0] for number in range(count)]
    pivots = tuple((int(layer), int(head)) for layer, head in places)
    layers = np.arange(order.shape[0])
    reaches = np.array([layer for layer, _ in pivots]) <= layers[:, None]
    useful = np.where(reaches[:, None], watched[..., :count], 0.0)
    watched_by = np.where(useful.max(axis=2) > 0, useful.argmax(axis=2), -1)
    for layer, head in pivots:
        watched_by[layer, head] = -1
    return HeadRoles(pivots, watched_by.astype(np.int64))


def with_pivots(
    kept_of_ratio: Callable[[float], np.ndarray], roles: HeadRoles, ratio: float, segment: int
) -> np.ndarray:
    """Return kept counts: pivots keep everything, the other heads share the rest by the profile.

    The other heads have the budgets of `kept_of_ratio` at the largest ratio whose mean over heads is at most `ratio`.

    Args:
        kept_of_ratio: budgets int64 [num_layers, num_heads] of a ratio, such as `profile_kept` of a profile and this
            segment; no head may lose a token when the ratio grows. Its errors are passed on.
        roles: of the same model.
        ratio: kept / full KV bytes, pivots included, in (0, 1].
        segment: tokens per segment.

    Returns:
        int64 [num_layers, num_heads], tokens per segment.

    Raises:
        RaggedConfigError: pivots and the guards of the other heads alone are more than `ratio`.
    """
    check_ratio(ratio)
    check_segment(segment)
    heads = roles.watched_by.size
    least = (len(roles.pivots) * segment + (heads - len(roles.pivots)) * GUARD) / (heads * segment)
    if ratio < least:
        raise RaggedConfigError(
            f"ratio {ratio} has no room for {len(roles.pivots)} pivots that keep everything: they take a ratio of "
            f"{np.ceil(1000 * least) / 1000:g} or more, or ask for fewer pivots"
        )

    def kept_at(share: float) -> np.ndarray:
        kept = kept_of_ratio(share).astype(np.int64)
        for layer, head in roles.pivots:
            kept[layer, head] = segment
        return kept

    def fits(kept: np.ndarray) -> bool:
        return bool(kept.sum() <= round(ratio * heads * segment, 6))

    low, high = GUARD / segment, 1.0
    best = kept_at(high)
    if fits(best):
        return best
    best = kept_at(low)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        kept = kept_at(middle)
        if fits(kept):
            low, best = middle, kept
        else:
            high = middle
    return best
