"""The picture of a step's time and memory, read back and compared with its input."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.search.explain import PART_DESCRIPTIONS
from phalanx.report.drawing import canvas
from phalanx.report.drawing.canvas import Label, Region, check_picture_file
from phalanx.report.drawing.step_breakdown import (
    COLORS,
    LEFT,
    MAX_BAR_WIDTH,
    Bar,
    Breakdown,
    axis_ticks,
    layout_shapes,
    save_picture,
)
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import GIB
from tests.helpers.svg_elements import SVG_NAMESPACE, elements_of_class, texts_of_class

STEP_SECONDS = {"compute": 6.0, "exchange": 2.0, "bubble": 1.5, "send": 0.001, "data_parallel": 0.499, "update": 0.0}
SLOWER_STEP_SECONDS = {**STEP_SECONDS, "bubble": 4.0, "update": 0.25}
MEMORY_BYTES = {"state": 20.0 * GIB, "activations": 30.0 * GIB, "logits": 0.0, "buffers": 2.5 * GIB}
BREAKDOWN = Breakdown(
    title="llama <8b> on 16 x h100, layout 1",
    layout="zero1 dp 16 & more",
    meaning={part: f"the {part}" for part in STEP_SECONDS},
    seconds=STEP_SECONDS,
    other_layouts={2: Bar("ddp dp 16", SLOWER_STEP_SECONDS)},
    bytes=[Bar("first stage", MEMORY_BYTES), Bar("last stage", {**MEMORY_BYTES, "logits": 1.0 * GIB})],
    counted_bytes=60.0 * GIB,
    memory_bytes=80.0 * GIB,
)


def render_svg(breakdown: Breakdown, folder: Path) -> str:
    save_picture(breakdown, folder / "step.svg")
    return (folder / "step.svg").read_text()


def tooltips_of_class(text: str, name: str) -> list[str | None]:
    return [element.findtext(f"{SVG_NAMESPACE}title") for element in elements_of_class(text, name)]


def test_step_breakdown_shows_seconds_and_share_of_each_part(tmp_path):
    text = render_svg(BREAKDOWN, tmp_path)
    for parts, texts in (
        (STEP_SECONDS, tooltips_of_class(text, "time")[: len(STEP_SECONDS)]),
        (SLOWER_STEP_SECONDS, tooltips_of_class(text, "time")[len(STEP_SECONDS) :]),
    ):
        step = sum(parts.values())
        assert texts == [f"the {part}: {value:.3f} s, {value / step:.1%}" for part, value in parts.items()]
    assert texts_of_class(text, "total") == ["10.000 s", "12.750 s (+27.5%)"]
    assert texts_of_class(text, "section") == ["time of a step, s", "memory of a rank, GiB"]
    assert texts_of_class(text, "time-label") == ["60.0%", "20.0%", "15.0%", "5.0%", "47.1%", "15.7%", "31.4%", "3.9%"]


def test_step_breakdown_legend_lists_parts_too_small_to_draw(tmp_path):
    text = render_svg(BREAKDOWN, tmp_path)
    assert texts_of_class(text, "column") == ["s", "share", "more in 2", "first stage", "last stage"]
    assert texts_of_class(text, "part") == [*(f"the {part}" for part in STEP_SECONDS), *MEMORY_BYTES]
    figures = texts_of_class(text, "figure")
    assert figures[6:12] == ["1.500", "15.0%", "+2.500", "0.001", "0.0%", "+0.000"]
    assert figures[18:] == ["20.00", "20.00", "30.00", "30.00", "0.00", "1.00", "2.50", "2.50"]


def test_step_breakdown_draws_memory_against_device_limit(tmp_path):
    text = render_svg(BREAKDOWN, tmp_path)
    assert tooltips_of_class(text, "memory")[:2] == ["state: 20.00 GiB, 38.1%", "activations: 30.00 GiB, 57.1%"]
    assert texts_of_class(text, "limit")[-1] == "80.0 GiB of the device for a rank"
    assert texts_of_class(text, "counted")[-1] == "60.0 GiB on the largest rank, counted tensor by tensor"
    middle = {name: float(elements_of_class(text, name)[0].attrib["x"]) + 1 for name in ("limit", "counted")}
    assert middle == {"limit": LEFT + MAX_BAR_WIDTH, "counted": LEFT + 0.75 * MAX_BAR_WIDTH}


def test_step_breakdown_bar_lengths_are_proportional_to_seconds():
    bars = [mark for mark in layout_shapes(BREAKDOWN) if isinstance(mark, Region) and mark.kind == "time"]
    bars_of_layout, bars_of_other = bars[: len(STEP_SECONDS)], bars[len(STEP_SECONDS) :]
    for drawn_bars, parts in ((bars_of_layout, STEP_SECONDS), (bars_of_other, SLOWER_STEP_SECONDS)):
        assert [mark.fill for mark in drawn_bars] == [COLORS[part] for part in parts]
        starts = [mark.x for mark in drawn_bars] + [LEFT + sum(parts.values()) / 12.75 * MAX_BAR_WIDTH]
        assert [after - start for start, after in pairwise(starts)] == pytest.approx(
            [value / 12.75 * MAX_BAR_WIDTH for value in parts.values()]
        )


def test_step_breakdown_colors_are_unique_and_cover_all_parts():
    assert set(PART_DESCRIPTIONS) < set(COLORS)
    assert len(set(COLORS.values())) == len(COLORS)


def test_step_breakdown_uses_milliseconds_for_short_steps(tmp_path):
    short = {part: value / 1e3 for part, value in STEP_SECONDS.items()}
    text = render_svg(replace(BREAKDOWN, seconds=short, other_layouts={}), tmp_path)
    assert texts_of_class(text, "total") == ["10.000 ms"]
    assert tooltips_of_class(text, "time")[0] == "the compute: 6.000 ms, 60.0%"
    assert texts_of_class(text, "column")[:3] == ["ms", "share", "first stage"]


def test_step_breakdown_labels_stay_inside_and_do_not_overlap():
    """Widths are those of matplotlib's font, which is wider than browsers' fonts."""
    textpath = pytest.importorskip("matplotlib.textpath")
    long = "hsdp of 128 dp 1024, tp 8, cp 16 ulysses, ep 8, pp 16 interleaved x 8, micro-batch 1 x 4096, recompute full"
    compared = {number: Bar(long, SLOWER_STEP_SECONDS) for number in (102, 103, 104, 105)}
    for num_counted in (1, 20, 79):
        breakdown = replace(
            BREAKDOWN, layout=long, meaning=PART_DESCRIPTIONS, other_layouts=compared, counted_bytes=num_counted * GIB
        )
        boxes = []
        for mark in layout_shapes(breakdown):
            if isinstance(mark, Label):
                weight = "bold" if mark.bold else "normal"
                width = textpath.TextPath((0, 0), mark.content, mark.size, prop={"weight": weight}).get_extents().width
                left = mark.x - {"start": 0, "middle": width / 2, "end": width}[mark.anchor]
                assert left >= 0, mark
                assert left + width <= MAX_BAR_WIDTH + 2 * LEFT, mark
                boxes.append((mark.y, left, left + width, mark))
        for at, (y, left, right, mark) in enumerate(boxes):
            for other, begin, end, cover in boxes[:at]:
                assert abs(y - other) >= 11 or right <= begin or end <= left, (mark, cover)


@given(st.floats(1e-6, 1e9))
def test_step_breakdown_axis_ticks_are_5_to_11_within_maximum(maximum: float) -> None:
    ticks = axis_ticks(maximum)
    assert ticks[0] == 0
    assert ticks[-1] <= maximum
    assert 5 <= len(ticks) <= 11


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_step_breakdown_save_picture_writes_svg_html_and_png(suffix, tmp_path):
    file = tmp_path / f"step{suffix}"
    save_picture(BREAKDOWN, file)
    start = {".svg": b"<svg ", ".html": b"<!doctype", ".png": b"\x89PNG"}[suffix]
    assert file.read_bytes().startswith(start)
    if suffix != ".png":
        text = file.read_text()
        assert "zero1 dp 16 &amp; more" in text
        assert "llama &lt;8b&gt; on 16 x h100" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
        assert text.count('class="time"') == 2 * len(STEP_SECONDS)


def test_check_picture_file_rejects_bad_suffix_and_missing_matplotlib(monkeypatch):
    with pytest.raises(UserError, match=r"--picture(.|\n)*use \.svg, \.html or \.png"):
        check_picture_file(Path("step.gif"), "--picture")
    monkeypatch.setattr(canvas, "find_spec", lambda name: None)
    check_picture_file(Path("step.svg"), "--picture")
    with pytest.raises(UserError, match=r"pip install '\.\[draw\]'"):
        check_picture_file(Path("step.png"), "--picture")
