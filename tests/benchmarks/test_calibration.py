"""The calibration benchmark: targets, constants and sections of its pages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.calibration import Comparison, constants_of, write_section
from phalanx.cost.estimate.constants import time_constants
from phalanx.spec.cluster import CalibrationSpec, ClusterSpec


def test_calibration_benchmark_counts_layouts_within_time_and_memory_targets():
    def both(time: list[float], tensors: list[float]) -> str:
        return Comparison("", time, tensors, []).both

    text = both([0.09] * 20 + [-0.11], [-0.05] * 20 + [0.0])
    assert text.startswith("20 of 21 layouts are within 10% of the step time")
    assert both([0.09] * 20, [-0.05] * 20).endswith("(target: at least 20): met")
    assert both([0.0] * 19 + [0.2, 0.0], [0.0] * 20 + [0.06]).endswith("(target: at least 20): missed")


def test_calibration_benchmark_shows_default_of_unchanged_constant():
    calibration = CalibrationSpec(
        runs=9,
        precision="fp32",
        time_constants={"link": 0.25},
        identified_constants=["link", "exposed_p2p_fraction"],
        log_half_width=0.1,
        baseline_process_bytes=0,
        bytes_per_counted_byte=1.0,
    )
    assert (
        constants_of(ClusterSpec(calibration=calibration))
        == f"link 0.25, exposed_p2p_fraction {time_constants().exposed_p2p_fraction:.3g}"
    )


def test_write_section_replaces_or_appends_markdown_section(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## One\n\n1\n\n## Two\n\n2\n")
    write_section(page, "One", "first\n")
    assert page.read_text() == "# Page\n\n## One\n\nfirst\n\n## Two\n\n2\n"
    write_section(page, "Three", "third\n")
    write_section(page, "Two", "second\n")
    assert page.read_text() == "# Page\n\n## One\n\nfirst\n\n## Two\n\nsecond\n\n## Three\n\nthird\n"
