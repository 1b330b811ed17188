"""Results of collectives in the text and JSON formats of nccl-tests (NVIDIA/nccl-tests, src/util.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from phalanx.bench.collectives import (
    BUFFER_MODES,
    REDUCE_OPERATIONS,
    BenchmarkCase,
    BufferMode,
    CaseTiming,
    bandwidths,
    element_count,
)
from phalanx.spec.formatting import GB

VERSION = 3
NCCL_TYPE_NAMES = {"bf16": "bfloat16", "fp32": "float", "fp64": "double"}
US_PER_SECOND = 1e6
"""Microseconds in a second."""


@dataclass(frozen=True)
class CaseResult:
    """Result of a case over all ranks."""

    case: BenchmarkCase
    seconds_per_iteration: dict[BufferMode, list[float]]
    """Seconds of each iteration on the slowest rank."""
    seconds: dict[BufferMode, float]
    """Seconds of one call: the mean over iterations and ranks, as nccl-tests reports by default."""
    num_wrong: dict[BufferMode, int | None]
    """Wrong elements over all ranks."""


def merge_ranks(case: BenchmarkCase, timings: Sequence[CaseTiming]) -> CaseResult:
    """Merge the timings of all ranks of a case into one result."""
    result = CaseResult(case, {}, {}, {})
    for mode in BUFFER_MODES:
        result.seconds_per_iteration[mode] = np.max([timing.seconds[mode] for timing in timings], axis=0).tolist()
        result.seconds[mode] = mean(mean(timing.seconds[mode]) for timing in timings)
        counts = [count for timing in timings if (count := timing.num_wrong[mode]) is not None]
        result.num_wrong[mode] = sum(counts) if counts else None
    return result


# -- text --------------------------------------------------------------------------------------------------------------


def format_table(document: dict[str, Any]) -> str:
    """Format a `document` as nccl-tests prints it, from the header to the average."""
    num_wrong = document["out_of_bounds"]["count"]
    lines = [
        *_format_header(document["config"]),
        *map(_format_row, document["results"]),
        f"# {'Out of bounds values':20} : {num_wrong} {'FAILED' if num_wrong else 'OK'}",
        f"# {'Avg bus bandwidth':20} : {document['average_bus_bandwidth']['bandwidth']:g} ",
        "#",
    ]
    return "\n".join(lines)


def _format_header(config: dict[str, Any]) -> list[str]:
    step = f"{config['step_factor']}(factor)" if "step_factor" in config else f"{config['step_bytes']}(bytes)"
    devices = [
        f"#  Rank {device['rank']:2d} Group {device['group']:2d} Pid {device['pid']:6d} on {device['hostname']:>10} "
        f"device {device['device']:2d} [{device['device_hex']}] {device['device_info']}"
        for device in config["devices"]
    ]
    headings = f"{'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    units = f"{'(B)':>10}  {'(elements)':>12}  {'':8}  {'':6}  {'':6}"
    columns = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    column_units = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':6}"
    return [
        f"# nThread {config['nthreads']} nGpus {config['ngpus']} minBytes {config['minimum_bytes']} maxBytes "
        f"{config['maximum_bytes']} step: {step} warmup iters: {config['warmup_iters']} iters: {config['iterations']} "
        f"agg iters: {config['aggregated_iterations']} validation: {config['validation']} graph: {config['graph']}",
        "#",
        "# Using devices",
        *devices,
        "#",
        f"# {'':10}  {'':12}  {'':8}  {'':6}  {'':6}           out-of-place                       in-place          ",
        f"# {headings}{columns * 2} ",
        f"# {units}{column_units * 2} ",
    ]


def _format_row(result: dict[str, Any]) -> str:
    size = f"{result['size']:12d}  {result['count']:12d}"
    type_and_operation = f"  {result['type']:>8}  {result['redop']:>6}  {result['root']:>6}"
    return size + type_and_operation + "".join(_format_timing(result[mode]) for mode in BUFFER_MODES)


def _format_timing(timing: dict[str, Any]) -> str:
    wrong = "   N/A" if timing["nwrong"] is None else f"{timing['nwrong']:6g}"
    numbers = ((timing["time"], 7), (timing["alg_bw"], 6), (timing["bus_bw"], 6))
    return "".join(f"  {_format_number(value, width)}" for value, width in numbers) + f"  {wrong}"


def _format_number(value: float, width: int) -> str:
    """Format a number with as many decimals as the width permits, at most two."""
    digits = len(str(int(value))) if value >= 1 else 0
    decimals = 2 if digits < width - 2 else 1 if digits < width - 1 else 0
    if digits < width + 1:
        return f"{value:{width}.{decimals}f}"
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


# -- JSON --------------------------------------------------------------------------------------------------------------


def to_json_document(
    results: Sequence[CaseResult],
    iterations: int,
    swept: bool,
    environment: dict[str, Any],
    devices: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the results of one kind of collective, as one run of an nccl-tests program would write them.

    The results (at least one) are in ascending order of sizes, which grow by a factor if `swept`; else the run
    determines them. `environment` has start_time, end_time, args, env and nccl_version; a device has rank, group,
    pid, hostname, device, device_hex and device_info.
    """
    sizes = [result.case.size_bytes for result in results]
    num_wrong = sum(sum(filter(None, result.num_wrong.values())) for result in results)
    bus_bandwidths = [
        bandwidths(result.case, result.seconds[mode])[1] / GB for result in results for mode in BUFFER_MODES
    ]
    config = {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": min(sizes),
        "maximum_bytes": max(sizes),
        **({"step_factor": 2} if swept else {"step_bytes": 0}),
        "warmup_iters": 1,
        "iterations": iterations,
        "aggregated_iterations": 1,
        "validation": 1,
        "graph": 0,
        "blocking_collectives": "false",
        "per_iter_timing": "true",
        "parallel_init": "false",
        "devices": devices,
    }
    return {
        "version": VERSION,
        **{key: environment[key] for key in ("start_time", "args", "env", "nccl_version")},
        "config": config,
        "results": [_result_to_json(result, iterations) for result in results],
        "out_of_bounds": {"count": num_wrong, "okay": "false" if num_wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": mean(bus_bandwidths), "okay": "unchecked"},
        "errors": [],
        "end_time": environment["end_time"],
    }


def _result_to_json(case_result: CaseResult, iterations: int) -> dict[str, Any]:
    case = case_result.case
    operation = case.kind.operation
    result: dict[str, Any] = {
        "size": case.size_bytes,
        "count": element_count(case),
        "type": NCCL_TYPE_NAMES[case.kind.precision],
        "redop": "sum" if operation in (*REDUCE_OPERATIONS, "send") else "none",  # as in sendrecv_perf
        "root": f"{0 if operation == 'broadcast' else -1:6d}",
    }
    for mode in BUFFER_MODES:
        algorithm, bus = bandwidths(case, case_result.seconds[mode])
        num_wrong = case_result.num_wrong[mode]
        result[mode] = {
            "time": case_result.seconds[mode] * US_PER_SECOND,
            "alg_bw": algorithm / GB,
            "bus_bw": bus / GB,
            "nwrong": None if num_wrong is None else float(num_wrong),
        }
        result[f"{mode}_per_iter"] = _summarize_iterations(
            np.array(case_result.seconds_per_iteration[mode]) * US_PER_SECOND
        )
    return result | {"actual_iterations": iterations, "experiment_name": case.kind.name}


def _summarize_iterations(us: Any) -> dict[str, Any]:
    """Return statistics of the iteration times in microseconds."""
    ordered = np.sort(us)
    count = len(us)
    p95, p99 = (float(ordered[-(-count * percent // 100) - 1]) for percent in (95, 99))
    return {
        "min_us": float(ordered[0]),
        "max_us": float(ordered[-1]),
        "avg_us": float(us.mean()),
        "p50_us": float(ordered[count // 2]),
        "p95_us": p95,
        "p99_us": p99,
        "stdev_us": float(us.std()),
        "cv_pct": float(100 * us.std() / us.mean()),
        "times_us": us.tolist(),
    }
