"""The texts and questions that every server of a command gets."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.harness.options import check_counts
from benchmarks.quality.facts import KINDS, Interview, interviews
from benchmarks.quality.texts import SOURCES, Text, pieces


@dataclass(frozen=True)
class Tasks:
    """Texts to read and interviews to hold; `segment` in tokens."""

    texts: list[Text]
    interviews: list[Interview]
    segment: int

    @classmethod
    def of(
        cls, options: argparse.Namespace, tokenizer: Any, context: int, sources: Sequence[str] = tuple(SOURCES)
    ) -> Tasks:
        """By `add_options`. `context`: tokens of real text in a context with facts. Raises BenchmarkError."""
        check_counts(options, "segment", "length", "pieces", "facts")
        asked = [
            one
            for kind in KINDS
            for one in interviews(tokenizer, kind, options.interviews, facts=options.facts, length=context)
        ]
        return cls(pieces(tokenizer, options.length, options.pieces, sources), asked, options.segment)

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


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long and how many; without defaults."""
    parser.add_argument("--length", type=int, help="tokens of a text [%(default)s]")
    parser.add_argument("--pieces", type=int, default=1, help="of every source of texts [1]")
    parser.add_argument("--interviews", type=int, help="contexts with facts, of each kind [%(default)s]")
    parser.add_argument("--facts", type=int, default=8, help="in a context [8]")
