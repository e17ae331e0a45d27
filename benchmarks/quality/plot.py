"""The results as a plot: divergence and recall by ratio."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import drawn
from benchmarks.quality.facts import KINDS
from benchmarks.quality.store import Results
from benchmarks.quality.table import continuation, mean_and_error, recall


def draw(results: Results, path: Path) -> None:
    """KL, continuation and recall of every configuration and peer by kept share of the bytes."""
    lines: dict[str, list[tuple[float, dict]]] = {}
    for one, result in results.served.items():
        if one.ratio is not None:
            lines.setdefault(one.name, []).append((one.ratio, result))
    ours = set(lines)
    for (method, share), result in results.peers.items():
        lines.setdefault(f"kvpress {method}", []).append((share, result))
    columns = 2 + len(KINDS)
    with drawn(path, (5 * columns, 4.2), columns) as axes:
        for name, points in lines.items():
            points.sort(key=lambda point: point[0])
            shares = [share for share, _ in points]
            style = {"marker": "o", "label": name, "linestyle": "-" if name in ours else ":"}
            if name in ours:
                axes[0].plot(shares, [mean_and_error(r["texts"]["kl"])[0] for _, r in points], **style)
            axes[1].plot(shares, [continuation(results, r)[0] for _, r in points], **style)
            for axis, kind in zip(axes[2:], KINDS, strict=True):
                axis.plot(shares, [recall(r, kind) for _, r in points], **style)
        for axis, title in zip(
            axes, ("KL, nats", "delta NLL of the continuation", *(f"recall, {k}" for k in KINDS)), strict=True
        ):
            axis.set(title=title, xlabel="kept share of the bytes")
            axis.grid(alpha=0.3)
        axes[-1].legend(fontsize=7, loc="lower right")
