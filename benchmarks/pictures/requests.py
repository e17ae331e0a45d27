"""Requests that a pool of Llama-3.1-8B holds at once, by their length, as `sgl-ragged layout` computes them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pictures.chart import Axes, Scale, log_scale
from benchmarks.pictures.svg import Drawing

CONFIG = "sgl_ragged/profiles/bundled_profiles/configs/llama-3.1-8b-instruct.json"
MORE = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 131072}
"""Keys of the published config.json that CONFIG leaves out and a layout needs."""

FLAGS = ("--kv-bytes", "80GB", "--max-running-requests", "1024")
RATIOS = (0.1, 0.3, 0.5)


def loads(root: Path, ratio: float) -> list[dict[str, int]]:
    """Return `loads` of `sgl-ragged layout --json`: tokens, requests and full_requests of each length."""
    from sgl_ragged.cli import make_parser

    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, _no_profiles(folder):
        config = json.loads((root / CONFIG).read_text()) | MORE
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = make_parser().parse_args(
            ["layout", "--model", folder, *FLAGS, "--ragged-ratio", str(ratio), "--json"]
        )
        with contextlib.redirect_stdout(printed):
            options.run(options)
    return json.loads(printed.getvalue())["loads"]


@contextlib.contextmanager
def _no_profiles(folder: str) -> Iterator[None]:
    """Hide cached profiles, so that budgets are equal on every machine."""
    name = "SGLANG_RAGGED_CACHE"
    before = os.environ.get(name)
    os.environ[name] = str(Path(folder) / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def draw(root: Path) -> str:
    """Return the picture."""
    drawing = Drawing(
        380,
        "Requests of 256 to 16,384 tokens that 80 GB of KV cache hold at once for Llama-3.1-8B: uncompressed and at "
        "ratios 0.5, 0.3 and 0.1. Short requests gain little, long ones up to three times at 0.3 and nine at 0.1.",
    )
    found = {ratio: loads(root, ratio) for ratio in RATIOS}
    lengths = [row["tokens"] for row in found[RATIOS[0]]]
    axes = Axes(
        drawing,
        Scale(lengths[0], lengths[-1], 70, 590, [(n, f"{n:,}") for n in lengths], log=True),
        log_scale(
            (row[key] for rows in found.values() for row in rows for key in ("requests", "full_requests")), 320, 44
        ),
    )
    axes.grid("Requests held at once in 80 GB, Llama-3.1-8B", "tokens of a request")
    full = [(row["tokens"], row["full_requests"]) for row in found[RATIOS[0]]]
    for ratio, colour in zip(RATIOS, ("third", "ours", "fourth"), strict=True):
        points = [(row["tokens"], row["requests"]) for row in found[ratio]]
        axes.series(points, colour)
        gain = points[-1][1] / full[-1][1]
        axes.label(points[-1], f"ratio {ratio}: {points[-1][1]} ({gain:.1f}x)", colour)
    axes.series(full, "host", dashed=True, hollow=True)
    axes.label(full[-1], f"uncompressed: {full[-1][1]}", "host")
    return drawing.render()
