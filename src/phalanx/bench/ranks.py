"""`torchrun -m phalanx.bench.ranks RUN.toml --out FILE.json`: what the machine does for a run, by the run's ranks.

Every rank computes at once, as in training, and the slowest counts."""

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
from phalanx.bench.collectives import (
    BufferMode,
    CaseTiming,
    CollectiveKind,
    benchmark_cases,
    collective_kinds_of_run,
    time_case,
)
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
from phalanx.spec.run import RunSpec

PARTS = ("matmul", "attention", "bandwidth", "collectives")
VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Of the environment, what may say why a figure is as it is."""
IN_PLACE = ("all_reduce", "broadcast")
"""Operations that training calls in place."""
Rows = list[dict[str, Any]]


def run_benchmarks(
    run: RunSpec, device: torch.device, parts: Sequence[str], iterations: int, sweep: Sequence[int] = ()
) -> dict[str, Any]:
    """What all ranks found, on each of them. torch.distributed must be initialised where there are several.

    `parts` are some of PARTS; `sweep` are sizes in bytes for every collective, beside those that the run sends.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(run.layout, world_size, device.type)
    local = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    size = array_bytes(cache_bytes(device), local if device.type == "cpu" else 1)
    measured: dict[str, Callable[[], Rows]] = {
        "matmul": lambda: _slowest_rank_rows(benchmark_matmul(run, world_size, device, iterations)),
        "attention": lambda: _slowest_rank_rows(benchmark_attention(run, world_size, device, iterations)),
        "bandwidth": lambda: _slowest_rank_rows(bandwidth(device, size, iterations)),
        "collectives": lambda: benchmark_collectives(run, mesh, device, iterations, sweep),
    }
    return {
        "run": run.name,
        "run_file": to_toml(with_absolute_paths(run)),
        "world_size": world_size,
        "layout": run.layout.model_dump(mode="json", exclude_defaults=True),
        "precision": run.training.precision,
        "device": _described(device),
        "iterations": iterations,
        **{part: measured[part]() for part in PARTS if part in parts},
    }


def _slowest_rank_rows(rows: Rows) -> Rows:
    """Each time is that of the rank that takes longest, and each speed its."""
    return [_of_slowest(of_ranks) for of_ranks in zip(*all_gather_objects(rows), strict=True)]


def _of_slowest(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = {name: max(row[name] for row in of_ranks) for name in of_ranks[0] if name.endswith("seconds")}
    found = of_ranks[0] | times
    return found | {"bytes_per_second": found["moved_bytes"] / found["seconds"]} if "moved_bytes" in found else found


# -- collectives -------------------------------------------------------------------------------------------------------


def benchmark_collectives(
    run: RunSpec, mesh: Mesh, device: torch.device, iterations: int, sweep: Sequence[int]
) -> list[dict[str, Any]]:
    """Of each way that the run sends: its groups, what an update sends by it, results as of nccl-tests, and a fit."""
    world_size = mesh.dims.world_size
    roles = collective_kinds_of_run(run, traffic_by_group(run, world_size))
    found = []
    for way, rows in roles.items():
        begun, group = _now(), process_group_for(run, mesh, way)
        here = group if isinstance(group, dist.ProcessGroup) else None  # of other servers' groups a server is none
        ranks = max(all_gather_objects(here.size() if here else 0))
        call = COLLECTIVE_CALLS[way.operation]
        measured = []
        for case in benchmark_cases(way, rows, ranks, sweep):
            dist.barrier()  # groups of a kind run beside each other, as they do in training
            own = time_case(case, call, here, device, iterations) if here else None
            seen: list[CaseTiming] = [each for each in all_gather_objects(own) if each is not None]
            measured.append(nccl_tests_format.merge_ranks(case, seen))
        groups = sorted({each.group for each in seen})
        about = {**_environment_info(device), "start_time": begun, "end_time": _now()}
        document = nccl_tests_format.to_json_document(
            measured, iterations, bool(sweep), about, _device_list(device, groups)
        )
        found.append(_kind_result(way, groups, measured, document))
    return found


def _kind_result(
    way: CollectiveKind,
    groups: list[tuple[int, ...]],
    measured: list[nccl_tests_format.CaseResult],
    document: dict[str, Any],
) -> dict[str, Any]:
    place: BufferMode = "in_place" if way.operation in IN_PLACE else "out_of_place"
    sizes = [each.case.size_bytes for each in measured]
    typical = [median(each.each[place]) for each in measured]
    return {
        "operation": way.operation,
        "among": way.among,
        "ranks": len(groups[0]),
        "groups": groups,
        "sizes": [
            {"size_bytes": size, "calls": each.case.calls, "seconds": seconds}
            for size, seconds, each in zip(sizes, typical, measured, strict=True)
        ],
        "fit": fit_to_dict(fit_latency_bandwidth(sizes, typical), typical, place),
        "nccl_tests": document,
    }


def fit_to_dict(found: PiecewiseFit | None, seconds: Sequence[float], place: BufferMode) -> dict[str, Any] | None:
    """A fit for files, of the median over iterations of the slowest rank's time: a busy machine's mean says little. It
    holds for these sizes, among as many ranks. None of a single size."""
    if found is None:
        return None
    return {
        "times": place,
        "joined": found.combination,
        "pieces": [
            {
                "latency_seconds": piece.latency_seconds,
                "bytes_per_second": 1 / piece.seconds_per_byte if piece.seconds_per_byte else None,
            }
            for piece in found.pieces
        ],
        "from_bytes": found.sizes_bytes[0],
        "to_bytes": found.sizes_bytes[-1],
        "mean_error": found.mean_error,
        "max_error": found.max_error,
        "doubtful": found.is_poor,
        "residuals": [
            {"size_bytes": size, "seconds": median_seconds, "relative": residual}
            for size, median_seconds, residual in zip(found.sizes_bytes, seconds, found.residuals, strict=True)
        ],
    }


# -- the machine -------------------------------------------------------------------------------------------------------


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _device_list(device: torch.device, groups: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Where every rank is, for nccl-tests' list."""
    address = "cpu"
    if device.type == "cuda":
        at: Any = torch.cuda.get_device_properties(device)
        address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}"
    rank = dist.get_rank()
    here = {
        "rank": rank,
        "group": next((place for place, group in enumerate(groups) if rank in group), -1),
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "device": device.index or 0,
        "device_hex": address,
        "device_info": _described(device),
    }
    return all_gather_objects(here)


def _environment_info(device: torch.device) -> dict[str, Any]:
    major, minor, patch = torch.cuda.nccl.version()[:3] if device.type == "cuda" else (0, 0, 0)
    known = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return {"args": sys.argv, "env": known, "nccl_version": 10_000 * major + 100 * minor + patch}


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")


# -- ranks -----------------------------------------------------------------------------------------------------


def launch_benchmarks(run: RunSpec, nproc: int, options: Sequence[str]) -> dict[str, Any] | int:
    """What local ranks measure for a run; or the exit code, after printing why one failed. `options` are those of this
    module, but for --out."""
    set_worker_environment(nproc)
    with TemporaryDirectory(prefix="phalanx-measure-") as folder:
        directory = Path(folder)
        file, out = directory / "run.toml", directory / "measured.json"
        file.write_text(to_toml(with_absolute_paths(run)))
        words = __name__, str(file), "--out", str(out), *options
        code = launch_ranks(nproc, words, partial(report_with_traceback, directory))
        return code or json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser("phalanx.bench.ranks", description="Measure the machine on this rank.")
    parser.add_argument("run", type=Path, help="a run file")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that rank 0 writes")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="what is measured")
    parser.add_argument("--sweep", nargs="*", type=int, default=[], help="sizes in bytes, beside those that are sent")
    parser.add_argument("--iterations", type=int, default=20)
    exit_rank(rank_main(parser.parse_args()))


def rank_main(asked: argparse.Namespace) -> int:
    """Measure on this rank; returns the exit code."""
    try:
        run = load_run(asked.run, environment={})
        device = init_distributed(select_device(run), run.training.collective_timeout_seconds)
        found = run_benchmarks(run, device, asked.parts, asked.iterations, asked.sweep)
        if env_rank() == 0:
            asked.out.write_text(json.dumps(found, indent=1))
    except Exception as error:
        write_failure(asked.out.parent, env_rank(), 0, error)
        if LAUNCHER_PID_ENV not in os.environ:
            traceback.print_exc()
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    main()
