"""The two servers, and the settings that a worker of either follows."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_ragged.features.disaggregation.meter import sent_bytes
from sgl_ragged.launch.plan import FeatureSettings
from sgl_ragged.mem_pool.sizing import PoolSizes

NAME = "disaggregation"
"""Name of the feature, and of what it attaches to the pool."""

PREFILL, DECODE = "prefill", "decode"
"""SGLang's names of the two servers."""


@dataclass(frozen=True)
class ServerRole(FeatureSettings):
    """mode: PREFILL or DECODE."""

    mode: str

    def describe(self, sizes: PoolSizes) -> str:
        parts = [f"{one['pages'] / one['token_pool']:.2f} at {tokens}" for tokens, one in sent_bytes(sizes).items()]
        return f"{self.mode} server, share of the token pool's bytes that is sent, by tokens: {', '.join(parts)}"
