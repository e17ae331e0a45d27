"""The prefill and the decode server: settings of a worker of either, and the agreement that both must share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ragged.features.disaggregation.meter import sent_bytes
from sgl_ragged.launch.plan import FeatureSettings
from sgl_ragged.mem_pool.sizing import PoolSizes

NAME = "disaggregation"
"""Name of the feature, and of what it attaches to the pool."""

PREFILL, DECODE = "prefill", "decode"
"""SGLang's names of the two servers."""

_PREFIX = "ragged-"
"""Start of every agreement, which tells it from the layout names of SGLang's own pools."""


@dataclass(frozen=True)
class ServerRole(FeatureSettings):
    """mode: PREFILL or DECODE."""

    mode: str

    def describe(self, sizes: PoolSizes) -> str:
        parts = [f"{one['pages'] / one['token_pool']:.2f} at {tokens}" for tokens, one in sent_bytes(sizes).items()]
        return f"{self.mode} server, share of the token pool's bytes that is sent, by tokens: {', '.join(parts)}"


def agreement(plan_digest: str, stored_as: str, page_bytes: Sequence[int], open_page_tokens: int) -> str:
    """Return one word for all that decides what the bytes of a page mean; servers with equal words can exchange pages.

    The same on all ranks: SGLang hands on what the first one says.

    Args:
        plan_digest: of the plan without what the two may have each for itself.
        stored_as: as `SlabStore.stored_as`.
        page_bytes: of the slabs of all ranks. open_page_tokens: of an open segment, in a page.
    """
    parts = json.dumps([plan_digest, stored_as, list(page_bytes), open_page_tokens])
    return _PREFIX + hashlib.sha256(parts.encode()).hexdigest()[:15]


def disagreement(own: str, other: str | None, own_ranks: int, other_ranks: int) -> str | None:
    """Return one line why a decode server must not take pages of a prefill server; None if it may.

    Args:
        own, other: agreements of the decode and the prefill server; None for one with another pool.
        own_ranks, other_ranks: tensor-parallel ranks of the two.
    """
    if other is None or not other.startswith(_PREFIX):
        return "the prefill server has another KV pool: start it with --kv-pool ragged, and the same flags as this one"
    if own_ranks != other_ranks:
        return (
            f"the prefill server has {other_ranks} tensor-parallel ranks and this one {own_ranks}, and pages hold the "
            f"heads of a rank: start both with the same --tp"
        )
    if own != other:
        return (
            f"the prefill server has another plan ({other}) than this one ({own}): start both with the same model, "
            f"--dtype, --kv-cache-dtype, --ragged-* flags and profile"
        )
    return None
