"""Compare a server with a reference, and with itself: hits with misses, decode with prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.distributions import Distance, Distributions, distance, mean_distance
from sgl_ragged.verify.prompts import TokenizedPrompt
from sgl_ragged.verify.server import Server, new_namespace

DECODED = 16
"""Tokens that are decoded after each prompt."""


class Reference(Protocol):
    """Predictions to compare with: another server, or what a profile recorded."""

    url: str
    segment: int

    def info(self) -> dict[str, Any]: ...

    def read(self, ids: Sequence[int], start: int = 0) -> Distributions: ...


@dataclass(frozen=True)
class PromptResult:
    """Distances of one prompt.

    tokens: length of the prompt. to_reference: from the reference, from the second segment on, where compression begins
    to show; None without one, or for a prompt of one segment. hit_to_miss: the last positions, with everything before
    them from the cache, against the same without. decode_to_prefill: decoded tokens against a prefill of them.
    """

    name: str
    tokens: int
    to_reference: Distance | None
    hit_to_miss: Distance | None
    decode_to_prefill: Distance


@dataclass(frozen=True)
class Comparison:
    """Results of all prompts, and facts about the servers' caches (`cache_facts`).

    against: name of the reference, or None. weight_updates: of the server since its start; the profile, and with it the
    reference that it recorded, is that of the weights at start.
    """

    url: str
    against: str | None
    prompts: tuple[PromptResult, ...]
    cache: dict[str, Any]
    against_cache: dict[str, Any]
    weight_updates: int = 0

    def mean(self, kind: str) -> Distance | None:
        """Return the mean of one kind of distance, each position counted once; None if no prompt has it."""
        found = [one for prompt in self.prompts if (one := getattr(prompt, kind)) is not None]
        return mean_distance(found) if found else None

    def as_json(self) -> dict[str, Any]:
        """Return everything, and the means under `mean`."""
        means = {kind: self.mean(kind) for kind in KINDS}
        return asdict(self) | {"mean": {kind: None if one is None else asdict(one) for kind, one in means.items()}}


KINDS = ("to_reference", "hit_to_miss", "decode_to_prefill")


def compare(
    server: Server,
    reference: Reference | None,
    prompts: Sequence[TokenizedPrompt],
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Ask for all prompts, one after the other.

    Args:
        report: called with a line before each prompt.

    Raises:
        RaggedConfigError: a server cannot be reached, refuses, or has another vocabulary.
    """
    info, other_info = server.info(), {} if reference is None else reference.info()
    server.replicas = int(info.get("dp_size") or 1)
    segment = int((info.get("ragged") or {}).get("segment", (reference or server).segment))
    results = []
    for number, prompt in enumerate(prompts, start=1):
        report(f"{prompt.name} ({number} of {len(prompts)})")
        results.append(_compare_prompt(server, reference, prompt, segment))
    return Comparison(
        server.url,
        None if reference is None else reference.url,
        tuple(results),
        cache_facts(info),
        cache_facts(other_info),
        _weight_updates(info),
    )


def _compare_prompt(server: Server, reference: Reference | None, prompt: TokenizedPrompt, segment: int) -> PromptResult:
    ids = prompt.ids
    if len(ids) < 2:
        raise RaggedConfigError(f"prompt {prompt.name!r} has fewer than two tokens")
    namespace = new_namespace()
    miss = server.read(ids, 0, namespace)
    to_reference = None
    if reference is not None and len(ids) > segment + 1:
        try:
            to_reference = distance(reference.read(ids, segment), miss)
        except ValueError as error:
            raise RaggedConfigError(f"{reference.url} is of another model than {server.url}: {error}") from error
    # The last segment border before the prompt's last tokens: a hit ends there at the latest.
    border = (len(ids) - 2) // segment * segment
    hit_to_miss = distance(miss, server.read(ids, border, namespace)) if border else None
    tokens, decoded = server.go_on(ids, DECODED, namespace)
    prefilled = server.read([*ids, *tokens], len(ids) - 1)
    return PromptResult(prompt.name, len(ids), to_reference, hit_to_miss, distance(prefilled, decoded))


def _weight_updates(info: dict[str, Any]) -> int:
    states = info.get("internal_states") or []
    return max((int((state.get("ragged") or {}).get("weight_updates", 0)) for state in states), default=0)


def cache_facts(info: dict[str, Any]) -> dict[str, Any]:
    """Return what /server_info says of a cache: its tokens, kept share of the bytes, and checks; empty if nothing."""
    if not info:
        return {}
    ragged = info.get("ragged") or {}
    facts = {"tokens": info.get("max_total_num_tokens"), "dtype": info.get("kv_cache_dtype")}
    names = ("ratio", "kept_bytes_ratio", "slab_dtype", "fitted", "scorer", "profile_source", "self_check")
    return facts | {name: ragged[name] for name in names if name in ragged}
