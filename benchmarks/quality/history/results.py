"""What is kept of a server's answers; the file of it, its table and its plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.client import ServerClient
from benchmarks.harness.errors import PointFailed
from benchmarks.harness.plots import drawn
from benchmarks.harness.rows import Rows
from benchmarks.quality.pool_results import TOKEN, PoolResults
from benchmarks.quality.table import mean_and_error
from benchmarks.quality.texts import Text

PARTS = 8
"""Equal parts of a text that have figures of their own."""


@dataclass(frozen=True)
class Measured:
    """nll: for each text, the mean of each part's tokens, nats. right: for each interview, its questions in the order
    in which their facts stand in the context."""

    nll: list[list[float]]
    right: list[list[bool]]
    start_up: str


def text_nll(client: ServerClient, text: Text) -> list[float]:
    """Mean negative log-probability of the tokens in each part of a text. Raises ServerLost and PointFailed."""
    answer = client.generate(text.ids, 1, return_logprobs=True)
    found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
    if len(found) != len(text.ids) - 1:
        raise PointFailed(f"the server returned log-probabilities of {len(found)} of {len(text.ids) - 1} tokens")
    return [round(-float(np.mean(part)), 6) for part in np.array_split(found, PARTS)]


class Results(PoolResults[Measured]):
    """`pools`: what was measured, by the pool's name; the token pool's first."""

    benchmark, kind = "benchmarks.quality --axis history", Measured

    def lost(self, name: str) -> np.ndarray:
        """float64 [texts, PARTS]: NLL more than the token pool's, nats per token."""
        return np.array(self.pools[name].nll) - np.array(self.pools[TOKEN].nll)


def bound_of(pool: str) -> int:
    """Tokens of --ragged-history in a pool's name, such as ragged@1+history=1536; 0 without."""
    options = dict(option.partition("=")[::2] for option in pool.split("+")[1:])
    return int(options.get("history", 0))


def behind(length: int, bound: int) -> slice:
    """The parts of a text that lie behind its first `bound` tokens as a whole."""
    return slice(-(-bound * PARTS // length), None)


def tables(results: Results) -> list[Rows]:
    """One row for each pool; `behind the bound`: behind the longest one that a pool of the file has."""
    own = behind(results.settings["text_tokens"], max(map(bound_of, results.pools)))
    facts = max((len(right) for found in results.pools.values() for right in found.right), default=0)
    columns = ("pool", *(f"{n + 1}/{PARTS}" for n in range(PARTS)), "behind the bound", "facts")
    columns += tuple(f"fact {n + 1}" for n in range(facts))
    rows = []
    for name, found in results.pools.items():
        lost = results.lost(name)
        right = np.array(found.right)
        rows.append(
            (
                name,
                *(f"{value:.3f}" for value in lost.mean(axis=0)),
                "{:.4f} ± {:.4f}".format(*mean_and_error(lost[:, own].mean(axis=1))),
                f"{int(right.sum())} of {right.size}",
                *(f"{share:.2f}" for share in right.mean(axis=0)),
            )
        )
    title = "delta NLL to the token pool by eighth of the texts; facts known, all and by their place in the context"
    return [Rows(title, columns, tuple(rows))]


def draw(results: Results, path: Path) -> None:
    """Loss along the texts, and facts by their place."""
    with drawn(path, (12, 4.2), columns=2) as axes:
        left, right = axes
        for name, found in results.pools.items():
            left.plot(np.arange(1, PARTS + 1), results.lost(name).mean(axis=0), marker="o", label=name)
            known = np.array(found.right)
            right.plot(np.arange(1, known.shape[1] + 1), known.mean(axis=0), marker="o", label=name)
        left.set(title="delta NLL, nats per token", xlabel="eighth of the text")
        right.set(title="facts known", xlabel="place in the context, oldest first", ylim=(0, 1.05))
        for axis in axes:
            axis.grid(alpha=0.3)
        left.legend(fontsize=7)
