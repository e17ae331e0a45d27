"""The file of results, its table and its plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.harness.plots import drawn
from benchmarks.harness.rows import Rows
from benchmarks.quality.pool_results import TOKEN, PoolResults
from benchmarks.quality.retrieval.measured import Measured
from benchmarks.quality.table import mean_and_error


class Results(PoolResults[Measured]):
    """`pools`: what was measured, by ratio and overlay as `key` writes them."""

    benchmark, kind = "benchmarks.quality --axis retrieval", Measured

    def fetched_bytes_per_token(self, name: str) -> float:
        """Of each request's decoded tokens, what its prompt's last tokens asked for among it."""
        found = self.pools[name]
        return found.rows * self.settings["row_bytes"] / found.tokens


def key(ratio: float, overlay: int) -> str:
    """The name of a pool at a ratio, with overlays of so many tokens, 0 without retrieval."""
    return f"{ratio:g}" if overlay == 0 else f"{ratio:g} + {overlay}"


def tables(results: Results) -> list[Rows]:
    """One row for each pool; a pool with overlays is compared with that of its ratio without."""
    columns = (
        "ratio + overlay", "KL", "of that without", "delta NLL", "same top token", "device bytes",
        "answers / questions", "fetched B/token", "step ms", "of that without",
    )  # fmt: skip
    rows = []
    for name, found in results.pools.items():
        ratio, _, overlay = name.partition(" + ")
        plain = results.pools.get(ratio) if overlay else None
        share = "1" if name == TOKEN else f"{float(ratio) + int(overlay or 0) / results.settings['prompt']:.3f}"
        rows.append(
            (
                name,
                "{:.4f} ± {:.4f}".format(*mean_and_error(found.kl)),
                f"{np.mean(found.kl) / np.mean(plain.kl):.2f}" if plain else "",
                f"{np.mean(found.delta_nll):.4f}",
                f"{np.mean(found.agrees):.3f}",
                share,
                f"{found.answers / found.questions:.2f}" if found.questions else "",
                f"{results.fetched_bytes_per_token(name):.0f}" if overlay else "",
                f"{np.median(found.step_ms):.1f}",
                f"{np.median(np.divide(found.step_ms, plain.step_ms)):.2f}" if plain else "",
            )
        )
    title = "decoded texts against the token pool; device bytes: of the prompt's, with overlays as if all heads had one"
    return [Rows(title, columns, tuple(rows))]


def draw(results: Results, path: Path) -> None:
    """KL over device bytes, with and without overlays."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for name, found in results.pools.items():
        if name != TOKEN:
            ratio, _, overlay = name.partition(" + ")
            most = int(overlay or 0)
            lines.setdefault(most, []).append(
                (float(ratio) + most / results.settings["prompt"], float(np.mean(found.kl)))
            )
    with drawn(path, (7, 4.2)) as axis:
        for most, points in lines.items():
            axis.plot(
                *zip(*sorted(points), strict=True), marker="o", label=f"overlays of {most}" if most else "without"
            )
        axis.set(
            title="decoding a text", xlabel="device bytes / full bytes of the prompt", ylabel="KL, nats", ylim=(0, None)
        )
        axis.grid(alpha=0.3)
        axis.legend()
