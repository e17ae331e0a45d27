"""The results as a plot: divergence and recall by ratio."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.results import Results
from benchmarks.quality.facts import KINDS
from benchmarks.quality.table import continuation, mean_and_error, peer_name, peers, recall, served


def draw(results: Results, path: Path) -> None:
    """Plot KL, continuation and recall of every configuration and peer by kept share of the bytes.

    Raises:
        SettingsError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, dict]]] = {}
    for one, result in served(results).items():
        if one.ratio is not None:
            lines.setdefault(one.name, []).append((one.ratio, result))
    ours = set(lines)
    for (method, share), result in peers(results).items():
        lines.setdefault(peer_name(method), []).append((share, result))
    columns = 2 + len(KINDS)
    figure, axes = pyplot.subplots(1, columns, figsize=(5 * columns, 4.2), layout="constrained")
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        shares = [share for share, _ in points]
        style: dict[str, Any] = {"marker": "o", "label": name, "linestyle": "-" if name in ours else ":"}
        if "kl" in points[0][1]["texts"]:
            axes[0].plot(shares, [mean_and_error(r["texts"]["kl"])[0] for _, r in points], **style)
        axes[1].plot(shares, [(continuation(results, r) or (nan,))[0] for _, r in points], **style)
        for axis, kind in zip(axes[2:], KINDS, strict=True):
            axis.plot(shares, [recall(r, kind) for _, r in points], **style)
    titles = ("KL, nats", "delta NLL of the continuation", *(f"recall, {kind}" for kind in KINDS))
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="kept share of the bytes")
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=7, loc="lower right")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error}") from None
    finally:
        pyplot.close(figure)
