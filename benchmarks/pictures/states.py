"""States of a segment: open, pending, sealed, kept open."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pictures.svg import Drawing

WIDTH, HEIGHT = 158, 60


def draw(_: Path) -> str:
    """Return the picture."""
    drawing = Drawing(
        256,
        "States of a segment. Open: uncompressed in pages. When its last token is committed it is sealed: at once in "
        "prefill; after decode it is pending until the next batch begins. Sealed: immutable slab, until SGLang frees "
        "the page. When a request ends, or a prompt is computed, the open segment is kept as cache: a later request "
        "gets a copy, or it is evicted.",
    )
    drawing.box(120, 74, WIDTH, HEIGHT, ("open", "pages, uncompressed"), "ours")
    drawing.box(370, 74, WIDTH, HEIGHT, ("pending", "the same pages"), "ours")
    drawing.box(620, 74, WIDTH, HEIGHT, ("sealed", "slab, immutable"), "ours")
    drawing.box(120, 182, WIDTH, HEIGHT, ("kept open", "cached, uncompressed"), "ours")
    drawing.text(8, 100, "tokens come", 12, "soft")
    drawing.arrow([(8, 108), (118, 108)])

    drawing.arrow([(278, 108), (368, 108)])
    drawing.lines(323, 84, ("decode", "fills it"), 12, "soft", "middle")
    drawing.arrow([(528, 108), (618, 108)])
    drawing.lines(573, 84, ("next batch", "begins"), 12, "soft", "middle")
    drawing.arrow([(199, 74), (199, 24), (699, 24), (699, 72)])
    drawing.text(449, 16, "prefill fills it", 12, "soft", "middle")

    drawing.arrow([(170, 134), (170, 180)])
    drawing.lines(162, 154, ("prompt done or", "request ends"), 12, "soft", "end")
    drawing.arrow([(228, 182), (228, 136)])
    drawing.lines(237, 154, ("prefix hit:", "a copy goes on"), 12, "soft")
    drawing.arrow([(278, 212), (368, 212)])
    drawing.text(376, 216, "evicted, before any page of the tree", 12, "soft")
    drawing.arrow([(699, 134), (699, 170)])
    drawing.lines(699, 186, ("SGLang's tree shares it,", "evicts it, frees the page"), 12, "soft", "middle")
    return drawing.render()
