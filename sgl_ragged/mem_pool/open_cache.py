"""Cache of open segments of ended requests, for requests that continue their tokens. Without SGLang.

An open segment is uncompressed, so keys and values in it are functions of the tokens before them, and any of its
beginnings is of use. Entries belong to the sealed prefix that they follow; a lookup finds the one that
shares most tokens with the request. The least recently used entries are evicted first.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

LEAST_TOKENS = 16
"""Tokens that are worth copying pages for instead of computing them, where sequences begin alike by chance or a prompt
may never be asked again. A conversation that has ended behind a border is found to its last token."""

MOST_BRANCHES = 32
"""Most entries per prefix, since a lookup compares each of them."""

Key = tuple[int, Hashable, bytes]


@dataclass(eq=False)
class Entry:
    """tokens: int64 [count] after the prefix. pages: int64 [n] that hold them and belong to the entry."""

    key: Key
    tokens: np.ndarray
    pages: torch.Tensor
    used: int = field(default=0)


class OpenCache:
    """Cache of open segments; all data but the contents of pages is on the host.

    `num_pages`: of all entries. `reused_tokens`: found and used since the start.
    """

    def __init__(self) -> None:
        self.reused_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything: all pages are free."""
        self._entries: dict[Key, list[Entry]] = {}
        self._lengths: dict[tuple[int, Hashable], int] = {}
        self._clock = itertools.count(1)
        self.num_pages = 0

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @staticmethod
    def least(prefix: int) -> int:
        """Return the fewest tokens that are worth a lookup after a prefix of `prefix` sealed tokens."""
        return 1 if prefix else LEAST_TOKENS

    def find(self, prefix: int, name: Hashable, tokens: array, end: int) -> tuple[Entry, int] | None:
        """Return the entry that continues a sequence longest, and for how many tokens; None if too few.

        Args:
            prefix: tokens that are sealed. name: which sequences may share.
            tokens: of the sequence. end: how many of these may be found.
        """
        if end - prefix < self.least(prefix) or (prefix, name) not in self._lengths:
            return None
        found = self._longest(_key(prefix, name, tokens), np.array(tokens[prefix:end], np.int64))
        if found is None or found[1] < self.least(prefix):
            return None
        self.touch(found[0])
        return found

    def holds(self, key: Key, tokens: np.ndarray) -> bool:
        """Return True if an entry of this key begins with these tokens; marks it as used."""
        found = self._longest(key, tokens)
        if found is None or found[1] < len(tokens):
            return False
        self.touch(found[0])
        return True

    def _longest(self, key: Key, tokens: np.ndarray) -> tuple[Entry, int] | None:
        """Return the entry of a key that shares most leading tokens, and their number."""
        common = [(entry, _common(entry.tokens, tokens)) for entry in self._entries.get(key, ())]
        return max(common, key=lambda one: one[1], default=None)

    def touch(self, entry: Entry) -> None:
        entry.used = next(self._clock)

    def has(self, prefix: int, name: Hashable, tokens: array, end: int) -> bool:
        """Return True if an entry holds all tokens from `prefix` to `end`."""
        found = self.find(prefix, name, tokens, end)
        return found is not None and found[1] == end - prefix

    def add(self, prefix: int, name: Hashable, tokens: array, end: int, pages: torch.Tensor) -> list[Entry]:
        """Add an entry for tokens `prefix` to `end` in `pages`. Returns the entries that are dropped for it."""
        return self.put(_key(prefix, name, tokens), np.array(tokens[prefix:end], np.int64), pages)

    def put(self, key: Key, tokens: np.ndarray, pages: torch.Tensor, spared: Collection[Entry] = ()) -> list[Entry]:
        """Add an entry of another cache in other pages, as `add` does, without dropping those in `spared`."""
        entry = Entry(key, tokens, pages)
        self.touch(entry)
        others = self._entries.setdefault(key, [])
        others.append(entry)
        self._lengths[key[:2]] = self._lengths.get(key[:2], 0) + 1
        self.num_pages += len(pages)
        others = [one for one in others if one not in spared]
        covered = [one for one in others if one is not entry and _common(one.tokens, entry.tokens) == len(one.tokens)]
        rest = [one for one in others if one not in covered]
        oldest = sorted(rest, key=lambda one: one.used)[: max(len(rest) - MOST_BRANCHES, 0)]
        for one in (*covered, *oldest):
            self.remove(one)
        return [*covered, *oldest]

    def remove(self, entry: Entry) -> None:
        """Drop an entry; the caller owns its pages."""
        others = self._entries[entry.key]
        others.remove(entry)
        if not others:
            del self._entries[entry.key]
        length = entry.key[:2]
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        self.num_pages -= len(entry.pages)

    def oldest(self, pages: int, spared: Collection[Entry] = ()) -> list[Entry]:
        """Return the least recently used entries with `count` pages in all, or fewer; none of those in `spared`."""
        every = sorted((one for own in self._entries.values() for one in own), key=lambda one: one.used)
        found: list[Entry] = []
        for entry in every:
            if pages <= 0:
                break
            if entry not in spared:
                found.append(entry)
                pages -= len(entry.pages)
        return found


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of leading tokens that both share."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _key(prefix: int, name: Hashable, tokens: array) -> Key:
    return prefix, name, hashlib.blake2b(memoryview(tokens)[:prefix], digest_size=16).digest()
