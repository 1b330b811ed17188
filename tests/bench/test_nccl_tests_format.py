"""The table and the JSON of nccl-tests, compared with published output and read with the patterns of other tools."""

from __future__ import annotations

import json
import re

import pytest

from phalanx.bench.collectives import BenchmarkCase, BufferMode, CaseTiming, CollectiveKind
from phalanx.bench.nccl_tests_format import CaseResult, format_table, merge_ranks, to_json_document
from phalanx.cost.formulas.collectives import Operation
from tests.helpers.nccl_tests_output import AVERAGE, ROW

DEVICE = re.compile(
    r"^#\s+Rank\s+(\d+) Group\s+(\d+) Pid\s+(\d+) on\s+(\S+) device\s+(\d+) \[(.+)\] (.*)$", re.MULTILINE
)
RUN_METADATA = {
    "start_time": "2026-01-01 00:00:00",
    "end_time": "2026-01-01 00:00:01",
    "args": ["x"],
    "env": [],
    "nccl_version": 22304,
}
DEVICES = [
    {
        "rank": 0,
        "group": 0,
        "pid": 12,
        "hostname": "here",
        "device": 0,
        "device_hex": "0000:1b:00",
        "device_info": "NVIDIA H100",
    }
]


def make_case_result(
    operation: Operation, size: int, out_us: float, in_us: float, ranks: int, checked: bool = True
) -> CaseResult:
    case = BenchmarkCase(CollectiveKind(operation, "data", "bf16"), ranks, size, 1)
    seconds: dict[BufferMode, float] = {"out_of_place": out_us / 1e6, "in_place": in_us / 1e6}
    wrong: dict[BufferMode, int | None] = {"out_of_place": 0, "in_place": 0 if checked else None}
    return CaseResult(case, {buffer_mode: [value] for buffer_mode, value in seconds.items()}, seconds, wrong)


# Rows of nccl-tests on 8 GPUs (2 for send and receive): MooreThreads/SimuMax, simu_tools/efficency_test/nccl_fit.py.
REFERENCE_ROWS = [
    ("all_reduce", 8, True, "1048576 524288 bfloat16 sum -1 46.24 22.68 39.69 0 45.89 22.85 39.99 0"),
    ("all_reduce", 8, True, "268435456 134217728 bfloat16 sum -1 1090.5 246.16 430.79 0 1089.8 246.31 431.04 0"),
    ("all_gather", 8, True, "8388608 524288 bfloat16 none -1 48.87 171.67 150.21 0 49.08 170.90 149.54 0"),
    ("reduce_scatter", 8, True, "1048576 65536 bfloat16 sum -1 43.62 24.04 21.03 0 43.24 24.25 21.22 0"),
    ("all_to_all", 8, False, "8589934592 536870912 bfloat16 none -1 21730 395.31 345.89 0 21834 393.43 344.25 N/A"),
    ("send", 2, False, "8388608 4194304 bfloat16 sum -1 16.79 499.62 499.62 0 1.43 5886.74 5886.74 N/A"),
]


@pytest.mark.parametrize(("operation", "ranks", "checked", "reference_row"), REFERENCE_ROWS)
def test_nccl_tests_table_row_matches_published_output(
    operation: Operation, ranks: int, checked: bool, reference_row: str
) -> None:
    """Equal bytes and times give equal count, type, algbw and busbw, to the digits of the published time."""
    size, _, _, _, _, out_us, *_ = columns = reference_row.split()
    result = make_case_result(operation, int(size), float(out_us), float(columns[9]), ranks, checked)
    text = format_table(to_json_document([result], 20, False, RUN_METADATA, DEVICES))
    (row,) = ROW.findall(text)
    for cell, expected in zip(row, columns, strict=True):
        if re.fullmatch(r"[\d.]+", expected):
            assert float(cell) == pytest.approx(float(expected), rel=0.006)
        else:
            assert cell == expected


def test_nccl_tests_table_column_widths_match_original() -> None:
    text = format_table(
        to_json_document([make_case_result("all_reduce", 2**20, 46.24, 139876.5, 8)], 20, True, RUN_METADATA, DEVICES)
    )
    row = (
        "     1048576        524288  bfloat16     sum      -1    46.24   22.68   39.68       0   139876    0.01    0.01"
    )
    assert row in text
    assert "minBytes 1048576 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1" in text
    assert DEVICE.findall(text) == [("0", "0", "12", "here", "0", "0000:1b:00", "NVIDIA H100")]


def test_nccl_tests_table_averages_busbw_of_both_buffer_modes() -> None:
    results = [
        make_case_result("all_reduce", 10**9, 1e6, 5e5, 2),
        make_case_result("all_reduce", 2 * 10**9, 1e6, 1e6, 2),
    ]
    text = format_table(to_json_document(results, 20, True, RUN_METADATA, DEVICES))
    assert float(AVERAGE.findall(text)[0]) == pytest.approx((1 + 2 + 2 + 2) / 4)
    assert "# Out of bounds values : 0 OK" in text


def test_nccl_tests_json_document_follows_version_3() -> None:
    document = json.loads(
        json.dumps(
            to_json_document([make_case_result("send", 2**20, 10, 20, 2, False)], 20, True, RUN_METADATA, DEVICES)
        )
    )
    assert list(document) == [
        "version",
        "start_time",
        "args",
        "env",
        "nccl_version",
        "config",
        "results",
        "out_of_bounds",
        "average_bus_bandwidth",
        "errors",
        "end_time",
    ]
    assert document["version"] == 3
    assert document["config"]["blocking_collectives"] == "false"
    assert document["config"]["devices"] == DEVICES
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    (result,) = document["results"]
    assert result["out_of_place"] == {
        "time": pytest.approx(10),
        "alg_bw": pytest.approx(104.8576),
        "bus_bw": pytest.approx(104.8576),
        "nwrong": 0,
    }
    assert result["in_place"]["nwrong"] is None
    assert set(result["in_place_per_iter"]) == {
        "min_us",
        "max_us",
        "avg_us",
        "p50_us",
        "p95_us",
        "p99_us",
        "stdev_us",
        "cv_pct",
        "times_us",
    }


def test_merge_ranks_averages_seconds_and_sums_wrong_elements() -> None:
    case = BenchmarkCase(CollectiveKind("all_to_all", "ep", "fp32"), 2, 800, 1)
    rank_results = [
        CaseTiming((0, 1), {"out_of_place": times, "in_place": times}, {"out_of_place": wrong, "in_place": None})
        for times, wrong in (([1.0, 4.0], 3), ([2.0, 1.0], 4))
    ]
    merged = merge_ranks(case, rank_results)
    assert merged.seconds["out_of_place"] == pytest.approx(2.0)
    assert merged.seconds_per_iteration["out_of_place"] == [2.0, 4.0]
    assert merged.num_wrong == {"out_of_place": 7, "in_place": None}
    document = to_json_document([merged], 2, False, RUN_METADATA, DEVICES)
    assert document["out_of_bounds"] == {"count": 7, "okay": "false"}
    assert "# Out of bounds values : 7 FAILED" in format_table(document)
