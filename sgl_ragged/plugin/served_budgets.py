"""What the launcher reads from profile and weights files, once, for all workers."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sgl_ragged.choice import choose_budgets
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.plugin.options import RaggedOptions
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import scorer_statistics


@dataclass(frozen=True, eq=False)
class ServedBudgets:
    """The budgets of the whole model and what the scorer needs beside them; pickled along to the workers.

    `kept`: int64 [layers, heads] tokens per segment, before grouping. `source`: one line for the log.
    `statistics`: per layer, the scorer's float32 tensors [heads, ...] by name.
    """

    kept: np.ndarray
    source: str
    statistics: tuple[Mapping[str, np.ndarray], ...]

    @functools.cached_property
    def digest(self) -> str:
        """15 hex digits over all arrays: workers with equal digests lay slabs out and score alike."""
        state = hashlib.sha256(json.dumps(self.kept.tolist()).encode())
        for tensors in self.statistics:
            for name, array in sorted(tensors.items()):
                state.update(json.dumps([name, array.shape]).encode())
                state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()[:15]


def read_budgets(options: RaggedOptions, geometry: ModelGeometry) -> ServedBudgets:
    """Read the files that the options name; refuses as `choose_budgets` and `scorer_statistics` do."""
    chosen = choose_budgets(
        geometry,
        profile=options.profile,
        scorer=options.scorer,
        ratio=options.ratio,
        segment=options.segment,
    )
    statistics = scorer_statistics(
        get_scorer(options.scorer), chosen.profile, options.scorer_weights, geometry.num_layers, geometry.num_heads
    )
    return ServedBudgets(
        kept=chosen.kept,
        source=chosen.source,
        statistics=tuple({name: tensor.numpy() for name, tensor in layer.items()} for layer in statistics),
    )


def require_equal_digests(digest: str, ranks: int, group: torch.distributed.ProcessGroup | None) -> None:
    """Raise RaggedConfigError unless all ranks of the group have this digest; all of them must call."""
    if ranks == 1:
        return
    # 60 bits fit an int64; its negative's smallest value is the largest digest.
    number = int(digest, 16)
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MIN, group=group)
    least, most = int(extremes[0]), -int(extremes[1])
    if least != most:
        raise RaggedConfigError(
            f"ranks have other budgets (digests {least:015x} and {most:015x}): start all of them from one launcher, "
            f"or with the same profile"
        )
