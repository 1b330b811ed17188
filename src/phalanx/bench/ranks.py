"""Benchmark of a machine by the ranks of a run.

Usage: `torchrun -m phalanx.bench.ranks RUN.toml --out FILE.json`.

Every rank computes at the same time, as in training, and the slowest one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench import nccl_tests_format
from phalanx.bench.collective_calls import COLLECTIVE_CALLS, process_group_for
from phalanx.bench.collectives import BufferMode, CollectiveKind, benchmark_cases, collective_kinds_of_run, time_case
from phalanx.bench.latency_bandwidth_fit import PiecewiseFit, fit_latency_bandwidth
from phalanx.bench.matmul import benchmark_attention, benchmark_matmul
from phalanx.bench.memory_bandwidth import array_bytes, bandwidth, cache_bytes
from phalanx.cost.exact.traffic import traffic_by_group
from phalanx.launch.elastic_agent import launch_ranks
from phalanx.launch.failures import report_with_traceback, write_failure
from phalanx.launch.process import (
    LAUNCHER_PID_ENV,
    env_rank,
    exit_rank,
    init_distributed,
    select_device,
    set_worker_environment,
)
from phalanx.parallel.comm.objects import all_gather_objects
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.write import to_toml, with_absolute_paths
from phalanx.spec.log import log_to_stderr
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

PARTS = ("matmul", "attention", "bandwidth", "collectives")
RECORDED_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Prefixes of environment variables that may explain a result."""
IN_PLACE_OPERATIONS = ("all_reduce", "broadcast")
"""Operations that training calls in place."""
Rows = list[dict[str, Any]]


def run_benchmarks(
    run: RunSpec, device: torch.device, parts: Sequence[str], iterations: int, sweep: Sequence[int] = ()
) -> dict[str, Any]:
    """Run the benchmarks `parts` and return the results of all ranks, on each of them.

    torch.distributed must be initialized if there are several ranks. `iterations` is the number of timed calls per
    benchmark. `sweep` has sizes in bytes for every collective, in addition to those that the run sends.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(run.layout, world_size, device.type)
    local_ranks = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    size = array_bytes(cache_bytes(device), local_ranks if device.type == "cpu" else 1)
    resolved = ResolvedRun(run, world_size)
    benchmarks: dict[str, Callable[[], Rows]] = {
        "matmul": lambda: _merge_slowest_ranks(benchmark_matmul(resolved, device, iterations)),
        "attention": lambda: _merge_slowest_ranks(benchmark_attention(resolved, device, iterations)),
        "bandwidth": lambda: _merge_slowest_ranks(bandwidth(device, size, iterations)),
        "collectives": lambda: benchmark_collectives(run, mesh, device, iterations, sweep),
    }
    return {
        "run": run.name,
        "run_file": to_toml(with_absolute_paths(run)),
        "world_size": world_size,
        "layout": run.layout.model_dump(mode="json", exclude_defaults=True),
        "precision": run.training.precision,
        "device": _describe_device(device),
        "iterations": iterations,
        **{part: benchmarks[part]() for part in PARTS if part in parts},
    }


def _merge_slowest_ranks(rows: Rows) -> Rows:
    """Merge rows over ranks: each time is the maximum, with its speed."""
    merged = []
    for rank_rows in zip(*all_gather_objects(rows), strict=True):
        row = dict(rank_rows[0])
        for name in row:
            if name.endswith("seconds"):
                row[name] = max(rank_row[name] for rank_row in rank_rows)
        if "moved_bytes" in row:
            row["bytes_per_second"] = row["moved_bytes"] / row["seconds"]
        merged.append(row)
    return merged


# -- collectives -------------------------------------------------------------------------------------------------------


def benchmark_collectives(
    run: RunSpec, mesh: Mesh, device: torch.device, iterations: int, sweep: Sequence[int]
) -> list[dict[str, Any]]:
    """Benchmark each kind of collective that the run sends, and other sizes in bytes (`sweep`).

    Each result has the groups of the kind, its traffic per update, results in the format of nccl-tests, and a fit.
    """
    world_size = mesh.dims.world_size
    roles = collective_kinds_of_run(run, traffic_by_group(ResolvedRun(run, world_size)))
    results = []
    for kind, rows in roles.items():
        started_at = _current_timestamp()
        group = process_group_for(run, mesh, kind)
        # A server is in no group of other servers.
        local_group = group if isinstance(group, dist.ProcessGroup) else None
        ranks = max(all_gather_objects(local_group.size() if local_group else 0))
        case_results = []
        for case in benchmark_cases(kind, rows, ranks, sweep):
            # All groups run at the same time, as in training.
            dist.barrier()
            call = COLLECTIVE_CALLS[kind.operation]
            local_timing = time_case(case, call, local_group, device, iterations) if local_group else None
            timings = [timing for timing in all_gather_objects(local_timing) if timing is not None]
            case_results.append(nccl_tests_format.merge_ranks(case, timings))
        groups = sorted({timing.group for timing in timings})
        major, minor, patch = torch.cuda.nccl.version()[:3] if device.type == "cuda" else (0, 0, 0)
        environment = {
            "args": sys.argv,
            "env": [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(RECORDED_VARIABLES)],
            "nccl_version": 10_000 * major + 100 * minor + patch,
            "start_time": started_at,
            "end_time": _current_timestamp(),
        }
        document = nccl_tests_format.to_json_document(
            case_results, iterations, bool(sweep), environment=environment, devices=_gather_devices(device, groups)
        )
        results.append(_build_kind_result(kind, groups, case_results, document))
    return results


def _build_kind_result(
    kind: CollectiveKind,
    groups: list[tuple[int, ...]],
    results: list[nccl_tests_format.CaseResult],
    document: dict[str, Any],
) -> dict[str, Any]:
    mode: BufferMode = "in_place" if kind.operation in IN_PLACE_OPERATIONS else "out_of_place"
    sizes = [result.case.size_bytes for result in results]
    median_seconds = [median(result.seconds_per_iteration[mode]) for result in results]
    return {
        "operation": kind.operation,
        "among": kind.group_kind,
        "ranks": len(groups[0]),
        "groups": groups,
        "sizes": [
            {"size_bytes": result.case.size_bytes, "calls": result.case.calls, "seconds": seconds}
            for result, seconds in zip(results, median_seconds, strict=True)
        ],
        "fit": fit_to_dict(fit_latency_bandwidth(sizes, median_seconds), median_seconds, mode),
        "nccl_tests": document,
    }


def fit_to_dict(fit: PiecewiseFit | None, seconds: Sequence[float], mode: BufferMode) -> dict[str, Any] | None:
    """Return a fit to the median over iterations of the slowest rank's time, for files; None for a single size.

    The mean is unreliable on a busy machine. The fit is valid for these sizes and this number of ranks. `seconds`
    are the medians, in the order of the fit's sizes, measured in this buffer mode.
    """
    if fit is None:
        return None
    return {
        "times": mode,
        "joined": fit.combination,
        "pieces": [
            {
                "latency_seconds": piece.latency_seconds,
                "bytes_per_second": 1 / piece.seconds_per_byte if piece.seconds_per_byte else None,
            }
            for piece in fit.pieces
        ],
        "from_bytes": fit.sizes_bytes[0],
        "to_bytes": fit.sizes_bytes[-1],
        "mean_error": fit.mean_error,
        "max_error": fit.max_error,
        "doubtful": fit.is_poor,
        "residuals": [
            {"size_bytes": size, "seconds": median_seconds, "relative": residual}
            for size, median_seconds, residual in zip(fit.sizes_bytes, seconds, fit.residuals, strict=True)
        ],
    }


# -- the machine -------------------------------------------------------------------------------------------------------


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _gather_devices(device: torch.device, groups: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return the device of every rank, for nccl-tests' list."""
    address = "cpu"
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    rank = dist.get_rank()
    local_device = {
        "rank": rank,
        "group": next((index for index, group in enumerate(groups) if rank in group), -1),
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "device": device.index or 0,
        "device_hex": address,
        "device_info": _describe_device(device),
    }
    return all_gather_objects(local_device)


def _current_timestamp() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")


# -- ranks -----------------------------------------------------------------------------------------------------


def launch_benchmarks(run: RunSpec, nproc: int, options: Sequence[str]) -> dict[str, Any] | int:
    """Launch `nproc` local ranks that benchmark a run; `options` are those of this module, without --out.

    The result is that of `run_benchmarks`; after a failure, whose cause is printed, the exit code.
    """
    set_worker_environment(nproc)
    with TemporaryDirectory(prefix="phalanx-measure-") as folder:
        directory = Path(folder)
        file = directory / "run.toml"
        result_file = directory / "measured.json"
        file.write_text(to_toml(with_absolute_paths(run)))
        worker_args = __name__, str(file), "--out", str(result_file), *options
        code = launch_ranks(nproc, worker_args, partial(report_with_traceback, directory))
        return code or json.loads(result_file.read_text())


def main() -> None:
    """Run the benchmarks of the command line on this rank."""
    parser = argparse.ArgumentParser("phalanx.bench.ranks", description="Measure the machine on this rank.")
    parser.add_argument("run", type=Path, help="a run file")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that rank 0 writes")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="what is measured")
    parser.add_argument(
        "--sweep", nargs="*", type=int, default=[], help="sizes in bytes, in addition to those that the run sends"
    )
    parser.add_argument("--iterations", type=int, default=20)
    log_to_stderr()
    exit_rank(rank_main(parser.parse_args()))


def rank_main(args: argparse.Namespace) -> int:
    """Run the benchmarks on this rank and return the exit code."""
    try:
        run = load_run(args.run, environment={})
        device = init_distributed(select_device(run), run.training.collective_timeout_seconds)
        results = run_benchmarks(run, device, args.parts, args.iterations, args.sweep)
        if env_rank() == 0:
            args.out.write_text(json.dumps(results, indent=1))
    except Exception as error:
        write_failure(args.out.parent, env_rank(), 0, error)
        if LAUNCHER_PID_ENV not in os.environ:
            traceback.print_exc()
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    main()
