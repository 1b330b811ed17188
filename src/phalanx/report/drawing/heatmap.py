"""A matrix of bytes as a heat map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.report.drawing import canvas
from phalanx.report.drawing.canvas import INK, document
from phalanx.spec.formatting import format_bytes

COLOURS = ("#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878", "#440154")
"""Viridis from light (few bytes) to dark (many): even steps of lightness, for all kinds of colour vision (N. Smith and
S. van der Walt, 2015; matplotlib's default)."""
NOTHING = "#f3f3f3"
SIDE, LEFT, TOP, RIGHT, BOTTOM = 640.0, 70.0, 64.0, 130.0, 20.0
"""Of the square of cells and the margins, in pixels."""
STEPS = 60
"""Of the legend's bar."""


@dataclass(frozen=True)
class Heatmap:
    """What is drawn: bytes from each to each, the sender in the row and the receiver in the column."""

    title: str
    bytes: NDArray[np.float64]
    unit: str = "rank"
    """What sends: rows and columns are numbered."""
    node: int = 0
    """Rows of a node, between which lines are drawn; 0 draws none."""

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the most of what is sent at all; (1, 1) where nothing is."""
        sent = self.bytes[self.bytes > 0]
        return (float(sent.min()), float(sent.max())) if len(sent) else (1.0, 1.0)


def colour(number: float, limits: tuple[float, float]) -> str:
    """On a logarithmic scale: traffic of ranks that share products is often a thousand times that of others."""
    least, most = limits
    place = log10(number / least) / log10(most / least) if most > least else 1.0
    at = min(max(place, 0.0), 1.0) * (len(COLOURS) - 1)
    below = min(int(at), len(COLOURS) - 2)
    one, other = (_channels(COLOURS[index]) for index in (below, below + 1))
    mixed = (round(a + (b - a) * (at - below)) for a, b in zip(one, other, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(text: str) -> tuple[int, ...]:
    return tuple(int(text[at : at + 2], 16) for at in (1, 3, 5))


def svg(heat: Heatmap) -> str:
    """A picture that stands alone; under the mouse a cell says who sends how much. Those of no bytes are not drawn."""
    none = f'<rect class="none" x="{LEFT:g}" y="{TOP:g}" width="{SIDE:g}" height="{SIDE:g}" fill="{NOTHING}"/>'
    marks = [none, *_cells(heat), *_lines(heat), *_labels(heat), *_legend(heat)]
    return document(LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM, marks)


def _cells(heat: Heatmap) -> Iterator[str]:
    each, limits = SIDE / len(heat.bytes), heat.limits
    for source, target in np.argwhere(heat.bytes > 0).tolist():
        number = float(heat.bytes[source, target])
        said = f"{heat.unit} {source} to {heat.unit} {target}: {format_bytes(number)}"
        yield (
            f'<rect class="cell" x="{LEFT + target * each:.6g}" y="{TOP + source * each:.6g}" width="{each:.6g}" '
            f'height="{each:.6g}" fill="{colour(number, limits)}"><title>{escape(said)}</title></rect>'
        )


def _lines(heat: Heatmap) -> Iterator[str]:
    """Around all cells, and between nodes."""
    count = len(heat.bytes)
    for at in {0, count, *(range(0, count, heat.node) if heat.node > 1 else ())}:
        x, y = LEFT + at * SIDE / count, TOP + at * SIDE / count
        style = f'stroke="{INK}" stroke-width="{1 if at in (0, count) else 0.6:g}"'
        yield f'<path class="node" d="M{x:.6g} {TOP:g}v{SIDE:g}M{LEFT:g} {y:.6g}h{SIDE:g}" {style} fill="none"/>'


def _labels(heat: Heatmap) -> Iterator[str]:
    """Title, axes, and a number for every row and column that there is room for."""
    yield f'<text x="{LEFT:g}" y="20" font-size="14" font-weight="bold">{escape(heat.title)}</text>'
    yield f'<text x="{LEFT + SIDE / 2:g}" y="40" text-anchor="middle">to {escape(heat.unit)}</text>'
    middle = TOP + SIDE / 2
    turned = f'transform="rotate(-90 18 {middle:g})"'
    yield f'<text x="18" y="{middle:g}" text-anchor="middle" {turned}>from {escape(heat.unit)}</text>'
    for at in axis_ticks(len(heat.bytes), heat.node):
        place = (at + 0.5) * SIDE / len(heat.bytes)
        yield f'<text class="tick" x="{LEFT + place:.6g}" y="{TOP - 6:g}" text-anchor="middle">{at}</text>'
        yield f'<text class="tick" x="{LEFT - 6:g}" y="{TOP + place + 4:.6g}" text-anchor="end">{at}</text>'


def axis_ticks(count: int, node: int, most: int = 20) -> range:
    """At most so many rows to number: all, or the first of every node or of several, or round numbers."""
    if count <= most:
        return range(count)
    step = node if node > 1 else 5
    while count / step > most:
        step *= 2
    return range(0, count, step)


def _legend(heat: Heatmap) -> Iterator[str]:
    """A bar of colours with its bytes: the least at the bottom."""
    (least, most), x, each = heat.limits, LEFT + SIDE + 24, SIDE / STEPS
    for step in range(STEPS):
        number = least * (most / least) ** ((step + 0.5) / STEPS)
        y = TOP + SIDE - (step + 1) * each
        fill = colour(number, (least, most))
        yield f'<rect class="legend" x="{x:g}" y="{y:.6g}" width="18" height="{each + 0.5:.6g}" fill="{fill}"/>'
    for part in (0, 0.25, 0.5, 0.75, 1) if most > least else (1,):
        y = TOP + SIDE * (1 - part) + 4
        yield f'<text class="bytes" x="{x + 24:g}" y="{y:.6g}">{format_bytes(least * (most / least) ** part)}</text>'
    yield f'<text x="{x:g}" y="{TOP - 24:g}">bytes per</text><text x="{x:g}" y="{TOP - 10:g}">step (log)</text>'


def save_picture(heat: Heatmap, file: Path) -> None:
    """Write a picture: its format is the file's ending, .svg, .html or .png.

    Raises UserError for another ending, if the file cannot be written, or for .png without matplotlib.
    """
    canvas.save_picture(file, "--out", heat.title, lambda: svg(heat), lambda figure: _draw(heat, figure))


def _draw(heat: Heatmap, figure: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import FuncFormatter

    figure.set_size_inches(8.5, 7.5)
    figure.set_layout_engine("constrained")
    axes, count, (least, most) = figure.subplots(), len(heat.bytes), heat.limits
    shades = LinearSegmentedColormap.from_list("bytes", COLOURS)
    sent = np.ma.masked_less_equal(heat.bytes, 0)
    cells = axes.imshow(sent, cmap=shades, norm=LogNorm(least if most > least else most / 10, most))
    axes.set_facecolor(NOTHING)
    for at in range(heat.node, count, heat.node) if heat.node > 1 else ():
        axes.axhline(at - 0.5, color=INK, linewidth=0.6)
        axes.axvline(at - 0.5, color=INK, linewidth=0.6)
    shown = axis_ticks(count, heat.node)
    axes.set(title=heat.title, xlabel=f"to {heat.unit}", ylabel=f"from {heat.unit}", xticks=shown, yticks=shown)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    figure.colorbar(cells, label="bytes per step", format=FuncFormatter(lambda number, _: format_bytes(number)))
