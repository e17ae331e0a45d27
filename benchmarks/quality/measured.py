"""The figures from one server's answers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.quality.facts import KINDS
from benchmarks.quality.head import compare
from benchmarks.quality.served import Answers
from benchmarks.quality.tasks import Tasks

BORDER = 16
"""Tokens behind each border of segments that have figures of their own: they see the least uncompressed history."""


def figures(
    answers: Answers[torch.Tensor], reference: list[torch.Tensor], head: torch.Tensor, tasks: Tasks
) -> dict[str, Any]:
    """What is kept of a server's hidden states and answers, per text and interview; figures of texts are means over
    tokens behind the first segment.

    Args:
        reference: hidden states of every text to compare with, [tokens, hidden size].

    kl, delta_nll, agrees: as in `head.Difference`; border_kl: of the BORDER tokens behind borders alone;
    segments: kl of the tokens of each segment but the first, per text.
    all_kl: over all tokens; continuation_nll: mean over the tokens behind `Tasks.context` but the first.
    """
    rows: dict[str, list[float]] = {}
    segments: list[list[float]] = []
    for text, want, have in zip(tasks.texts, reference, answers.texts, strict=True):
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
        kind: [r for i, r in zip(tasks.interviews, answers.right, strict=True) if i.kind == kind] for kind in KINDS
    }
    return {"texts": rows, "segments": segments, "right": right, "start_up": answers.start_up}
