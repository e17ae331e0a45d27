"""SVG elements for diagrams and charts: rectangles, lines, arrows, text, in colours for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

WIDTH = 800
"""Width of every picture. GitHub shows it unscaled on a usual window, so font sizes are pixels."""

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

PALETTE = {
    # name: (light, dark)
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#57606a", "#9da7b3"),
    "rule": ("#d0d7de", "#3d444d"),
    "ours": ("#0969da", "#58a6ff"),
    "host": ("#b35900", "#e3964a"),
    "third": ("#7d4fc4", "#b794f4"),
    "fourth": ("#11796a", "#4fc7b0"),
    "loss": ("#c9302c", "#ff7b72"),
    "plain": ("#6e7781", "#8b949e"),
    "ours-wash": ("#dbeafe", "#13304f"),
    "host-wash": ("#fdebd3", "#41290f"),
    "plain-wash": ("#eef1f4", "#21262d"),
}
"""Colours by role: `ours` is the plugin, `host` is SGLang. A wash is the fill of a box with an outline."""


def number(value: float) -> str:
    """Format a coordinate with one decimal, without a trailing zero."""
    return f"{value:.1f}".removesuffix(".0")


def style() -> str:
    """Return the style sheet: one class per colour as fill (`f-NAME`) and as stroke (`s-NAME`), light and dark."""

    def rules(column: int) -> str:
        return "".join(
            f".f-{name}{{fill:{both[column]}}}.s-{name}{{stroke:{both[column]}}}" for name, both in PALETTE.items()
        )

    base = f"text{{font-family:{FONT}}}.n{{fill:none}}.b{{font-weight:600}}"
    return f"<style>{base}{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"


class Drawing:
    """Elements of one picture in drawing order.

    Args:
        height: in pixels; the width is WIDTH.
        title: what the picture shows, for readers who cannot see it.
    """

    def __init__(self, height: float, title: str) -> None:
        self.height = height
        self.title = title
        self._elements: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str | None = None,
        stroke: str | None = None,
        radius: float = 0,
        dashed: bool = False,
        opacity: float = 1,
    ) -> None:
        """Draw a rectangle. Colours are names of PALETTE; None draws no fill or no outline."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        more = f' rx="{number(radius)}"' if radius else ""
        self._elements.append(f"<rect {place}{more}{self._paint(fill, stroke, 1.5, dashed)}{_opacity(opacity)}/>")

    def circle(self, x: float, y: float, radius: float, fill: str | None, stroke: str | None = None) -> None:
        place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
        self._elements.append(f"<circle {place}{self._paint(fill, stroke, 2, False)}/>")

    def path(
        self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1.5, dashed: bool = False
    ) -> None:
        """Draw straight lines through the points."""
        places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._elements.append(f'<polyline points="{places}"{self._paint(None, stroke, width, dashed)}/>')

    def line(
        self, x: float, y: float, to_x: float, to_y: float, stroke: str, width: float = 1.5, dashed: bool = False
    ) -> None:
        self.path([(x, y), (to_x, to_y)], stroke, width, dashed)

    def arrow(self, points: Sequence[tuple[float, float]], stroke: str = "soft", dashed: bool = False) -> None:
        """Draw straight lines through the points and a head at the last one."""
        self.path(points, stroke, dashed=dashed)
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        corners = [(x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x, y), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)]
        places = " ".join(f"{number(a)},{number(b)}" for a, b in corners)
        self._elements.append(f'<polygon points="{places}" class="f-{stroke}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Write one line; y is its baseline. anchor: start, middle or end of the line is at x."""
        where = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
        end = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._elements.append(f'<text {where}{end} class="f-{colour}{" b" if bold else ""}">{escape(words)}</text>')

    def lines(
        self,
        x: float,
        y: float,
        words: Sequence[str],
        size: float = 13,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Write lines below each other; y is the first baseline."""
        for number_of_line, line in enumerate(words):
            self.text(x, y + number_of_line * size * 1.3, line, size, colour, anchor, bold)

    def box(self, x: float, y: float, width: float, height: float, words: Sequence[str], colour: str) -> None:
        """Draw a rounded box with centred lines. colour: `ours`, `host` or `plain`; the first line is bold."""
        self.rect(x, y, width, height, f"{colour}-wash", colour, radius=6)
        first = y + height / 2 - (len(words) - 1) * 17 / 2 + 4.5
        for index, line in enumerate(words):
            bold = index == 0
            self.text(x + width / 2, first + index * 17, line, 13 if bold else 12, "ink", "middle", bold)

    def render(self) -> str:
        """Return the file's contents."""
        size = f'width="{WIDTH}" height="{number(self.height)}" viewBox="0 0 {WIDTH} {number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(self.title)}>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", style(), *self._elements, "</svg>", ""])

    @staticmethod
    def _paint(fill: str | None, stroke: str | None, width: float, dashed: bool) -> str:
        classes = [f"f-{fill}" if fill else "n"] + ([f"s-{stroke}"] if stroke else [])
        outline = f' stroke-width="{number(width)}"' if stroke else ""
        return f' class="{" ".join(classes)}"{outline}' + (' stroke-dasharray="5 4"' if dashed else "")


def _opacity(share: float) -> str:
    return "" if share == 1 else f' fill-opacity="{share:.2f}"'
