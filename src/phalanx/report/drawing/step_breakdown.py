"""Picture of the time of a step and the memory of a rank as bars, compared with other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path

from phalanx.report.drawing import canvas
from phalanx.report.drawing.canvas import INK, Label, Region, Shape
from phalanx.spec.formatting import GIB

COLORS = {
    "compute": "#0072b2",
    "exchange": "#e69f00",
    "bubble": "#b8b8b8",
    "send": "#56b4e9",
    "data_parallel": "#d55e00",
    "update": "#009e73",
    "offload": "#f0e442",
    "waiting": "#cc79a7",
    "state": "#332288",
    "activations": "#44aa99",
    "logits": "#ddcc77",
    "buffers": "#cc6677",
}
"""Color of each part in every picture.

For time: the palette of M. Okabe and K. Ito (2008); for memory: P. Tol's muted palette (2021); both for all kinds of
color vision. Neighbors are separated by white, and the legend has their order.
"""
GRAY = "#666666"
WIDTH = 960.0
LEFT = 24.0
"""Width and margin of the picture."""
MAX_BAR_WIDTH = WIDTH - 2 * LEFT
"""Length of the longest bar."""
THICK_BAR = 30.0
THIN_BAR = 16.0
LINE = 18.0
GAP = 30.0
"""Heights of main bars, bars of other layouts, lines of text, and gaps between sections."""
DIGIT_WIDTH = 6.8
"""Maximum width of a digit in the usual size."""
COLUMN = LEFT + 472
COLUMN_STEP = 88.0
"""End of the legend's first column of numbers, and the distance between columns."""


@dataclass(frozen=True)
class Bar:
    """One bar: seconds or bytes by part."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The content of the picture."""

    title: str
    """The model, the machine, and the position of the layout."""
    layout: str
    meaning: Mapping[str, str]
    """Description of each part of a step."""
    seconds: Mapping[str, float]
    """Seconds of a step of the layout, by part."""
    other_layouts: Mapping[int, Bar]
    """Steps of other layouts, by their positions in the plan."""
    bytes: list[Bar]
    """Bytes of the layout's stages."""
    counted_bytes: float
    """Bytes of the largest rank, counted tensor by tensor; `bytes` follow the planner's formula instead."""
    memory_bytes: float
    """Memory of a device for one rank."""


def save_picture(breakdown: Breakdown, file: Path) -> None:
    """Write a picture in the format of the file's suffix: .svg, .html or .png.

    Raises UserError if the suffix is another one, the file cannot be written, or matplotlib is missing for .png.
    """
    shapes = layout_shapes(breakdown)
    height = _lowest_edge(shapes) + LEFT
    canvas.save_picture(
        file,
        "--picture",
        f"{breakdown.title}: {breakdown.layout}",
        svg=lambda: canvas.document(WIDTH, height, map(canvas.element, shapes)),
        draw=lambda figure: canvas.draw(figure, WIDTH, height, marks=shapes),
    )


def layout_shapes(breakdown: Breakdown) -> list[Shape]:
    """Return all shapes of the picture, from top to bottom."""
    shapes: list[Shape] = [
        Label("title", LEFT, 32, breakdown.title, size=15, bold=True),
        Label("layout", LEFT, 52, breakdown.layout, size=12),
    ]
    shapes += _draw_time_section(breakdown, _lowest_edge(shapes) + GAP)
    shapes += _draw_memory_section(breakdown, _lowest_edge(shapes) + GAP)
    return shapes


def _draw_time_section(breakdown: Breakdown, top: float) -> Iterator[Shape]:
    """Yield a step of the layout, and steps of others for comparison."""
    bars = [Bar("this layout", breakdown.seconds)]
    bars += [Bar(f"{position}. {bar.name}", bar.parts) for position, bar in breakdown.other_layouts.items()]
    unit, unit_scale = ("s", 1.0) if max(bar.total for bar in bars) >= 1 else ("ms", 1e3)
    bars = [Bar(bar.name, {part: unit_scale * seconds for part, seconds in bar.parts.items()}) for bar in bars]
    main_bar = bars[0]
    longest = max(bar.total for bar in bars)

    def describe_time(part: str, time: float, total: float) -> tuple[str, str]:
        return f"{time / total:.1%}", f"{breakdown.meaning[part]}: {time:.3f} {unit}, {time / total:.1%}"

    yield Label("section", LEFT, top, f"time of a step, {unit}", size=12, bold=True)
    for bar in bars:
        is_main = bar is main_bar
        top += LINE + 2
        difference = "" if is_main else f" ({bar.total / main_bar.total - 1:+.1%})"
        yield Label("name", LEFT, top, bar.name, bold=is_main)
        total = f"{bar.total:.3f} {unit}{difference}"
        yield Label("total", LEFT + MAX_BAR_WIDTH, top, total, anchor="end", bold=is_main)
        thickness = THICK_BAR if is_main else THIN_BAR
        top += 5
        yield from _draw_bar("time", bar, top, thickness, scale=MAX_BAR_WIDTH / longest, describe_part=describe_time)
        top += thickness
    yield from _draw_axis(longest, top)
    columns = (unit, "share", *(f"more in {position}" for position in breakdown.other_layouts))
    rows = {
        part: (f"{time:.3f}", f"{time / main_bar.total:.1%}", *(f"{bar.parts[part] - time:+z.3f}" for bar in bars[1:]))
        for part, time in main_bar.parts.items()
    }
    yield from _draw_legend(breakdown.meaning, columns, rows, top=top + 2 * LINE + 10)


def _draw_memory_section(breakdown: Breakdown, top: float) -> Iterator[Shape]:
    """Yield the memory of the layout's stages, and the memory of a device for one rank."""
    max_bytes = max(breakdown.memory_bytes, breakdown.counted_bytes, *(bar.total for bar in breakdown.bytes))
    scale = MAX_BAR_WIDTH / max_bytes

    def describe_bytes(part: str, size_bytes: float, total: float) -> tuple[str, str]:
        return f"{size_bytes / GIB:.1f}", f"{part}: {size_bytes / GIB:.2f} GiB, {size_bytes / total:.1%}"

    yield Label("section", LEFT, top, "memory of a rank, GiB", size=12, bold=True)
    section_top = top = top + 2 * LINE
    names = []
    for bar in breakdown.bytes:
        top += LINE + 2
        text = f"{bar.name}: {bar.total / GIB:.2f} GiB by the planner's formula"
        names.append(Label("name", LEFT, top, text))
        yield from _draw_bar("memory", bar, top + 5, thickness=THICK_BAR, scale=scale, describe_part=describe_bytes)
        top += 5 + THICK_BAR
    yield from _draw_memory_line(
        "limit", breakdown.memory_bytes, "of the device for a rank", scale, section_top - LINE, top
    )
    counted_text = "on the largest rank, counted tensor by tensor"
    yield from _draw_memory_line("counted", breakdown.counted_bytes, counted_text, scale, section_top, top)
    for name in names:
        width = len(name.content) * DIGIT_WIDTH
        yield Region("behind", name.x, name.y - 11, width, 14, "#ffffff")
        yield name
    yield from _draw_axis(max_bytes / GIB, top)
    parts = {part: part for part in breakdown.bytes[0].parts}
    rows = {part: tuple(f"{bar.parts[part] / GIB:.2f}" for bar in breakdown.bytes) for part in parts}
    yield from _draw_legend(parts, tuple(bar.name for bar in breakdown.bytes), rows, top=top + 2 * LINE + 10)


def _draw_bar(
    kind: str,
    bar: Bar,
    y: float,
    thickness: float,
    scale: float,
    describe_part: Callable[[str, float, float], tuple[str, str]],
) -> Iterator[Shape]:
    """Yield a bar's parts side by side; `describe_part` returns the label and the tooltip of a part."""
    x = LEFT
    for part, value in bar.parts.items():
        width = value * scale
        (label, tooltip) = describe_part(part, value, bar.total)
        fill = COLORS[part]
        gap = 1 if width > 2 else 0
        yield Region(kind, x, y, width - gap, thickness, fill, tooltip=tooltip)
        if width > (len(label) + 1) * DIGIT_WIDTH:
            middle = y + thickness / 2 + 4
            ink = _readable_text_color(fill)
            yield Label(f"{kind}-label", x + width / 2, middle, label, anchor="middle", fill=ink)
        x += width


def _draw_memory_line(
    kind: str, size_bytes: float, text: str, scale: float, top: float, bottom: float
) -> Iterator[Shape]:
    """Yield a vertical line at an amount of memory, with a label at its top, on the side with space."""
    x = LEFT + size_bytes * scale
    color = INK if kind == "limit" else GRAY
    yield Region(kind, x - 1, top - 10, 2, bottom - top + 14, color)
    content = f"{size_bytes / GIB:.1f} GiB {text}"
    if x > WIDTH / 2:
        yield Label(kind, x - 6, top, content, anchor="end")
    else:
        yield Label(kind, x + 6, top, content)


def _draw_axis(max_value: float, y: float) -> Iterator[Shape]:
    """Yield the numbers below bars whose maximum is `max_value`."""
    for number in axis_ticks(max_value):
        x = LEFT + number / max_value * MAX_BAR_WIDTH
        yield Region("tick", x - 0.5, y + 3, 1, 4, GRAY)
        yield Label("number", x, y + 19, f"{number:g}", anchor="middle", fill=GRAY)


def axis_ticks(max_value: float, count: int = 10) -> list[float]:
    """Return about `count` round numbers from 0 to the maximum."""
    rough = max_value / count
    power = 10.0 ** floor(log10(rough))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough)
    return [number * step for number in range(int(max_value / step) + 1)]


def _draw_legend(
    names: Mapping[str, str], columns: tuple[str, ...], rows: Mapping[str, tuple[str, ...]], top: float
) -> Iterator[Shape]:
    """Yield the color, the meaning and the numbers of each part, including parts too small to be visible."""
    for index, column in enumerate(columns):
        yield Label("column", COLUMN + index * COLUMN_STEP, top, column, anchor="end", fill=GRAY)
    for part, numbers in rows.items():
        top += LINE
        yield Region("legend", LEFT, top - 10, 12, 12, COLORS[part])
        yield Label("part", LEFT + 20, top, names[part])
        for index, number in enumerate(numbers):
            yield Label("figure", COLUMN + index * COLUMN_STEP, top, number, anchor="end")


def _readable_text_color(fill: str) -> str:
    """Return a text color that is readable on a background color."""
    red, green, blue = (int(fill[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 100 else "#ffffff"


def _lowest_edge(shapes: list[Shape]) -> float:
    """Return the bottom of the lowest shape."""
    return max(mark.y + (mark.height if isinstance(mark, Region) else 0.0) for mark in shapes)
