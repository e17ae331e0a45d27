"""The plan: what the launcher decides once for all ranks, and all that workers know of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import PoolSizes, SidePages
from sgl_ragged.mem_pool.slab_format import CODES_VERSION, WIDE, SlabFormat
from sgl_ragged.profiles.budgets import GUARD, check_budgets, uniform_kept
from sgl_ragged.profiles.codebook import CODEBOOK, FIT_VERSION, QUERIES, ROPE
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import Profile, load_profile, profile_kept
from sgl_ragged.profiles.profile_choice import ReadableProfile, Uniform
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import scorer_statistics


class FeatureSettings:
    """Settings that the launcher hands to a feature's half in the workers. Every method has a default of no cost."""

    @property
    def state(self) -> tuple[Any, ...]:
        """Numbers, names and arrays that decide what workers compute, for the plan's digest."""
        return ()

    def row_bytes(self, rank: Rank) -> int:
        """Device bytes per request row."""
        return 0

    def page_bytes(self, rank: Rank) -> int:
        """Device bytes per page of another cache, whose tokens have the same locations as those of slabs."""
        return 0

    def side_pages(self, rank: Rank, prefill: Prefill) -> SidePages | None:
        """Pages of a second pool; at most one feature of a plan needs them."""
        return None

    def describe(self, sizes: PoolSizes) -> str | None:
        """One start-up line, or None."""
        return None


@dataclass(frozen=True)
class Joined:
    """A feature's entry in a plan. name: the feature's. settings: what its workers follow."""

    name: str
    settings: FeatureSettings


@dataclass(frozen=True, eq=False)
class ServingPlan:
    """Decisions of the launcher, pickled for the workers, which open no file themselves.

    geometry: the model as its checkpoint has it. ranks: tensor-parallel ranks.
    ratio, segment: the flags. form: format of slabs. scorer: its name. profile: "uniform" or a path, for
        operators.
    kernel: which operations serve, as `attention.kernel_choice.choose_kernel` names them.
    kept: int64 [layers, heads], tokens of each segment that the model's heads keep. source: where they are from, for
        the log.
    statistics: per layer, the scorer's float32 tensors [heads, ...] by name, [1, ...] those in `shared`.
    shared: names of statistics that all heads of a layer share.
    fairkv: how heads are placed. placement: where; None for SGLang's own order.
    unfitted: why kept keys and values stay as they are; None where they are fitted, by CODEBOOK among `statistics`.
    features: what joins, in the order in which it does.
    stages: [first, end) layers of each pipeline stage; empty if there is one.
    """

    geometry: ModelGeometry
    ranks: int
    ratio: float
    segment: int
    scorer: str
    profile: str
    kernel: str
    kept: np.ndarray
    source: str
    statistics: tuple[Mapping[str, np.ndarray], ...]
    shared: tuple[str, ...] = ()
    fairkv: str = "none"
    placement: Placement | None = None
    form: SlabFormat = WIDE
    unfitted: str | None = "it was not asked for"
    features: tuple[Joined, ...] = ()
    stages: tuple[tuple[int, int], ...] = ()

    def settings_of(self, feature: str) -> Any:
        """Return the settings of a feature by its name; None if it has not joined."""
        return next((one.settings for one in self.features if one.name == feature), None)

    @property
    def fit(self) -> str:
        """A line for the log about fitting."""
        if self.unfitted is not None:
            return f"kept keys and values stay as they are: {self.unfitted}"
        return f"kept keys and values are fitted to {self.statistics[0][QUERIES].shape[1]} queries per head"

    @functools.cached_property
    def digest(self) -> str:
        """15 hex digits: workers with equal digests have equal layouts, placements, scores and views."""
        settings: list[Any] = [
            self.geometry.fingerprint,
            self.ranks,
            self.segment,
            self.scorer,
            self.kernel,
            self.fairkv,
        ]
        if self.form.quantised:
            settings += [self.form.name, CODES_VERSION]
        if self.unfitted is None:
            settings.append(FIT_VERSION)
        if self.stages:
            settings.append(self.stages)
        arrays = [item for tensors in self.statistics for item in sorted(tensors.items())]
        if self.placement is not None:
            arrays += [("heads", self.placement.heads), ("kept", self.placement.kept)]
        for one in self.features:
            settings.append(one.name)
            settings += [part for part in one.settings.state if not isinstance(part, np.ndarray)]
            arrays += [(one.name, part) for part in one.settings.state if isinstance(part, np.ndarray)]
        state = hashlib.sha256(json.dumps([*settings, self.kept.tolist()]).encode())
        for name, array in arrays:
            state.update(json.dumps([name, array.shape]).encode())
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()[:15]

    @property
    def q_per_kv(self) -> int:
        """Query heads of a rank per head: with more ranks than heads, the ranks of a head share its query heads."""
        return self.geometry.q_per_kv // max(self.ranks // self.geometry.num_heads, 1)

    def heads(self, rank: int) -> np.ndarray:
        """int64 [layers, heads of the rank]: the model's heads that a rank serves, in its order.

        Those of the placement, else a contiguous share, as SGLang divides them; with more ranks than heads, one.
        """
        if self.placement is not None:
            return self.placement.heads[:, rank]
        heads = self.geometry.num_heads
        first, count = rank * heads // self.ranks, max(heads // self.ranks, 1)
        return np.tile(np.arange(first, first + count), (self.geometry.num_layers, 1))

    def layout(self, rank: int) -> SlabLayout:
        """Return the slab layout of a rank."""
        kept = np.take_along_axis(self.kept, self.heads(rank), axis=1)
        if self.placement is None or not self.placement.splits_heads:
            return SlabLayout(kept=kept, head_dim=self.geometry.head_dim, segment=self.segment, form=self.form)
        return SlabLayout(
            self.placement.kept[:, rank],
            self.geometry.head_dim,
            self.segment,
            total=kept,
            first=self.placement.first[:, rank],
            full_heads=self.geometry.num_heads // self.ranks,
            form=self.form,
        )

    @property
    def layouts(self) -> list[SlabLayout]:
        """Slab layouts of all ranks, with the layers of all stages."""
        return [self.layout(rank) for rank in range(self.ranks)]

    def stage(self, number: int) -> ServingPlan:
        """Return the plan with the layers of one pipeline stage. Digest and log lines are those of the whole plan."""
        if not self.stages:
            return self
        first, end = self.stages[number]
        return dataclasses.replace(
            self,
            geometry=dataclasses.replace(self.geometry, num_layers=end - first, first_layer=first),
            kept=self.kept[first:end],
            statistics=self.statistics[first:end],
            placement=None if self.placement is None else self.placement.of_layers(first, end),
            stages=(),
        )

    @property
    def slab_layouts(self) -> list[SlabLayout]:
        """Slab layouts of all ranks of all stages."""
        return [layout for number in range(max(len(self.stages), 1)) for layout in self.stage(number).layouts]

    def stage_slab_bytes(self, itemsize: int) -> list[int]:
        """Return the largest slab of each stage in bytes. The largest stage decides the number of pages of all.

        Args:
            itemsize: bytes per element of the cache.
        """
        stages = [self.stage(number) for number in range(max(len(self.stages), 1))]
        return [max(layout.slab_bytes(itemsize) for layout in stage.layouts) for stage in stages]

    def describe_stages(self, itemsize: int) -> str:
        """Return the start-up line about pipeline stages; itemsize as in `stage_slab_bytes`."""
        slabs, layers = self.stage_slab_bytes(itemsize), [end - first for first, end in self.stages]
        return (
            f"{len(slabs)} pipeline stages with {'/'.join(map(str, layers))} layers, slabs of "
            f"{'/'.join(map(str, slabs))} bytes (largest / mean {max(slabs) * len(slabs) / sum(slabs):.3f})"
        )

    def rank_statistics(self, rank: int) -> list[dict[str, np.ndarray]]:
        """Return the scorer's tensors per layer, [heads of the rank, ...]; [1, ...] for those that heads share."""
        heads = self.heads(rank)
        return [
            {name: array if name in self.shared else array[heads[layer]] for name, array in tensors.items()}
            for layer, tensors in enumerate(self.statistics)
        ]


@dataclass(frozen=True)
class Rank:
    """One rank's share of a plan.

    number: the rank. itemsize, query_itemsize: bytes per element of the cache, and of queries that are kept.
    """

    plan: ServingPlan
    number: int
    itemsize: int
    query_itemsize: int


@dataclass(frozen=True)
class Prefill:
    """chunk: most tokens of a chunk. schedule: SGLang's settings of that name, or an object with their attributes."""

    chunk: int
    schedule: Any


WARM_UP = "sgl_ragged_check"
"""Name of the check of answers among SGLang's custom warm-ups."""


@dataclass(frozen=True)
class StartCheck:
    """A check of answers before a server is healthy.

    profile: file with the reference. strict: end the start beyond the limits, instead of a warning. required: end it
    also where nothing was compared. seconds: longest time that it may take; fewer texts are asked for, or none, where
    they would take longer.
    """

    profile: Path
    strict: bool
    required: bool
    seconds: float


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that the launcher hands to its workers, pickled with SGLang's ServerArgs.

    plan: None with SGLang's own pool. kv_bytes: bytes per rank, or None. from_command_line: False for `Engine`.
    observer: a `serve.backend.Observer`, or None. scorer_weights: the flag's path. check: of
    answers at the start, or why there is none; None with SGLang's own pool.
    """

    plan: ServingPlan | None = field(compare=False)
    kv_bytes: int | None = None
    from_command_line: bool = False
    observer: Any = None
    scorer_weights: str | None = None
    check: StartCheck | str | None = None

    @property
    def served_plan(self) -> ServingPlan:
        """The plan of a server with --kv-pool ragged."""
        assert self.plan is not None, "hooks that need a plan are installed with one"
        return self.plan


BACKEND = "ragged"
"""Name of the attention backend in SGLang's registry."""

ATTRIBUTE = "_sgl_ragged"
"""Attribute of SGLang's ServerArgs: `launch.options.RaggedOptions` until the launcher has decided, then
`WorkerSettings`."""


@dataclass(frozen=True)
class BudgetChoice:
    """Kept tokens per segment of the whole model, int64 [layers, heads], and where they come from.

    `profile` is None for equal budgets; `source` is one line for the log.
    """

    kept: np.ndarray
    profile: Profile | None
    source: str


def choose_budgets(
    geometry: ModelGeometry, *, profile: ReadableProfile, scorer: str, ratio: float, segment: int
) -> BudgetChoice:
    """Make budgets of a profile, or equal ones.

    Args:
        ratio: share of the tokens that heads keep on average.

    Raises:
        RaggedConfigError: the file is damaged, made for another model or scorer, or does not serve this ratio.
    """
    if isinstance(profile, Uniform):
        kept = uniform_kept(geometry.num_layers, geometry.num_heads, ratio, segment)
        if ratio == 1:
            return BudgetChoice(kept=kept, profile=None, source="every token is kept: heads need no budgets")
        return BudgetChoice(
            kept=kept,
            profile=None,
            source=f"{profile.why}: every head keeps the same share, {ratio:.3g} of its tokens. Heads differ in what "
            f"they need; a calibrated profile moves the same bytes to the heads that use them (--ragged-profile auto)",
        )
    loaded = load_profile(profile.path)
    loaded.require_model(geometry)
    if loaded.scorer != scorer:
        raise RaggedConfigError(
            f"the profile was calibrated with scorer {loaded.scorer!r}, --ragged-scorer is {scorer!r}: use the same"
        )
    measured = f"{loaded.method}, calibrated at ratio {loaded.ratio} and segment {loaded.segment}"
    return BudgetChoice(
        kept=profile_kept(loaded, ratio, segment),
        profile=loaded,
        source=f"budgets from {profile.kind} {profile.path} ({loaded.model_id}, {measured}, digest {loaded.digest()})",
    )


def make_plan(
    geometry: ModelGeometry,
    chosen: BudgetChoice,
    *,
    ranks: int,
    ratio: float,
    segment: int,
    scorer: str,
    scorer_weights: str | None,
    profile: str,
    kernel: str,
    form: SlabFormat = WIDE,
    unfitted: str | None = None,
    stages: tuple[tuple[int, int], ...] = (),
    with_statistics: bool = True,
) -> ServingPlan:
    """Read the files that are named; heads are not placed yet, and no feature has joined.

    Args:
        ratio: kept / full KV bytes.
        unfitted: why nothing is to be fitted, whatever the profile has.
        stages: as in ServingPlan.
        with_statistics: False for a plan of sizes alone, while the profile with the scorer's tensors is missing.

    Raises:
        RaggedConfigError: as `scorers.statistics.scorer_statistics` does.
    """
    statistics = []
    if with_statistics:
        statistics = scorer_statistics(
            get_scorer(scorer),
            chosen.profile,
            scorer_weights,
            geometry.num_layers,
            geometry.num_heads,
            {"head_dim": geometry.head_dim, "q_per_kv": geometry.q_per_kv},
        )
    shared = tuple(get_scorer(scorer).shared_statistics)
    of_layers = [{name: tensor.numpy() for name, tensor in layer.items()} for layer in statistics]
    if unfitted is None:
        unfitted = why_unfitted(chosen, segment)
    if unfitted is None:
        assert chosen.profile is not None, "or there would be a reason"
        of_codebook = {name: chosen.profile.statistics[name] for name in (*CODEBOOK, *ROPE)}
        of_layers = [
            own | {name: array[layer] for name, array in of_codebook.items()} for layer, own in enumerate(of_layers)
        ]
        shared = tuple(dict.fromkeys((*shared, *ROPE)))
    return ServingPlan(
        geometry=geometry,
        ranks=ranks,
        ratio=ratio,
        segment=segment,
        scorer=scorer,
        profile=profile,
        kernel=kernel,
        kept=chosen.kept,
        source=chosen.source,
        statistics=tuple(of_layers),
        shared=shared,
        unfitted=unfitted,
        form=form,
        stages=stages,
    )


def kept_share(geometry: ModelGeometry, ratio: float, segment: int, form: SlabFormat, itemsize: int) -> float:
    """Return the share of the tokens that heads keep on average for a ratio of bytes.

    Raises:
        RaggedConfigError: the guards alone take more, or the format cannot hold heads of this dimension.
    """
    form.check_head_dim(geometry.head_dim)
    check_budgets(ratio, segment, form.byte_share(GUARD, geometry.head_dim, itemsize))
    return form.token_share(ratio, geometry.head_dim, itemsize, segment)


def why_unfitted(chosen: BudgetChoice, segment: int) -> str | None:
    """Return why kept keys and values cannot be fitted with these budgets, or None."""
    if (chosen.kept == segment).all():
        return "every token is kept"
    if chosen.profile is None:
        return "fitting needs a calibrated profile"
    if not set(CODEBOOK) <= set(chosen.profile.statistics):
        return (
            "the profile has no codebook; python -m calib run makes one where all layers share a rotary embedding, and "
            "with it the same bytes lose less than half (docs/fitting.md)"
        )
    return None


def refuse_ranks(geometry: ModelGeometry, ranks: int, scorer: str) -> None:
    """Raise RaggedConfigError for a number of ranks that cannot share the model's heads evenly."""
    heads, queries = geometry.num_heads, geometry.num_heads * geometry.q_per_kv
    if heads % ranks and (ranks % heads or queries % ranks):
        raise RaggedConfigError(
            f"--tp {ranks} does not divide {heads} KV heads, nor is it a multiple of them that divides {queries} query "
            f"heads; use another number of ranks"
        )
    if ranks > heads and get_scorer(scorer).queries:
        raise RaggedConfigError(
            f"scorer {scorer!r} looks at the queries of a head, and with --tp {ranks} a rank has only some of "
            f"those of {heads} heads; use at most {heads} ranks, or another --ragged-scorer"
        )
