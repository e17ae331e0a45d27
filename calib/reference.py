"""Records what the uncompressed model predicts for held-out texts, the reference of a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calib.engine import Engine
from sgl_ragged.profiles.reference import LIKELIEST, SEGMENTS, ReferenceText
from sgl_ragged.verify.comparison import DECODED
from sgl_ragged.verify.prompts import built_in_texts

Texts = dict[str, Sequence[int]]
"""Token ids by name."""


def held_out_texts(tokenizer: Any, segment: int, max_tokens: int) -> Texts:
    """Tokenize the built-in texts and cut them to SEGMENTS segments and a token; leave out those of one segment.

    Args:
        max_tokens: longest prompt of the model; `sgl-ragged verify` also decodes some tokens after each text.
    """
    length = min(SEGMENTS * segment + 1, max_tokens - DECODED)
    texts = {name: tokenizer.encode(text)[:length] for name, text in built_in_texts().items()}
    return {name: ids for name, ids in texts.items() if len(ids) > segment + 1}


def record_reference(
    engine: Engine, texts: Texts, segment: int, vocabulary: int, advance: Callable[[], None]
) -> tuple[ReferenceText, ...]:
    """Record the predictions after each text's first segment, where compression begins to show.

    Args:
        vocabulary: number of tokens that the model predicts.
        advance: called once per text.
    """
    found = []
    for name, ids in texts.items():
        own, top = engine.predict(ids, segment, min(LIKELIEST, vocabulary))
        likeliest = np.array([[(logprob, token) for logprob, token, *_ in entries] for entries in top])
        found.append(
            ReferenceText(
                name,
                np.array(ids, dtype=np.int32),
                np.array([logprob for logprob, *_ in own], dtype=np.float32),
                likeliest[..., 1].astype(np.int32),
                likeliest[..., 0].astype(np.float16),
            )
        )
        advance()
    return tuple(found)
