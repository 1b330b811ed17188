"""Pictures as files: SVG and HTML without dependencies, and PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package
from phalanx.spec.formatting import WRITTEN_BY

INK = "#222222"
DOTS_PER_INCH = 100
"""Picture units per inch of a PNG, which has a higher resolution."""


@dataclass(frozen=True)
class Region:
    """A filled rectangle with a tooltip."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    fill: str
    tooltip: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text; the anchor is the start, the middle or the end of its base line."""

    kind: str
    x: float
    y: float
    content: str
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = 11
    bold: bool = False
    fill: str = INK


Shape = Region | Label


def check_picture_file(file: Path, option: str) -> None:
    """Raise UserError, which names `option`, if a picture cannot have this file name.

    The format follows from the suffix: .svg, .html or .png. Other suffixes are errors, and so is .png without
    matplotlib.
    """
    if file.suffix not in (".svg", ".html", ".png"):
        raise UserError(option, str(file), "has an unknown suffix", fix="use .svg, .html or .png")
    if file.suffix == ".png" and find_spec("matplotlib") is None:
        raise missing_package(option, str(file), "matplotlib", instead="use .svg or .html")


def save_picture(file: Path, option: str, title: str, svg: Callable[[], str], draw: Callable[[Any], None]) -> None:
    """Write a picture in the format of the file's suffix; `draw` draws it on a figure of matplotlib.

    Raises UserError if the suffix is invalid (`check_picture_file`), or the file cannot be written.
    """
    check_picture_file(file, option)
    try:
        if file.suffix == ".png":
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

            figure = Figure()
            FigureCanvasAgg(figure)
            draw(figure)
            figure.savefig(file, dpi=1.5 * DOTS_PER_INCH, metadata={"Software": WRITTEN_BY})
        else:
            file.write_text(svg() if file.suffix == ".svg" else page(title, svg()), encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(file), f"cannot be written: {error.strerror}", fix="use a writable path") from None


def document(width: float, height: float, marks: Iterable[str]) -> str:
    """Return SVG elements as a standalone picture on a white background; lengths are in pixels."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="11" fill="{INK}">'
    )
    background = f'<rect class="page" width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<!-- {WRITTEN_BY} -->", background, *marks, "</svg>\n"])


def page(title: str, svg: str) -> str:
    """Return an HTML page with a picture as wide as the window."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body{margin:1em;font-family:sans-serif}svg{max-width:100%;height:auto}"
        "rect:has(title):hover{stroke:#d6336c;stroke-width:2}</style></head>\n"
        f"<body>\n{svg}</body></html>\n"
    )


def element(mark: Shape) -> str:
    """Return a shape as an SVG element."""
    if isinstance(mark, Label):
        weight = ' font-weight="bold"' if mark.bold else ""
        return (
            f'<text class="{mark.kind}" x="{mark.x:.6g}" y="{mark.y:.6g}" text-anchor="{mark.anchor}" '
            f'font-size="{mark.size:g}" fill="{mark.fill}"{weight}>{escape(mark.content)}</text>'
        )
    geometry = f'x="{mark.x:.6g}" y="{mark.y:.6g}" width="{mark.width:.6g}" height="{mark.height:.6g}"'
    tooltip = f"<title>{escape(mark.tooltip)}</title>" if mark.tooltip else ""
    return f'<rect class="{mark.kind}" {geometry} fill="{mark.fill}">{tooltip}</rect>'


def draw(figure: Any, width: float, height: float, marks: Iterable[Shape]) -> None:
    """Draw shapes on a figure of matplotlib, which gets the size of the picture in pixels."""
    from matplotlib.patches import Rectangle

    figure.set_size_inches(width / DOTS_PER_INCH, height / DOTS_PER_INCH)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for mark in marks:
        if isinstance(mark, Region):
            axes.add_patch(Rectangle((mark.x, mark.y), mark.width, mark.height, color=mark.fill, linewidth=0))
            continue
        axes.text(
            mark.x,
            mark.y,
            mark.content,
            color=mark.fill,
            fontsize=mark.size * 72 / DOTS_PER_INCH,
            parse_math=False,
            fontweight="bold" if mark.bold else "normal",
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
        )
