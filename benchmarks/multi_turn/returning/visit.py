"""One return of a conversation, and what the answer says of where its tokens were found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.client import ServerClient

DEVICE, HOST, DISK, RECOMPUTED = "device", "host", "disk", "recomputed"
TIERS = (DEVICE, HOST, DISK, RECOMPUTED)
"""Where a conversation is when it comes back, the nearest first."""


@dataclass(frozen=True)
class Visit:
    """A return. `ttft_s`: seconds from sending to the first token; the rest are tokens.

    `held`: of the prompt, what caches can hold; `device`, `host`, `storage`: where the server found how many.
    """

    variant: str
    cell: str
    conversation: int
    ttft_s: float
    prompt: int
    held: int
    device: int
    host: int
    storage: int

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage

    @property
    def in_place(self) -> bool:
        """Whether the conversation was found where its cell says, whole."""
        wanted = {
            DEVICE: (self.held, 0, 0),
            HOST: (0, self.held, 0),
            DISK: (0, 0, self.held),
            RECOMPUTED: (0, 0, 0),
        }.get(self.cell)
        return wanted is None or (self.device, self.host, self.storage) == wanted


def visit(client: ServerClient, variant: str, cell: str, number: int, prompt: Sequence[int], held: int) -> Visit:
    """Send the prompt of a conversation that comes back. Raises ServerLost, PointFailed."""
    started = time.perf_counter()
    # One token, so that the whole request is the time to it.
    meta = client.generate(prompt, 1, ignore_eos=True)["meta_info"]
    taken = time.perf_counter() - started
    found: dict[str, Any] = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
    return Visit(
        variant=variant,
        cell=cell,
        conversation=number,
        ttft_s=round(taken, 5),
        prompt=len(prompt),
        held=held,
        device=int(found.get("device") or 0),
        host=int(found.get("host") or 0),
        storage=int(found.get("storage") or 0),
    )
