"""SGLang's KV pools and their write location, imported here alone: SGLang is about to move them to other modules."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

__all__ = ["KVWriteLoc", "MHATokenToKVPool", "SWAKVPool"]
