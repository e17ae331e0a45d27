"""An independent oracle: a dense-mask forward of a Hugging Face model that follows the attention semantics literally.

It shares no code with the package: scores, selection and masks are spelled out again, one head and segment at a
time, in float64 on the model's own keys and values.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

NAME = "segment_budget_oracle"
SINKS, GUARD = 4, 16


def scores(scorer: str, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[S] scores of one head's segment from float64 keys and values [S, d]."""
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
        return np.arange(len(keys), dtype=np.float64)
    raise ValueError(scorer)


def kept_tokens(scorer: str, keys: np.ndarray, values: np.ndarray, count: int, first: bool) -> list[int]:
    """Positions inside the segment that a head with budget `count` keeps, ascending."""
    length = len(keys)
    sinks = list(range(SINKS)) if first else []
    guard = [p for p in range(length - 1, length - 1 - GUARD, -1) if p not in sinks]
    chosen = (sinks + guard)[:count]
    ranking = scores(scorer, keys, values)
    others = sorted((p for p in range(length) if p not in chosen), key=lambda p: (-ranking[p], p))
    return sorted(chosen + others[: count - len(chosen)])


def visible(scorer: str, keys: np.ndarray, values: np.ndarray, count: int, segment: int) -> np.ndarray:
    """bool [T, T]: which token each position of one head may attend to; keys and values are [T, d]."""
    total = len(keys)
    mask = np.zeros((total, total), dtype=bool)
    for start in range(0, total, segment):
        stop = min(start + segment, total)
        for position in range(start, stop):
            mask[position, start : position + 1] = True
        if stop - start == segment:
            kept = kept_tokens(scorer, keys[start:stop], values[start:stop], count, start == 0)
            mask[stop:, [start + p for p in kept]] = True
    return mask


class Oracle:
    """A model whose attention heads keep `kept[layer, head]` tokens of every finished segment."""

    def __init__(self, path: str, kept: np.ndarray, segment: int, scorer: str) -> None:
        self.kept, self.segment, self.scorer = kept, segment, scorer
        AttentionInterface.register(NAME, self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME).eval()

    def _attention(self, module, query, key, value, attention_mask, scaling, **_):
        per_head = query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        for head in range(key.shape[1]):
            keys, values = (x[0, head].double().numpy() for x in (key, value))
            mask = visible(self.scorer, keys, values, int(self.kept[module.layer_idx, head]), self.segment)
            blocked = torch.from_numpy(~mask)
            for q in range(head * per_head, (head + 1) * per_head):
                logits = (query[0, q] @ key[0, head].T * scaling).masked_fill(blocked, -torch.inf)
                output[0, q] = logits.softmax(-1) @ value[0, head]
        return output.transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens) - 1]: log-probability of each token after the first, given those before it."""
        logits = self.model(torch.tensor([tokens])).logits[0]
        every = logits.log_softmax(-1)
        return every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
