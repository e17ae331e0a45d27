"""Ask peers the same texts and questions: methods of kvpress, and schemes that quantise every token.

Runs in an environment of its own (`make peers`), because kvpress needs another release of transformers than SGLang
does. So this file imports nothing of this repository but `quantisers`, which is next to it. It reads an order, JSON,
from standard input and writes a line of JSON for each method and share as soon as it is measured.

    .venv-peers/bin/python benchmarks/quality/peers.py < order.json > results.jsonl

The context is compressed once, by methods that do not know what comes after it. Then the model continues with the
text's continuation, or with one question after the other. Positions continue as if nothing had been removed. Schemes
that keep every token also read each text segment by segment, as a server does, for next-token distributions.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from kvpress import (
    AdaKVPress,
    CompactorPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KVzipPress,
    MergingPress,
    SnapKVPress,
)
from quantisers import SCHEMES, quantise
from transformers import AutoModelForCausalLM, DynamicCache


class KVzip(KVzipPress):
    """KVzipPress, which takes the beginning of every context for that of a chat template and does not score it.

    Of a context without a template all tokens are scored. Scores do not depend on the share: each context is scored
    once.
    """

    scored: ClassVar[dict[tuple[bool, tuple[int, ...]], torch.Tensor]] = {}
    """By normalisation and context."""

    def prepare(self, model: Any, tokenizer: Any, *given: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if int(self._context_ids[0, 0]) not in tokenizer.all_special_ids:
            self.prefix_length = 0
        return super().prepare(model, tokenizer, *given)

    def _perform_kvzip_compression(self, model: Any, tokenizer: Any) -> None:
        context = (self.kvzip_plus_normalization, tuple(self._context_ids[0].tolist()))
        if context not in self.scored:
            super()._perform_kvzip_compression(model, tokenizer)
            self.scored[context] = self.score_val
        else:
            self.score_val = self.scored[context]
            self.compress_post(model)


METHODS = {
    "KeyDiff": lambda ratio: KeyDiffPress(ratio),
    "SnapKV": lambda ratio: SnapKVPress(ratio),
    "ExpectedAttention": lambda ratio: ExpectedAttentionPress(ratio),
    "AdaKV + SnapKV": lambda ratio: AdaKVPress(SnapKVPress(ratio)),
    "AdaKV + ExpectedAttention": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio)),
    "KVzip": lambda ratio: KVzip(ratio),
    "KVzip+": lambda ratio: KVzip(ratio, kvzip_plus_normalization=True),
    "AdaKV + Compactor": lambda ratio: AdaKVPress(CompactorPress(ratio)),
    "Merging + SnapKV": lambda ratio: MergingPress(SnapKVPress(ratio)),
}
"""Methods of kvpress by name."""

EXACT: dict[tuple[int, ...], DynamicCache] = {}
"""Uncompressed caches by context, for schemes that keep every token."""


def exact(model: Any, context: list[int]) -> DynamicCache:
    """Return a copy of the context's uncompressed cache, which is computed once."""
    if tuple(context) not in EXACT:
        cache = EXACT[tuple(context)] = DynamicCache()
        model.model(input_ids=torch.tensor([context]), past_key_values=cache)
    return copy.deepcopy(EXACT[tuple(context)])


def complete(cache: DynamicCache, method: str, start: int, stop: int) -> DynamicCache:
    """Quantise tokens `start` to `stop` of every layer by one of SCHEMES."""
    for layer in cache.layers:
        layer.keys, layer.values = quantise(SCHEMES[method], layer.keys, layer.values, start, stop)
    return cache


def hidden_states(model: Any, method: str, ids: list[int], segment: int) -> torch.Tensor:
    """Read a text whose earlier segments are quantised and whose own segment is not.

    Returns:
        float32 [tokens, hidden size], what enters the model's head.
    """
    cache, states = DynamicCache(), []
    for start in range(0, len(ids), segment):
        own = ids[start : start + segment]
        positions = torch.arange(start, start + len(own))[None]
        found = model.model(input_ids=torch.tensor([own]), past_key_values=cache, position_ids=positions)
        states.append(found.last_hidden_state[0].float())
        if len(own) == segment:
            complete(cache, method, start, start + segment)
    return torch.cat(states)


def compressed(model: Any, method: str, share: float, context: list[int], segment: int) -> DynamicCache:
    """The cache of a context of which `share` is kept; heads' masks, where a method has them, stay in the model.

    Schemes that keep every token quantise whole segments, because a server's open segment is not compressed either.
    """
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    if method in SCHEMES:
        return complete(exact(model, context), method, 0, len(context) // segment * segment)
    # Compactor draws a random sketch.
    torch.manual_seed(0)
    cache = DynamicCache()
    with METHODS[method](1 - share)(model):
        positions = torch.arange(len(context))
        model.model(input_ids=torch.tensor([context]), past_key_values=cache, cache_position=positions)
    return cache


def go_on(model: Any, cache: DynamicCache, ids: list[int], position: int) -> torch.Tensor:
    """Logits [tokens, vocabulary] of tokens that start at a position."""
    # No cache_position: with it transformers masks by positions, and a cache that is shorter shows tokens to those
    # before them.
    positions = torch.arange(position, position + len(ids))[None]
    return model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=positions).logits[0].float()


def check_order(model: Any, method: str, segment: int) -> None:
    """End with one line if tokens behind a compressed context see those behind themselves."""
    ids = list(range(100, 260))
    changed = [*ids[:-1], 7]
    first, second = (
        go_on(model, compressed(model, method, 0.3, ids[:128], segment), own[128:], 128) for own in (ids, changed)
    )
    if not torch.allclose(first[:-1], second[:-1], atol=1e-3):
        sys.exit(f"with these releases of kvpress and transformers, {method} shows tokens to those before them")


def continuation_nll(model: Any, method: str, share: float, ids: list[int], context: int, segment: int) -> list[float]:
    """Minus the log-probabilities of all tokens but the first behind the context."""
    cache = compressed(model, method, share, ids[:context], segment)
    logs = go_on(model, cache, ids[context:-1], context).log_softmax(dim=-1)
    return (-logs.gather(1, torch.tensor(ids[context + 1 :])[:, None])[:, 0]).tolist()


def answers(
    model: Any, method: str, share: float, interview: dict[str, Any], new_tokens: int, segment: int
) -> list[list[int]]:
    """Tokens that answer each question, greedily."""
    whole = compressed(model, method, share, interview["context"], segment)
    found = []
    for suffix in interview["questions"]:
        cache, position, ids = copy.deepcopy(whole), len(interview["context"]), list(suffix)
        said: list[int] = []
        while len(said) < new_tokens:
            following = int(go_on(model, cache, ids, position)[-1].argmax())
            position += len(ids)
            ids = [following]
            said.append(following)
        found.append(said)
    return found


@torch.no_grad()
def main() -> None:
    order = json.load(sys.stdin)
    segment = order["segment"]
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=getattr(torch, order["dtype"])).eval()
    for method in dict.fromkeys(method for method, _ in order["wanted"]):
        check_order(model, method, segment)
    for method, share in order["wanted"]:
        nll = [continuation_nll(model, method, share, ids, order["context"], segment) for ids in order["texts"]]
        said = [
            answers(model, method, own, interview, order["new_tokens"], segment)
            for interview, own in zip(order["interviews"], order["interview_shares"][str(share)], strict=True)
        ]
        found = {"method": method, "share": share, "nll": nll, "answers": said}
        if method in SCHEMES:
            found["states"] = str(Path(order["folder"]) / f"{method}.pt")
            torch.save([hidden_states(model, method, ids, segment) for ids in order["texts"]], found["states"])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
