"""Agreement of two servers whose pages are exchanged. Plain text and numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

_PREFIX = "ragged-"


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
