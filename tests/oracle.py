"""An independent oracle: a dense-mask forward of a Hugging Face model that follows the attention semantics literally.

It shares no code with the package: scores, selection and masks are spelled out again, one head and segment at a
time, in float64 on the model's own keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

NAME = "segment_budget_oracle"
SINKS, GUARD = 4, 16


@dataclass(frozen=True)
class Tokens:
    """What one head knows of consecutive tokens, in float64: keys and values [T, d], queries [q_per_kv, T, d].

    `start` is the position of the first of them. `gates` [T] are token scores; `statistics` the head's query mean
    [q_per_kv, d], covariance [q_per_kv, d, d], rotary frequencies [d / 2] and the order of dimensions [d].
    """

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray | None = None
    scale: float = 1.0
    gates: np.ndarray | None = None
    statistics: tuple[np.ndarray, ...] | None = None
    start: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, stop: int) -> Tokens:
        return replace(
            self,
            start=self.start + start,
            keys=self.keys[start:stop],
            values=self.values[start:stop],
            queries=None if self.queries is None else self.queries[:, start:stop],
            gates=None if self.gates is None else self.gates[start:stop],
        )


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def attention(tokens: Tokens, position: int) -> np.ndarray:
    """[T]: attention of the query at `position` inside these tokens, mean over query heads, 0 for later tokens."""
    weights = np.zeros(len(tokens))
    logits = tokens.queries[:, position] @ tokens.keys[: position + 1].T * tokens.scale
    weights[: position + 1] = softmax(logits).mean(0)
    return weights


def scores(scorer: str, tokens: Tokens) -> np.ndarray:
    """[S] scores of one head's segment."""
    keys, values, length = tokens.keys, tokens.values, len(tokens)
    norms = np.sqrt((keys**2).sum(-1))
    if scorer == "keydiff":
        unit = keys / norms[:, None]
        anchor = unit.mean(0)
        return -(unit @ anchor) / np.sqrt((anchor**2).sum())
    if scorer == "key_norm":
        return -norms
    if scorer == "value_key_norm":
        return np.sqrt((values**2).sum(-1)) / norms
    if scorer == "streaming":
        return np.arange(length, dtype=np.float64)
    if scorer == "tova":
        return attention(tokens, length - 1)
    if scorer == "h2o":
        return sum(attention(tokens, i) for i in range(length)) / (length - np.arange(length))
    if scorer == "snapkv":
        seen = sum(attention(tokens, i) for i in range(length - 16, length)) / 16
        before = length - 16
        pooled = [seen[max(i - 2, 0) : min(i + 3, before)].mean() for i in range(before)]
        return np.concatenate([pooled, seen[before:]])
    if scorer == "expected_attention":
        mean, covariance, frequencies, order = tokens.statistics
        half, keys = len(frequencies), keys[:, order.astype(int)]
        pairs = keys[:, :half] + 1j * keys[:, half : 2 * half]
        pairs = pairs * np.exp(-1j * frequencies * (tokens.start + length))
        keys = np.concatenate([pairs.real, pairs.imag, keys[:, 2 * half :]], axis=1)
        logits = tokens.scale * mean @ keys.T
        logits = logits + tokens.scale**2 / 2 * np.einsum("sd,qde,se->qs", keys, covariance, keys)
        weights = np.zeros(logits.shape)
        sinks = SINKS if tokens.start == 0 else 0
        weights[:, sinks:] = softmax(logits[:, sinks:])
        return weights.mean(0) * np.sqrt((values**2).sum(-1))
    if scorer == "fastkvzip":
        return tokens.gates
    raise ValueError(scorer)


def kept_tokens(scorer: str, tokens: Tokens, count: int, first: bool) -> list[int]:
    """Positions inside the segment that a head with budget `count` keeps, ascending."""
    length = len(tokens)
    sinks = list(range(SINKS)) if first else []
    guard = [p for p in range(length - 1, length - 1 - GUARD, -1) if p not in sinks]
    chosen = (sinks + guard)[:count]
    ranking = scores(scorer, tokens)
    others = sorted((p for p in range(length) if p not in chosen), key=lambda p: (-ranking[p], p))
    return sorted(chosen + others[: count - len(chosen)])


def visible(scorer: str, tokens: Tokens, count: int, segment: int) -> np.ndarray:
    """bool [T, T]: which token each position of one head may attend to."""
    total = len(tokens)
    mask = np.zeros((total, total), dtype=bool)
    for start in range(0, total, segment):
        stop = min(start + segment, total)
        for position in range(start, stop):
            mask[position, start : position + 1] = True
        if stop - start == segment:
            kept = kept_tokens(scorer, tokens.part(start, stop), count, start == 0)
            mask[stop:, [start + p for p in kept]] = True
    return mask


class Oracle:
    """A model whose attention heads keep `kept[layer, head]` tokens of every finished segment.

    Layers with sliding windows attend to these, and are not counted among the layers of `kept`.

    `statistics`: of every layer and head, what `Tokens` has of one: [layers, heads or 1, ...].
    `stored`: called with a layer's number and its keys or values, gives them as they come back from the cache.
    """

    def __init__(
        self,
        path: str,
        kept: np.ndarray,
        segment: int,
        scorer: str,
        statistics: tuple[np.ndarray, ...] | None = None,
        stored: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, x: x,
    ) -> None:
        self.stored = stored
        self.kept, self.segment, self.scorer, self.statistics = kept, segment, scorer, statistics
        AttentionInterface.register(NAME, self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME).eval()
        layers = range(self.model.config.num_hidden_layers)
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"] * len(layers)
        whole = [layer for layer in layers if kinds[layer] == "full_attention"]
        self.layer_indices = {layer: number for number, layer in enumerate(whole)}

    def _attention(self, module, query, key, value, attention_mask, scaling, sliding_window=None, s_aux=None, **_):
        per_head = query.shape[1] // key.shape[1]
        number = self.layer_indices.get(module.layer_idx)
        assert (number is None) == (sliding_window is not None)
        output = torch.empty_like(query)
        key, value = (self.stored(module.layer_idx, x) for x in (key, value))
        for head in range(key.shape[1]):
            group = range(head * per_head, (head + 1) * per_head)
            tokens = Tokens(
                keys=key[0, head].double().numpy(),
                values=value[0, head].double().numpy(),
                queries=query[0, group].double().numpy(),
                scale=scaling,
                statistics=self.statistics and tuple(s[number, min(head, s.shape[1] - 1)] for s in self.statistics),
            )
            if number is None:
                places = np.arange(len(tokens))
                mask = (places <= places[:, None]) & (places > places[:, None] - sliding_window)
            else:
                mask = self._visible(tokens, number, head)
            blocked = torch.from_numpy(~mask)
            for q in group:
                logits = (query[0, q] @ key[0, head].T * scaling).masked_fill(blocked, -torch.inf)
                if s_aux is None:
                    output[0, q] = logits.softmax(-1) @ value[0, head]
                else:
                    # The head's sink takes its share of the softmax, and has no value. SGLang rounds it to bfloat16.
                    sink = s_aux[q].bfloat16().float()
                    with_sink = torch.cat([logits, sink.expand(len(logits), 1)], dim=-1)
                    output[0, q] = with_sink.softmax(-1)[:, :-1] @ value[0, head]
        return output.transpose(1, 2).contiguous(), None

    def _visible(self, tokens: Tokens, number: int, head: int) -> np.ndarray:
        """bool [T, T]: which token each position of a head may attend to, in a layer that is not windowed."""
        return visible(self.scorer, tokens, int(self.kept[number, head]), self.segment)

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens) - 1]: log-probability of each token after the first, given those before it."""
        logits = self.model(torch.tensor([tokens])).logits[0]
        every = logits.log_softmax(-1)
        return every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
