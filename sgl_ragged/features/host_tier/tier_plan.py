"""Settings of a tier under the device. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.plan import FeatureSettings

TIER_FORMAT = 1
"""Version of the format of rows in the host tier."""

CODEC_NAMES = ("exact", "fp8", "shared")
"""Values of --ragged-host-codec. The classes are in `host_tier.codecs`, which needs torch."""

STORAGE_BACKENDS = ("file",)
"""Storage backends of SGLang that were tested and whose keys name the model."""


@dataclass(frozen=True)
class TierPlan(FeatureSettings):
    """Contents of a tier under the device.

    codec: format of slabs in the tier, one of CODEC_NAMES.
    served: digest of everything except rank and dtype that decides the slabs of given tokens: weights, settings of the
        model, and the digest of the plan.
    sized: True if the user gave the size of the host's part.
    restore: what is loaded and what is computed again, one of `host_tier.restore_schedule.MODES`.
    """

    codec: str
    served: str
    sized: bool
    restore: str

    def rank_identity(self, rank: int, stored_as: str) -> str:
        """Return an identity of 16 hex digits; rows with equal identities and tokens are equal.

        With a lossy codec they are equal up to its errors, because tokens after a restored prefix attend to the
        restored values.

        Args:
            stored_as: `SlabStore.stored_as` of the rank.
        """
        state = json.dumps([TIER_FORMAT, self.codec, self.served, rank, stored_as])
        return hashlib.sha256(state.encode()).hexdigest()[:16]


def refuse_storage(backend: str | None) -> None:
    """Raise RaggedConfigError for a storage backend that is not served."""
    if backend is not None and backend not in STORAGE_BACKENDS:
        raise RaggedConfigError(
            f"--hicache-storage-backend {backend} has not been tested with --kv-pool ragged, or its keys do not name "
            f"the model, so that it could give slabs of another ratio or profile; use {' or '.join(STORAGE_BACKENDS)}"
        )
