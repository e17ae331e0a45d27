"""Measured stages: returns of conversations, by the tier that they are on."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.client import ServerClient
from benchmarks.harness.pools import Started
from benchmarks.multi_turn.returning.results import Held
from benchmarks.multi_turn.returning.servers import (
    Place,
    check_bytes,
    drop_page_cache,
    running,
    take_stock,
    wait_until_written,
)
from benchmarks.multi_turn.returning.sizes import Heads, PoolPages, held
from benchmarks.multi_turn.returning.variants import Variant
from benchmarks.multi_turn.returning.visit import DEVICE, DISK, HOST, RECOMPUTED, Visit, visit
from sgl_ragged.features.host_tier.restore_schedule import AUTO

TOKENS = (10, 300)
"""Prompts are drawn from these token ids, which every model has."""

TIERS_STAGE = "tiers"


@dataclass(frozen=True)
class Traffic:
    """Conversations of a first turn of `prompt` and `answer` tokens; a return adds `message` tokens. Text by seed."""

    conversations: int
    prompt: int
    answer: int
    message: int
    returns: int
    seed: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Traffic:
        lengths = options.prompt_length, options.output_length, options.message_length
        return cls(options.conversations, *lengths, options.returns, options.seed)

    def first(self, number: int) -> list[int]:
        return self._tokens(self.prompt, 0, number)

    def message_of(self, turn: int) -> list[int]:
        """A message that no return before has ended with."""
        return self._tokens(self.message, 1, turn)

    def _tokens(self, count: int, *stream: int) -> list[int]:
        return np.random.default_rng([self.seed, *stream]).integers(*TOKENS, count).tolist()

    def pages_each(self, page: int) -> int:
        """Pages that caches hold of a conversation when it comes back."""
        return held(self.prompt + self.answer, page) // page


class Stages:
    """Runs the servers and the returns.

    Args:
        advance: called before every request, with what is measured.
        disk: whether there is storage below the host.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        traffic: Traffic,
        heads: Heads,
        kv_bytes: int,
        started: Started,
        folder: Path,
        advance: Callable[[str], None],
        *,
        disk: bool,
        on_cpu: bool,
    ) -> None:
        self.variants, self.traffic, self.disk, self.on_cpu = variants, traffic, disk, on_cpu
        self._heads, self._kv_bytes = heads, kv_bytes
        self._started, self._folder, self._advance = started, folder, advance
        self._turn = 0

    def pages(self, variant: Variant) -> PoolPages:
        return PoolPages.of(variant.pool, self._heads, variant.page, self._kv_bytes)

    def tiers(self, host_bytes: int) -> tuple[list[Held], list[Visit]]:
        """Returns from all tiers, with a host that holds everything."""
        t = self.traffic
        storages = {str(v): self._folder / f"storage-{n}" for n, v in enumerate(self.variants) if self.disk}
        places = [Place(str(v), v, self.pages(v), host_bytes, storages.get(str(v))) for v in self.variants]
        alone = [Place(f"{v} without tiers", v, self.pages(v)) for v in self.variants if v.restore == AUTO]
        visits, servers = [], []
        with running(self._started, [*places, *alone], self._folder, on_cpu=self.on_cpu) as clients:
            histories = self._first_turns(places, clients)
            for place in places if self.disk else ():
                wait_until_written(storages[place.name], t.conversations * t.pages_each(place.variant.page))
            for turn in range(t.returns):
                number = turn % t.conversations
                for place in alone:
                    client = clients[place.name]
                    # What was evicted without a tier below is nowhere, as after this.
                    client.flush()
                    history = histories[str(place.variant), number]
                    visits.append(self._visit(client, place.variant, RECOMPUTED, number, history))
                for place in places:
                    for cell in (HOST, DEVICE):
                        history = histories[place.name, number]
                        visits.append(self._visit(clients[place.name], place.variant, cell, number, history))
            servers += [take_stock(clients[one.name], TIERS_STAGE, one) for one in places]
        if self.disk:
            for storage in storages.values():
                drop_page_cache(storage)
            found = self._after_restart(places, histories)
            servers, visits = servers + found[0], visits + found[1]
        check_bytes(servers)
        return servers, visits

    def _after_restart(
        self, places: Sequence[Place], histories: dict[tuple[str, int], list[int]]
    ) -> tuple[list[Held], list[Visit]]:
        """Returns from storage, once a conversation: it is on the host afterwards."""
        t, visits = self.traffic, []
        with running(self._started, places, self._folder, on_cpu=self.on_cpu) as clients:
            # What is done only once, and the first measurements of how fast restoring is.
            self._warm_up(places, clients)
            for turn in range(min(t.returns, t.conversations)):
                for place in places:
                    history = histories[place.name, turn]
                    visits.append(self._visit(clients[place.name], place.variant, DISK, turn, history))
            servers = [take_stock(clients[one.name], DISK, one) for one in places]
        return servers, visits

    def steps(self) -> int:
        """Count the requests of `tiers`."""
        t, all_of_them = self.traffic, len(self.variants)
        autos = sum(one.restore == AUTO for one in self.variants)
        disk = (1 + min(t.returns, t.conversations)) * all_of_them if self.disk else 0
        return t.conversations * all_of_them + t.returns * (autos + 2 * all_of_them) + disk

    def _first_turns(
        self, places: Sequence[Place], clients: dict[str, ServerClient]
    ) -> dict[tuple[str, int], list[int]]:
        """Histories by server and conversation: its first message and what the server has answered."""
        histories = {}
        for number in range(self.traffic.conversations):
            for place in places:
                self._advance(f"{place.name}, conversation {number + 1} begins")
                prompt = self.traffic.first(number)
                answer = clients[place.name].generate(prompt, self.traffic.answer, ignore_eos=True)
                histories[place.name, number] = prompt + list(answer["output_ids"])
        return histories

    def _warm_up(self, places: Sequence[Place], clients: dict[str, ServerClient]) -> None:
        for place in places:
            self._advance(f"{place.name} after its restart")
            text = self.traffic.first(self.traffic.conversations)[: 2 * place.variant.page]
            clients[place.name].generate(text, 1, ignore_eos=True)

    def _visit(self, client: ServerClient, variant: Variant, cell: str, number: int, history: list[int]) -> Visit:
        self._advance(f"{variant}, {cell}")
        self._turn += 1
        prompt = history + self.traffic.message_of(self._turn)
        # A return right behind another one finds the keys of the answer's last token, too, which that one computed.
        known = len(history) + (cell == DEVICE)
        return visit(client, str(variant), cell, number, prompt, held(known, variant.page))
