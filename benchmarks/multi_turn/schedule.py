"""Everything that a command will send and measure, computed before anything is started."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.pools import Pool
from benchmarks.multi_turn.point import Key
from benchmarks.multi_turn.shapes import Load, Request, longest, workload
from benchmarks.multi_turn.writers import Writer

WARM_UP_SEED = 2**31


@dataclass(frozen=True)
class Schedule:
    """Workloads by number of clients, and the points in the order in which they are measured.

    `warm_up`: the first messages of other conversations. What a server does only once is done after them.
    """

    requests: dict[int, tuple[Request, ...]]
    warm_up: dict[int, tuple[Request, ...]]
    keys: tuple[tuple[Pool, Key], ...]

    @classmethod
    def of(cls, options: argparse.Namespace, pools: Sequence[Pool], writer: Writer) -> Schedule:
        """Pools take turns within each repetition. Raises SettingsError when a conversation is too long."""

        def requests(clients: int, seed: int) -> tuple[Request, ...]:
            load = Load(
                shape=options.shape,
                clients=clients,
                rounds=options.rounds,
                request_length=options.request_length,
                output_length=options.output_length,
                shared_length=options.shared_length,
                group=options.group,
                seed=seed,
            )
            return workload(load, writer)

        made = {clients: requests(clients, options.seed) for clients in options.clients}
        others = {clients: requests(clients, WARM_UP_SEED + options.seed) for clients in options.clients}
        for own in made.values():
            _check_context(own, options.output_length, options.model)
        return cls(
            requests=made,
            warm_up={clients: tuple(r for r in own if r.after is None) for clients, own in others.items()},
            keys=tuple(
                (pool, Key(pool.name, clients, repeat))
                for clients in options.clients
                for repeat in range(options.repeats)
                for pool in pools
            ),
        )


def _check_context(requests: tuple[Request, ...], output_length: int, model: str) -> None:
    """Raises SettingsError when the longest prompt with its answer is longer than the model's context."""
    needed = longest(requests, output_length)
    config = Path(model) / "config.json"
    limit = json.loads(config.read_text()).get("max_position_embeddings") if config.is_file() else None
    if limit is not None and needed > limit:
        raise SettingsError(
            f"the longest conversation may take {needed} tokens, but the model's context is {limit}: "
            "fewer --rounds, or a shorter --request-length, --output-length or --shared-length"
        )
