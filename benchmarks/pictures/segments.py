"""How tokens become slabs: segments, budgets of heads, slabs of equal size, a prefix that two conversations share."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pictures.svg import Drawing

CELLS = 16
"""Cells drawn per segment; one stands for 16 tokens."""

CELL = 10
"""Width of a cell, in pixels."""

GAP = 20
LEFT = 150
SPAN = CELLS * CELL
OPEN_CELLS = 6
"""Cells of the open segment that hold tokens."""

KEPT = (
    # Of each head, the cells that it keeps of the first, second and third segment. The last one is always kept.
    ((0, 1, 3, 4, 6, 7, 9, 12, 15), (1, 2, 3, 6, 8, 10, 11, 13, 15), (0, 2, 5, 6, 7, 9, 12, 14, 15)),
    ((0, 15), (9, 15), (4, 15)),
    ((0, 5, 8, 13, 15), (2, 3, 7, 12, 15), (1, 6, 10, 11, 15)),
    ((0, 11, 15), (5, 6, 15), (8, 13, 15)),
)

ROW = 15
"""Height of a head's row, in pixels."""


def draw(_: Path) -> str:
    """Return the picture."""
    drawing = Drawing(
        430,
        "The tokens of a conversation are cut into segments of 256. Each head keeps its own share of every full "
        "segment. What all heads keep fills one slab of constant size, which is one page of SGLang. The open segment "
        "at the end stays uncompressed. Two conversations with the same beginning share its slabs.",
    )
    _tokens(drawing)
    _heads(drawing)
    _slabs(drawing)
    _tree(drawing)
    return drawing.render()


def segment_x(index: int) -> float:
    """Return the left edge of a segment; index 3 is the open one."""
    return LEFT + index * (SPAN + GAP)


def _step(drawing: Drawing, y: float, title: str, *words: str) -> None:
    drawing.text(8, y, title, 13, bold=True)
    drawing.lines(8, y + 17, words, 12, "soft")


def _tokens(drawing: Drawing) -> None:
    _step(drawing, 34, "Tokens", "of a conversation")
    for index in range(4):
        x, cells = segment_x(index), OPEN_CELLS if index == 3 else CELLS
        for cell in range(cells):
            drawing.rect(x + cell * CELL, 26, CELL - 1, 20, "plain", radius=2, opacity=0.55)
        words = "open segment" if index == 3 else "segment: 256 tokens"
        middle = x + cells * CELL / 2
        drawing.text(middle, 16, words, 12, "ink", "middle")
        drawing.arrow([(middle, 52), (middle, 76)])


def _heads(drawing: Drawing) -> None:
    _step(drawing, 98, "Heads keep", "their own shares", "(blue), found once", "by calibration")
    for index in range(3):
        x = segment_x(index)
        for head, kept in enumerate(KEPT):
            for cell in range(CELLS):
                y = 84 + head * ROW
                drawing.rect(x + cell * CELL, y, CELL - 1, ROW - 2, "ours" if cell in kept[index] else "plain-wash")
        drawing.arrow([(x + SPAN / 2, 150), (x + SPAN / 2, 174)])
    x = segment_x(3)
    for head in range(len(KEPT)):
        for cell in range(OPEN_CELLS):
            drawing.rect(x + cell * CELL, 84 + head * ROW, CELL - 1, ROW - 2, "ours", opacity=0.45)
    drawing.arrow([(x + OPEN_CELLS * CELL / 2, 150), (x + OPEN_CELLS * CELL / 2, 174)])


def _slabs(drawing: Drawing) -> None:
    _step(drawing, 196, "Slabs", "all of equal size:", "one slab, one page")
    counts = [len(kept[0]) for kept in KEPT]
    width = sum(counts) * 5 + 12
    for index in range(3):
        x = segment_x(index) + (SPAN - width) / 2
        drawing.rect(x, 182, width, 34, "ours-wash", "ours", radius=4)
        for row in range(sum(counts)):
            head = next(one for one in range(len(counts)) if row < sum(counts[: one + 1]))
            drawing.rect(x + 4 + row * 5 + head, 187, 4, 24, "ours", opacity=(1, 0.45)[head % 2])
        drawing.text(x + width / 2, 234, f"page {index + 1}", 12, "soft", "middle")
    middle = segment_x(3) + OPEN_CELLS * CELL / 2
    for page in (1, 0):
        drawing.rect(
            middle - width / 2 + page * 6, 182 - page * 6, width, 34, "ours-wash", "ours", radius=4, dashed=True
        )
    for cell in range(OPEN_CELLS * 2):
        drawing.rect(middle - width / 2 + 6 + cell * 8, 187, 7, 24, "ours", opacity=0.45)
    drawing.text(middle, 234, "pages, uncompressed", 12, "soft", "middle")


def _tree(drawing: Drawing) -> None:
    drawing.line(8, 254, 792, 254, "rule", 1)
    _step(drawing, 312, "Shared prefix", "SGLang's radix tree", "finds pages and", "shares them")
    lanes = (
        (286, "conversation A", "page 3", "open segment of A"),
        (366, "conversation B", "page 7", "open segment of B"),
    )
    shared_y = 326
    for index, page in enumerate(("page 1", "page 2")):
        _node(drawing, 196 + index * 120, shared_y, page, shared=True)
    drawing.arrow([(286, shared_y + 18), (314, shared_y + 18)])
    drawing.text(241, shared_y + 56, "computed and stored once", 12, "soft")
    for y, name, page, tail in lanes:
        drawing.arrow([(406, shared_y + 18), (430, shared_y + 18), (430, y + 18), (456, y + 18)])
        _node(drawing, 458, y, page, shared=False)
        drawing.arrow([(548, y + 18), (574, y + 18)])
        drawing.rect(576, y, 130, 36, "ours-wash", "ours", radius=4, dashed=True)
        drawing.text(641, y + 22, tail, 12, "ink", "middle")
        drawing.text(458, y - 8 if y < shared_y else y + 54, name, 13, "ink", bold=True)


def _node(drawing: Drawing, x: float, y: float, words: str, shared: bool) -> None:
    drawing.rect(x, y, 90, 36, "host-wash" if shared else "ours-wash", "host" if shared else "ours", radius=4)
    drawing.text(x + 45, y + 23, words, 13, "ink", "middle")
