"""The results as tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.quality.configuration import Configuration
from benchmarks.quality.facts import KINDS
from benchmarks.quality.store import Results


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error (nan for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.nan


def recall(result: dict[str, Any], kind: str) -> float:
    """Share of right answers."""
    return float(np.mean([one for interview in result["right"][kind] for one in interview]))


def continuation(results: Results, result: dict[str, Any]) -> tuple[float, float]:
    """Difference of the continuation's NLL to the token pool's, per text: mean and standard error."""
    reference = results.served[Configuration.token()]["texts"]["continuation_nll"]
    found = result["texts"]["continuation_nll"]
    return mean_and_error([a - b for a, b in zip(found, reference, strict=True)])


def show(results: Results, console: Console) -> None:
    """Two tables: servers, and servers beside peers."""
    table = Table(title="Next-token distributions behind the first segment, against the token pool; facts known")
    columns = (
        "configuration",
        "KL",
        "KL at borders",
        "delta NLL",
        "top-1 same",
        *(f"recall, {kind}" for kind in KINDS),
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "configuration" else "right")
    for one, result in results.served.items():
        texts = result["texts"]
        cells = [f"{a:.4f} ± {e:.4f}" for a, e in (mean_and_error(texts[n]) for n in ("kl", "border_kl", "delta_nll"))]
        agrees = f"{mean_and_error(texts['agrees'])[0]:.3f}"
        table.add_row(str(one), *cells, agrees, *(f"{recall(result, kind):.3f}" for kind in KINDS))
    console.print(table)
    if not results.peers:
        return
    table = Table(title="Beside kvpress at the same kept share, question unknown: continuation and recall")
    for name in ("method", "share", "delta NLL", *(f"recall, {kind}" for kind in KINDS)):
        table.add_column(name, justify="left" if name == "method" else "right")
    rows = [(str(one), one.ratio, result) for one, result in results.served.items() if one.ratio is not None]
    rows += [(f"kvpress {method}", share, result) for (method, share), result in results.peers.items()]
    for name, share, result in sorted(rows, key=lambda row: -(row[1] or 0)):
        mean, error = continuation(results, result)
        table.add_row(name, f"{share:g}", f"{mean:.4f} ± {error:.4f}", *(f"{recall(result, k):.3f}" for k in KINDS))
    console.print(table)
