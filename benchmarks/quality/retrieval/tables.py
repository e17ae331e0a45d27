"""Table of what retrieval brings back, by ratio and overlay."""

from __future__ import annotations

import numpy as np

from benchmarks.harness.results import Results
from benchmarks.harness.table import Table
from benchmarks.quality.retrieval.measured import Measured
from benchmarks.quality.table import mean_and_error

TOKEN = "token"
"""The entry of SGLang's pool, which others are compared with."""


def key(ratio: float, overlay: int) -> str:
    """Name a pool by its ratio and the tokens of its overlays, 0 without retrieval."""
    return f"{ratio:g}" if overlay == 0 else f"{ratio:g} + {overlay}"


def tables(results: Results) -> list[Table]:
    """One row for each pool; a pool with overlays is compared with that of its ratio without."""
    columns = (
        "ratio + overlay", "KL", "of that without", "delta NLL", "same top token", "device bytes",
        "answers / questions", "fetched B/token", "step ms", "of that without",
    )  # fmt: skip
    rows, pools = [], results.as_kind(Measured)
    for name, found in pools.items():
        ratio, _, overlay = name.partition(" + ")
        plain = pools.get(ratio) if overlay else None
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
                # The last tokens of prompts fetch as well.
                f"{found.rows * results.settings['row_bytes'] / found.tokens:.0f}" if overlay else "",
                f"{np.median(found.step_ms):.1f}",
                f"{np.median(np.divide(found.step_ms, plain.step_ms)):.2f}" if plain else "",
            )
        )
    title = "decoded texts against the token pool; device bytes: of the prompt's, with overlays as if all heads had one"
    return [Table(title, columns, rows)]
