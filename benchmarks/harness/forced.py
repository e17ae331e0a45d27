"""Decoding what a text says, whatever the model would: SGLang calls this in its scheduler."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class Forced(CustomLogitProcessor):
    """Every request gets the tokens of its `custom_params["tokens"]`, one after the other.

    The server must not overlap scheduling with forward passes: the count of tokens so far would lag.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            wanted = params["tokens"][len(params["__req__"].output_ids)]
            row.fill_(-torch.inf)
            row[wanted] = 0.0
        return logits
