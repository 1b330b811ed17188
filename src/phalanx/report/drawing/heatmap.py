"""A matrix of bytes as a heat map."""

from __future__ import annotations

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

COLORS = ("#fde725", "#b5de2b", "#6ece58", "#35b779", "#1f9e89", "#26828e", "#31688e", "#3e4989", "#482878", "#440154")
"""Viridis from light (few bytes) to dark (many).

Its steps of lightness are even, for all kinds of color vision (N. Smith and S. van der Walt, 2015; matplotlib's
default).
"""
EMPTY_COLOR = "#f3f3f3"
SIDE = 640.0
LEFT = 70.0
TOP = 64.0
RIGHT = 130.0
BOTTOM = 20.0
"""The side of the square of cells, and the margins, in pixels."""
LEGEND_STEPS = 60
"""Number of steps in the legend's bar."""


@dataclass(frozen=True)
class Heatmap:
    """A matrix of bytes with the sender in the row and the receiver in the column."""

    title: str
    bytes: NDArray[np.float64]
    unit: str = "rank"
    """Name of a sender; rows and columns are numbered."""
    node: int = 0
    """Number of rows per node, between which lines are drawn; 0 draws none."""

    @property
    def limits(self) -> tuple[float, float]:
        """The minimum and the maximum of the nonzero bytes; (1, 1) if all are zero."""
        sent = self.bytes[self.bytes > 0]
        return (float(sent.min()), float(sent.max())) if len(sent) else (1.0, 1.0)


def color(number: float, limits: tuple[float, float]) -> str:
    """Return the color of a number of bytes on a logarithmic scale from the minimum to the maximum.

    The traffic of ranks that share products is often a thousand times that of others.
    """
    low, high = limits
    fraction = log10(number / low) / log10(high / low) if high > low else 1.0
    position = min(max(fraction, 0.0), 1.0) * (len(COLORS) - 1)
    lower = min(int(position), len(COLORS) - 2)
    mixed = ""
    for start in (1, 3, 5):
        a, b = (int(COLORS[index][start : start + 2], 16) for index in (lower, lower + 1))
        mixed += f"{round(a + (b - a) * (position - lower)):02x}"
    return f"#{mixed}"


def svg(heat: Heatmap) -> str:
    """Return a standalone picture, in which each cell has a tooltip; cells of zero bytes are not drawn."""
    count = len(heat.bytes)
    cell_side = SIDE / count
    (low, high) = heat.limits
    unit = escape(heat.unit)
    marks = [f'<rect class="none" x="{LEFT:g}" y="{TOP:g}" width="{SIDE:g}" height="{SIDE:g}" fill="{EMPTY_COLOR}"/>']
    for source, target in np.argwhere(heat.bytes > 0).tolist():
        number = float(heat.bytes[source, target])
        tooltip = f"{heat.unit} {source} to {heat.unit} {target}: {format_bytes(number)}"
        marks.append(
            f'<rect class="cell" x="{LEFT + target * cell_side:.6g}" y="{TOP + source * cell_side:.6g}" '
            f'width="{cell_side:.6g}" height="{cell_side:.6g}" fill="{color(number, (low, high))}">'
            f"<title>{escape(tooltip)}</title></rect>"
        )

    # Lines around all cells and between nodes
    for index in {0, count, *(range(0, count, heat.node) if heat.node > 1 else ())}:
        x = LEFT + index * SIDE / count
        y = TOP + index * SIDE / count
        path = f"M{x:.6g} {TOP:g}v{SIDE:g}M{LEFT:g} {y:.6g}h{SIDE:g}"
        width = 1 if index in (0, count) else 0.6
        marks.append(f'<path class="node" d="{path}" stroke="{INK}" stroke-width="{width:g}" fill="none"/>')

    # The title, the axes, and numbers of rows and columns as space permits
    middle = TOP + SIDE / 2
    rotation = f'transform="rotate(-90 18 {middle:g})"'
    marks += [
        f'<text x="{LEFT:g}" y="20" font-size="14" font-weight="bold">{escape(heat.title)}</text>',
        f'<text x="{LEFT + SIDE / 2:g}" y="40" text-anchor="middle">to {unit}</text>',
        f'<text x="18" y="{middle:g}" text-anchor="middle" {rotation}>from {unit}</text>',
    ]
    for index in axis_ticks(count, heat.node):
        offset = (index + 0.5) * SIDE / count
        marks += [
            f'<text class="tick" x="{LEFT + offset:.6g}" y="{TOP - 6:g}" text-anchor="middle">{index}</text>',
            f'<text class="tick" x="{LEFT - 6:g}" y="{TOP + offset + 4:.6g}" text-anchor="end">{index}</text>',
        ]

    # The legend: a bar of colors with its bytes, the minimum at the bottom
    x = LEFT + SIDE + 24
    height = SIDE / LEGEND_STEPS
    for step in range(LEGEND_STEPS):
        number = low * (high / low) ** ((step + 0.5) / LEGEND_STEPS)
        box = f'x="{x:g}" y="{TOP + SIDE - (step + 1) * height:.6g}" width="18" height="{height + 0.5:.6g}"'
        marks.append(f'<rect class="legend" {box} fill="{color(number, (low, high))}"/>')
    for fraction in (0, 0.25, 0.5, 0.75, 1) if high > low else (1,):
        y = TOP + SIDE * (1 - fraction) + 4
        text = format_bytes(low * (high / low) ** fraction)
        marks.append(f'<text class="bytes" x="{x + 24:g}" y="{y:.6g}">{text}</text>')
    marks.append(f'<text x="{x:g}" y="{TOP - 24:g}">bytes per</text><text x="{x:g}" y="{TOP - 10:g}">step (log)</text>')
    return document(LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM, marks)


def axis_ticks(count: int, node: int, max_ticks: int = 20) -> range:
    """Return the rows to number: all, the first of one or several nodes, or round numbers.

    `node` is the number of rows per node; 0 or 1 if rows are not ranks of nodes.
    """
    if count <= max_ticks:
        return range(count)
    step = node if node > 1 else 5
    while count / step > max_ticks:
        step *= 2
    return range(0, count, step)


def save_picture(heat: Heatmap, file: Path) -> None:
    """Write a picture in the format of the file's suffix: .svg, .html or .png.

    Raises UserError if the suffix is another one, the file cannot be written, or matplotlib is missing for .png.
    """
    canvas.save_picture(
        file, "--out", heat.title, svg=lambda: svg(heat), draw=lambda figure: _draw_matplotlib(heat, figure)
    )


def _draw_matplotlib(heat: Heatmap, figure: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import FuncFormatter

    figure.set_size_inches(8.5, 7.5)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    count = len(heat.bytes)
    (low, high) = heat.limits
    shades = LinearSegmentedColormap.from_list("bytes", COLORS)
    sent = np.ma.masked_less_equal(heat.bytes, 0)
    cells = axes.imshow(sent, cmap=shades, norm=LogNorm(low if high > low else high / 10, high))
    axes.set_facecolor(EMPTY_COLOR)
    for index in range(heat.node, count, heat.node) if heat.node > 1 else ():
        axes.axhline(index - 0.5, color=INK, linewidth=0.6)
        axes.axvline(index - 0.5, color=INK, linewidth=0.6)
    ticks = axis_ticks(count, heat.node)
    axes.set(title=heat.title, xlabel=f"to {heat.unit}", ylabel=f"from {heat.unit}", xticks=ticks, yticks=ticks)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    figure.colorbar(cells, label="bytes per step", format=FuncFormatter(lambda number, _: format_bytes(number)))
