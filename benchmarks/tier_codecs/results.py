"""What answers come to: figures by codec, and the file, the table and the plot of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.plots import drawn
from benchmarks.harness.rows import Rows
from benchmarks.quality.head import compare
from benchmarks.quality.table import mean_and_error
from benchmarks.tier_codecs.asking import Answers
from benchmarks.tier_codecs.suites import Talk, is_right, kinds


@dataclass(frozen=True)
class Result:
    """One codec at one ratio, with one kind of budgets.

    row_bytes: of a segment in the tier. exact_bytes: of its slab. segment: tokens. restored: tokens that came back.
    kl, delta_nll, agrees: of every continuation, means over its tokens but the last (`quality.head.Difference`),
        against the same server with the context on the device.
    right, reference_right: of every kind, answers that were right from restored contexts and from those on the device,
        and how many questions there were.
    """

    budgets: str
    ratio: float
    codec: str
    row_bytes: int
    exact_bytes: int
    segment: int
    restored: int
    kl: list[float]
    delta_nll: list[float]
    agrees: list[float]
    right: dict[str, tuple[int, int]]
    reference_right: dict[str, tuple[int, int]]
    start_up: str

    @property
    def bytes_per_token(self) -> float:
        return self.row_bytes / self.segment


def count_right(suite: str, tokenizer: Any, talks: Sequence[Talk], answers: Answers) -> dict[str, tuple[int, int]]:
    """By kind: right answers, and questions."""
    found = {}
    for kind in kinds(talks):
        marks = [
            is_right(suite, question.answer, tokenizer.decode(said))
            for talk, every in zip(talks, answers.said, strict=True)
            if talk.kind == kind
            for question, said in zip(talk.questions, every, strict=True)
        ]
        found[kind] = (sum(marks), len(marks))
    return found


def differences(
    head: torch.Tensor, talks: Sequence[Talk], reference: Answers, found: Answers
) -> dict[str, list[float]]:
    """kl, delta_nll and agrees of every continuation."""
    read = [talk for talk in talks if talk.continuation]
    rows = [
        compare(head, want, have, torch.tensor(talk.continuation)).means()
        for talk, want, have in zip(read, reference.states, found.states, strict=True)
    ]
    digits = {"kl": 7, "delta_nll": 7, "agrees": 6}
    return {name: [round(one[name], count) for one in rows] for name, count in digits.items()}


def table(results: Sequence[Result]) -> Rows:
    names = list(results[0].right) if results else []
    rows = []
    for one in results:
        kl, error = mean_and_error(one.kl)
        nll, nll_error = mean_and_error(one.delta_nll)
        known = [f"{one.right[name][0]} of {one.right[name][1]} ({one.reference_right[name][0]})" for name in names]
        rows.append(
            (
                f"{one.budgets}, {one.ratio:g}, {one.codec}",
                f"{one.bytes_per_token:,.0f}",
                f"{one.row_bytes / one.exact_bytes:.3f}",
                f"{kl:.2g} ± {error:.1g}",
                f"{nll:.2g} ± {nll_error:.1g}",
                f"{np.mean(one.agrees):.3f}",
                *known,
            )
        )
    columns = ("budgets, ratio, codec", "bytes per token", "of exact", "KL", "delta NLL", "top-1 same")
    return Rows(
        "Restored from the host against the same on the device; in brackets, facts known without restoring",
        (*columns, *(f"facts, {name}" for name in names)),
        tuple(rows),
    )


def document(settings: dict[str, Any], about: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    return {"settings": settings, "about": about, "results": [asdict(one) for one in results]}


LEAST = 1e-5
"""KL in nats that the plot's logarithmic axis begins with."""


def draw(results: Sequence[Result], path: Path) -> None:
    """KL by bytes per token, one line for each kind of budgets and ratio; none at all is drawn as LEAST."""
    markers = {"exact": "o", "fp8": "s", "shared": "^"}
    with drawn(path, (7, 4.6)) as axes:
        for budgets, ratio in dict.fromkeys((one.budgets, one.ratio) for one in results):
            own = sorted(
                (one for one in results if (one.budgets, one.ratio) == (budgets, ratio)), key=lambda one: one.row_bytes
            )
            (line,) = axes.plot(
                [one.bytes_per_token for one in own],
                [max(np.mean(one.kl), LEAST) for one in own],
                linewidth=0.7,
                label=f"{budgets}, ratio {ratio:g}",
            )
            for one in own:
                axes.plot(
                    one.bytes_per_token,
                    max(np.mean(one.kl), LEAST),
                    markers.get(one.codec, "x"),
                    color=line.get_color(),
                )
        for codec in dict.fromkeys(one.codec for one in results):
            axes.plot([], [], markers.get(codec, "x"), color="grey", label=codec)
        axes.set(
            yscale="log",
            xlim=(0, None),
            xlabel="bytes per token in the host tier",
            ylabel=f"KL after restoring, nats (0 at {LEAST:g})",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
