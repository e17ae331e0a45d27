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
    """Settings of a worker of either server. mode: PREFILL or DECODE."""

    mode: str

    def describe(self, sizes: PoolSizes) -> str:
        parts = [f"{one['pages'] / one['token_pool']:.2f} at {tokens}" for tokens, one in sent_bytes(sizes).items()]
        return f"{self.mode} server, share of the token pool's bytes that is sent, by tokens: {', '.join(parts)}"


def agreement(plan_digest: str, stored_as: str, page_bytes: Sequence[int], open_page_tokens: int) -> str:
    """Return a digest of all settings that decide what the bytes of a page mean.

    Servers with equal digests can exchange pages. The digest is equal on all ranks, because SGLang sends only that of
    the first rank.

    Args:
        plan_digest: digest of the plan without the settings in which the two servers may differ.
        stored_as: `SlabStore.stored_as` of the rank.
        page_bytes: bytes of a slab on each rank.
        open_page_tokens: tokens of an open segment in one page.
    """
    parts = json.dumps([plan_digest, stored_as, list(page_bytes), open_page_tokens])
    return _PREFIX + hashlib.sha256(parts.encode()).hexdigest()[:15]


def disagreement(own: str, other: str | None, own_ranks: int, other_ranks: int) -> str | None:
    """Return the reason why a decode server must not take pages of a prefill server, in one line; None if it may.

    Args:
        own, other: agreements of the decode and of the prefill server; None for a server with another pool.
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
