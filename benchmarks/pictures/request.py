"""A request's life in the eight steps of docs/architecture.md: what SGLang does, and what this plugin does."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pictures.svg import Drawing

STEPS = (
    ("1 prefix hit", ("radix tree finds sealed segments",), ("finds the open segment that", "continues the prefix")),
    ("2 allocation", ("scheduler admits by pages",), ("counts pages of slabs and", "of open segments")),
    ("3 batch", ("scheduler forms the batch",), ("seals what decode filled,", "lists what each query sees")),
    ("4 prefill", ("runs the model's layers",), ("seals full segments, attends to", "slabs, open segment and chunk")),
    ("5 decode", ("runs the model's layers",), ("stores the new token, attends", "to slabs and open segment")),
    ("6 seal", (), ("ranks a full segment's tokens,", "writes its slab")),
    ("7 share", ("tree shares and evicts pages",), ()),
    ("8 end", ("frees the request",), ("keeps the open segment", "as cache")),
)
"""Name, SGLang's part, this plugin's part; as the table of docs/architecture.md."""

TOP = 36
PITCH = 62
HEIGHT = 46
HOST_X, OURS_X, BOX = 138, 424, 236
LOOP_X = 742


def draw(_: Path) -> str:
    """Return the picture."""
    drawing = Drawing(
        TOP + PITCH * len(STEPS),
        "A request's life in eight steps: prefix hit, allocation, batch, prefill, decode, seal, share, end. "
        "SGLang's scheduler and radix tree work as ever; the plugin finds open segments, attends to slabs and open "
        "segments, and seals full segments into slabs.",
    )
    drawing.text(HOST_X + BOX / 2, 20, "SGLang", 14, "host", "middle", bold=True)
    drawing.text(OURS_X + BOX / 2, 20, "sgl_ragged", 14, "ours", "middle", bold=True)
    for index, (name, host, ours) in enumerate(STEPS):
        y = TOP + index * PITCH
        drawing.text(14, y + HEIGHT / 2 + 5, name, 14, bold=True)
        for x, words, colour in ((HOST_X, host, "host"), (OURS_X, ours, "ours")):
            if words:
                drawing.rect(x, y, BOX, HEIGHT, f"{colour}-wash", colour, radius=6)
                first = y + HEIGHT / 2 - (len(words) - 1) * 8 + 4.5
                drawing.lines(x + BOX / 2, first, words, 12.5, "ink", "middle")
        if host and ours:
            drawing.arrow([(HOST_X + BOX, y + HEIGHT / 2), (OURS_X - 2, y + HEIGHT / 2)])
    _down(drawing)
    return drawing.render()


def _middle(step: int) -> float:
    return TOP + (step - 1) * PITCH + HEIGHT / 2


def _down(drawing: Drawing) -> None:
    """Draw the order of the steps, and the loops of decode."""
    for step in range(1, len(STEPS)):
        y = _middle(step) + 13
        drawing.arrow([(60, y), (60, y + PITCH - 27)])
    right = OURS_X + BOX
    drawing.path([(right, _middle(5)), (LOOP_X, _middle(5)), (LOOP_X, _middle(3))], "soft")
    drawing.arrow([(LOOP_X, _middle(3)), (right + 2, _middle(3))])
    drawing.lines(LOOP_X - 72, _middle(4) - 2, ("next token", "or chunk"), 12, "soft")
    drawing.text(right + 10, _middle(6) + 4, "in steps 3 and 4", 12, "soft")
    drawing.path([(right - BOX / 2, _middle(6) + HEIGHT / 2), (right - BOX / 2, _middle(7))], "soft")
    drawing.arrow([(right - BOX / 2, _middle(7)), (HOST_X + BOX + 2, _middle(7))])
    drawing.text(right - BOX / 2 + 8, _middle(7) + 4, "a sealed segment is a page", 12, "soft")
