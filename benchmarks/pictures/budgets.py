"""Budgets of a bundled profile: how many tokens of a segment each head of each layer keeps."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pictures.svg import Drawing
from sgl_ragged.profiles.profile import load_profile, profile_kept

PROFILE = "sgl_ragged/profiles/bundled_profiles/llama-3.1-8b-instruct.fastkvzip.safetensors"
RATIO, SEGMENT = 0.3, 256
CELL = 20
LEFT, TOP = 78, 46


def draw(root: Path) -> str:
    """Return the picture."""
    kept = profile_kept(load_profile(root / PROFILE), RATIO, SEGMENT)
    layers, heads = kept.shape
    drawing = Drawing(
        TOP + heads * CELL + 92,
        f"Heat map of {layers} layers and {heads} heads of Llama-3.1-8B-Instruct: tokens of each segment of {SEGMENT} "
        f"that a head keeps at ratio {RATIO} in wide slabs, from {kept.min()} to {kept.max()}.",
    )
    drawing.text(
        LEFT,
        18,
        f"Llama-3.1-8B-Instruct, ratio {RATIO}, wide slabs: tokens that each head keeps of {SEGMENT}",
        13,
        bold=True,
    )
    for head in range(heads):
        if head % 2 == 0:
            drawing.text(LEFT - 8, TOP + head * CELL + 15, f"head {head}", 12, "soft", "end")
        for layer in range(layers):
            _cell(drawing, LEFT + layer * CELL, TOP + head * CELL, kept[layer, head] / SEGMENT)
    for layer in range(0, layers, 4):
        drawing.text(LEFT + (layer + 0.5) * CELL, TOP + heads * CELL + 17, str(layer), 12, "soft", "middle")
    bottom = TOP + heads * CELL
    drawing.text(LEFT + layers * CELL / 2, bottom + 34, "layer", 12, "soft", "middle")
    _key(drawing, bottom + 62, int((kept == kept.min()).sum()), int((kept == SEGMENT).sum()), kept.size)
    return drawing.render()


def _cell(drawing: Drawing, x: float, y: float, share: float) -> None:
    drawing.rect(x, y, CELL - 1.5, CELL - 1.5, "plain-wash", radius=2)
    drawing.rect(x, y, CELL - 1.5, CELL - 1.5, "ours", radius=2, opacity=share)


def _key(drawing: Drawing, y: float, least: int, whole: int, count: int) -> None:
    """Draw the colours of some budgets, and how many heads have the least and the greatest."""
    for index, tokens in enumerate((16, 64, 128, 192, 256)):
        x = LEFT + index * 62
        _cell(drawing, x, y - 14, tokens / SEGMENT)
        drawing.text(x + CELL + 4, y, str(tokens), 12, "soft")
    words = f"{least} of {count} heads keep 16 tokens, {whole} keep all {SEGMENT}"
    drawing.text(LEFT + 640, y, words, 12, "soft", "end")
