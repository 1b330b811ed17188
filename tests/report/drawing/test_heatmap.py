"""Heat maps, read back from their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.report.drawing import canvas
from phalanx.report.drawing.heatmap import COLORS, Heatmap, axis_ticks, color, save_picture, svg
from phalanx.spec.errors import UserError
from tests.helpers.svg_elements import SVG_NAMESPACE, elements_of_class

TRAFFIC_BYTES = np.array([[0.0, 5e9, 0.0, 1e6], [5e9, 0.0, 0.0, 0.0], [0.0, 2.5e3, 0.0, 5e9], [0.0, 0.0, 5e9, 0.0]])
HEATMAP = Heatmap("dp 2 < tp 2 & more", TRAFFIC_BYTES, node=2)


def lightness(text: str) -> float:
    red, green, blue = (int(text[index : index + 2], 16) for index in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_heatmap_draws_one_cell_per_communicating_pair() -> None:
    root = ElementTree.fromstring(svg(HEATMAP))
    assert root.tag == f"{SVG_NAMESPACE}svg"
    page = elements_of_class(svg(HEATMAP), "none")[0]
    left, top, side = (float(page.attrib[key]) for key in ("x", "y", "width"))
    cells = {}
    for cell in elements_of_class(svg(HEATMAP), "cell"):
        x, y, width = (float(cell.attrib[key]) for key in ("x", "y", "width"))
        assert width == pytest.approx(side / 4)
        pair = round((y - top) / width), round((x - left) / width)
        cells[pair] = cell.findtext(f"{SVG_NAMESPACE}title")
    assert cells == {
        (0, 1): "rank 0 to rank 1: 5 GB",
        (0, 3): "rank 0 to rank 3: 1 MB",
        (1, 0): "rank 1 to rank 0: 5 GB",
        (2, 1): "rank 2 to rank 1: 2.5 kB",
        (2, 3): "rank 2 to rank 3: 5 GB",
        (3, 2): "rank 3 to rank 2: 5 GB",
    }


def test_heatmap_colors_maximum_darkest_and_labels_legend() -> None:
    fills = {
        cell.findtext(f"{SVG_NAMESPACE}title"): cell.attrib["fill"] for cell in elements_of_class(svg(HEATMAP), "cell")
    }
    assert fills["rank 0 to rank 1: 5 GB"] == COLORS[-1]
    assert fills["rank 2 to rank 1: 2.5 kB"] == COLORS[0]
    labels = [element.text for element in elements_of_class(svg(HEATMAP), "bytes")]
    assert (labels[0], labels[-1], len(labels)) == ("2.5 kB", "5 GB", 5)


@given(st.floats(1, 1e15), st.floats(1, 1e15))
def test_heatmap_color_darkens_monotonically_with_bytes(one: float, other: float) -> None:
    limits = 1.0, 1e15
    fewer_bytes, more_bytes = sorted((one, other))
    assert lightness(color(more_bytes, limits)) <= lightness(color(fewer_bytes, limits)) + 1  # rounding of channels


def test_heatmap_color_scale_has_one_step_per_power_of_ten() -> None:
    assert [color(10.0**power, (1.0, 1e9)) for power in range(10)] == list(COLORS)


def test_heatmap_draws_lines_at_node_boundaries() -> None:
    assert len(elements_of_class(svg(HEATMAP), "node")) == 3
    assert len(elements_of_class(svg(Heatmap("", TRAFFIC_BYTES)), "node")) == 2
    assert len(elements_of_class(svg(Heatmap("", np.ones((6, 6)), node=4)), "node")) == 3


def test_heatmap_page_escapes_title_and_fetches_nothing() -> None:
    assert "dp 2 &lt; tp 2 &amp; more" in svg(HEATMAP)
    page = canvas.page(HEATMAP.title, svg(HEATMAP))
    assert page.startswith("<!doctype html>")
    assert page.count('class="cell"') == 6
    assert "<title>dp 2 &lt; tp 2 &amp; more</title>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


@pytest.mark.parametrize("traffic_bytes", [np.zeros((2, 2)), np.array([[0.0, 7.0], [7.0, 0.0]]), np.zeros((1, 1))])
def test_heatmap_supports_zero_or_uniform_traffic(traffic_bytes: Any, tmp_path: Path) -> None:
    heat = Heatmap("few", traffic_bytes, "node")
    assert len(elements_of_class(svg(heat), "cell")) == np.count_nonzero(traffic_bytes)
    save_picture(heat, tmp_path / "few.png")
    assert (tmp_path / "few.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@given(st.integers(1, 5000), st.integers(0, 72))
def test_heatmap_axis_ticks_are_at_most_20_and_on_node_boundaries(count: int, node: int) -> None:
    ticks = axis_ticks(count, node)
    assert ticks[0] == 0
    assert ticks[-1] < count
    assert len(ticks) <= 20
    if count > 20 and node > 1:
        assert all(tick % node == 0 for tick in ticks)


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_heatmap_save_picture_writes_svg_html_and_png(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"heat{suffix}"
    save_picture(HEATMAP, file)
    start = {".svg": b"<svg ", ".html": b"<!doctype", ".png": b"\x89PNG"}[suffix]
    assert file.read_bytes().startswith(start)


def test_heatmap_save_picture_raises_user_error_for_unwritable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"use \.svg, \.html or \.png"):
        save_picture(HEATMAP, tmp_path / "heat.gif")
    with pytest.raises(UserError, match="cannot be written"):
        save_picture(HEATMAP, tmp_path / "nowhere" / "heat.svg")
    monkeypatch.setattr(canvas, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[draw\]'"):
        save_picture(HEATMAP, tmp_path / "heat.png")
