"""What one server is asked, and the figures from its answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.harness.client import ServerClient
from benchmarks.quality import served
from benchmarks.quality.facts import KINDS, Interview
from benchmarks.quality.head import compare
from benchmarks.quality.texts import Text

BORDER = 16
"""Tokens behind each border of segments that have figures of their own: they see the least uncompressed history."""


@dataclass(frozen=True)
class Tasks:
    """Texts to read and interviews to hold; `segment` in tokens."""

    texts: list[Text]
    interviews: list[Interview]
    segment: int

    @property
    def count(self) -> int:
        return len(self.texts) + sum(len(interview.questions) for interview in self.interviews)

    @property
    def context(self) -> int:
        """Tokens of a text that are compressed before its continuation: all segments but the last."""
        return (len(self.texts[0].ids) - 1) // self.segment * self.segment

    def share(self, interview: Interview, ratio: float) -> float:
        """Share of an interview's context that a ratio leaves, where its last, open segment stays whole."""
        length = len(interview.context)
        return 1 - (1 - ratio) * (length // self.segment * self.segment) / length

    def describe(self) -> dict[str, Any]:
        content = json.dumps([[asdict(t) for t in self.texts], [asdict(i) for i in self.interviews]])
        return {
            "texts": len(self.texts),
            "text_tokens": len(self.texts[0].ids),
            "interviews": {kind: sum(i.kind == kind for i in self.interviews) for kind in KINDS},
            "facts": len(self.interviews[0].questions) if self.interviews else 0,
            "context_tokens": int(np.mean([len(i.context) for i in self.interviews])) if self.interviews else 0,
            "segment": self.segment,
            "asked": hashlib.sha256(content.encode()).hexdigest()[:16],
        }


@dataclass(frozen=True)
class Measured:
    """Hidden states of every text, and which questions of every interview were answered rightly."""

    states: list[torch.Tensor]
    right: list[list[bool]]
    start_up: str

    def result(self, reference: list[torch.Tensor], head: torch.Tensor, tasks: Tasks) -> dict[str, Any]:
        """What is kept of it, per text and interview; figures of texts are means over tokens behind the first segment.

        `reference`: hidden states of every text to compare with, [tokens, hidden size].

        kl, delta_nll, agrees: as in `head.Difference`; border_kl: of the BORDER tokens behind borders alone;
        segments: kl of the tokens of each segment but the first, per text.
        all_kl: over all tokens; continuation_nll: mean over the tokens behind `Tasks.context` but the first.
        """
        rows: dict[str, list[float]] = {}
        segments: list[list[float]] = []
        for text, want, have in zip(tasks.texts, reference, self.states, strict=True):
            found = compare(head, want, have, torch.tensor(text.ids))
            behind = torch.arange(len(found.kl)) >= tasks.segment
            of_segments = found.kl[behind].split(tasks.segment)
            segments.append([round(float(kl.mean()), 6) for kl in of_segments])
            border = behind & (torch.arange(len(found.kl)) % tasks.segment < BORDER)
            for name, value in (
                ("kl", found.kl[behind].mean()),
                ("all_kl", found.kl.mean()),
                ("border_kl", found.kl[border].mean()),
                ("delta_nll", (found.nll - found.reference_nll)[behind].mean()),
                ("agrees", found.agrees[behind].mean()),
                ("continuation_nll", found.nll[tasks.context :].mean()),
            ):
                rows.setdefault(name, []).append(round(float(value), 6))
        right = {
            kind: [r for i, r in zip(tasks.interviews, self.right, strict=True) if i.kind == kind] for kind in KINDS
        }
        return {"texts": rows, "segments": segments, "right": right, "start_up": self.start_up}


def measure(client: ServerClient, tasks: Tasks, tokenizer: Any, advance: Callable[[], None]) -> Measured:
    """Ask one server. Raises ServerLost and PointFailed."""
    states = []
    for text in tasks.texts:
        # Of cached tokens no hidden states are returned, and texts may begin with the same token.
        client.flush()
        states.append(served.hidden_states(client, text))
        advance()
    right = served.recall(client, tokenizer, tasks.interviews, advance)
    return Measured(states, right, client.start_up_line())
