"""The file of results, its table and its plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.harness.pool_results import TOKEN, PoolResults
from benchmarks.harness.rows import Rows
from benchmarks.history.measured import PARTS, Measured


class Results(PoolResults[Measured]):
    """`pools`: what was measured, by the pool's name; the token pool's first."""

    benchmark, kind = "benchmarks.history", Measured

    def lost(self, name: str) -> np.ndarray:
        """float64 [texts, PARTS]: NLL more than the token pool's, nats per token."""
        return np.array(self.pools[name].nll) - np.array(self.pools[TOKEN].nll)


def behind(length: int, bound: int) -> slice:
    """The parts of a text that lie behind its first `bound` tokens as a whole."""
    return slice(-(-bound * PARTS // length), None)


def table(results: Results, bound: int) -> Rows:
    """One row for each pool; `bound`: the longest of the bounds, in tokens."""
    own = behind(results.settings["text_tokens"], bound)
    facts = max((len(right) for found in results.pools.values() for right in found.right), default=0)
    columns = ("pool", *(f"{n + 1}/{PARTS}" for n in range(PARTS)), "behind the bound", "facts")
    columns += tuple(f"fact {n + 1}" for n in range(facts))
    rows = []
    for name, found in results.pools.items():
        lost = results.lost(name)
        each = lost[:, own].mean(axis=1)
        error = each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else float("nan")
        right = np.array(found.right)
        rows.append(
            (
                name,
                *(f"{value:.3f}" for value in lost.mean(axis=0)),
                f"{each.mean():.4f} ± {error:.4f}",
                f"{int(right.sum())} of {right.size}",
                *(f"{share:.2f}" for share in right.mean(axis=0)),
            )
        )
    title = "delta NLL to the token pool by eighth of the texts; facts known, all and by their place in the context"
    return Rows(title, columns, tuple(rows))


def draw(results: Results, path: Path) -> None:
    """Loss along the texts, and facts by their place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for name, found in results.pools.items():
        left.plot(np.arange(1, PARTS + 1), results.lost(name).mean(axis=0), marker="o", label=name)
        known = np.array(found.right)
        right.plot(np.arange(1, known.shape[1] + 1), known.mean(axis=0), marker="o", label=name)
    left.set(title="delta NLL, nats per token", xlabel="eighth of the text")
    right.set(title="facts known", xlabel="place in the context, oldest first", ylim=(0, 1.05))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
