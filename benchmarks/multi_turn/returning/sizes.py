"""Which conversations a device and a host hold, before anything is started. Plain arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.pools import Pool
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import fit_pool
from sgl_ragged.profiles.budgets import uniform_kept

RUNNING = 1
"""Requests that run at once."""


@dataclass(frozen=True)
class Heads:
    """What the KV cache of a model consists of; `itemsize`: bytes of an element."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, model: str, itemsize: int) -> Heads:
        """From the folder's config.json. Raises SettingsError."""
        try:
            config = json.loads((Path(model) / "config.json").read_text())
            heads = config["num_attention_heads"]
            dim = config.get("head_dim") or config["hidden_size"] // heads
            return cls(config["num_hidden_layers"], config.get("num_key_value_heads") or heads, dim, itemsize)
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"--model {model}: its config.json does not say what heads it has ({error})") from None

    @property
    def token_bytes(self) -> int:
        """Of an uncompressed token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class PoolPages:
    """A pool's pages: `device` of them fit the device, a page has `page_bytes` there and on the host."""

    page: int
    page_bytes: int
    device: int

    @classmethod
    def of(cls, pool: Pool, heads: Heads, page: int, kv_bytes: int) -> PoolPages:
        """Raises RaggedConfigError where the bytes do not hold what a request needs."""
        if pool.ratio is None:
            page_bytes = page * heads.token_bytes
            return cls(page, page_bytes, kv_bytes // page_bytes)
        layout = SlabLayout(uniform_kept(heads.layers, heads.kv_heads, pool.ratio, page), heads.head_dim, page)
        open_pages = OpenPages.of(page, layout.slab_bytes(heads.itemsize), heads.token_bytes)
        sizes = fit_pool(layout, heads.itemsize, open_pages, kv_bytes, RUNNING)
        return cls(page, sizes.slab_bytes, sizes.max_total_tokens // page)

    def host(self, host_bytes: int) -> int:
        """Pages of a host tier of so many bytes."""
        return host_bytes // self.page_bytes

    def host_ratio(self, host_bytes: int) -> float:
        """SGLang's --hicache-ratio for them: tokens of the host per token of the device."""
        # SGLang rounds down: half a page more keeps what floats lose from taking a whole one.
        return (self.host(host_bytes) + 0.5) / self.device


def held(tokens: int, page: int) -> int:
    """Of a conversation's tokens, those that a cache holds: whole pages, and the newest token has no keys yet."""
    return (tokens - 1) // page * page


def needed_to_evict(device_pages: int, pages_each: int) -> int:
    """Conversations in turns, such that each has left the device when it comes back.

    The least recently used page goes first. Between two visits of one, the others read or write (n - 1) * pages_each
    pages; once these are as many as the device has, nothing else is left there.
    """
    return -(-device_pages // pages_each) + 1
