"""What the page of predicted beside measured says of its goals."""

from __future__ import annotations

from benchmarks.calibration import Compared, constants_of
from phalanx.cost.constants import time_constants
from phalanx.spec.cluster import Cluster, Measured


def test_a_layout_counts_that_is_near_in_time_and_in_memory():
    def both(time: list[float], tensors: list[float]) -> str:
        return Compared("", time, tensors, []).both

    assert both([0.09] * 20 + [-0.11], [-0.05] * 20 + [0.0]).startswith("20 of 21 within both 10% of time")
    assert both([0.09] * 20, [-0.05] * 20).endswith("(target: at least 20): met")
    assert both([0.0] * 19 + [0.2, 0.0], [0.0] * 20 + [0.06]).endswith("(target: at least 20): missed")


def test_a_decided_constant_that_did_not_move_is_the_published_one():
    known = Measured(
        runs=9, precision="fp32", time={"link": 0.25}, decided=["link", "send"],
        log_half_width=0.1, process_bytes=0, memory_share=1.0,
    )  # fmt: skip
    assert constants_of(Cluster(measured=known)) == f"link 0.25, send {time_constants().send:.3g}"
