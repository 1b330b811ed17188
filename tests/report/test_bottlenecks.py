"""Verdicts on simulated records, each with one known fault. Ranks wait for each other as real ranks do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.report.bottlenecks import MIN_SHARE, Bottleneck, find_bottlenecks
from phalanx.report.run_data import RunData
from phalanx.report.slowdowns import change_point
from phalanx.report.step_breakdown import StepTimes, step_times
from phalanx.runs.step_records import RankRecord
from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.schedule import actions
from phalanx.schedule.simulate import ActionTimes, simulate
from phalanx.spec.files.load import run_from_table
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

STEPS, COMPUTE_SECONDS = 40, 1.0
DENSE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 128,
    "max_seq_len": 64,
}
MOE = {**DENSE, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 64}}


def build_run_spec(ranks: int, model: dict[str, Any] = DENSE, **layout: Any) -> RunSpec:
    return run_from_table(
        {
            "model": model,
            "training": {"steps": STEPS, "seq_len": 32, "tokens_per_step": 64 * 32},
            "layout": layout,
            "cluster": {"device": "cpu", "nproc_per_node": ranks, "peak_flops": 1e12},
        }
    )


@dataclass(frozen=True)
class Fault:
    """Fault of a run, from a step on."""

    first_step: int = 1
    slowdown_by_rank: dict[int, float] = field(default_factory=dict)
    """Factor of the compute time, by rank."""
    slowdown_by_stage: dict[int, float] = field(default_factory=dict)
    """Factor of the compute time on all ranks of a stage."""
    data_wait_by_rank: dict[int, float] = field(default_factory=dict)
    """Seconds in which ranks wait for tokens."""
    transfer_seconds: float = 0.02
    """Seconds of exposed transfers."""
    expert_rows_factor_by_rank: dict[int, float] = field(default_factory=dict)
    """Factor of the rows that a rank's experts receive, and of its compute time."""
    optimizer_seconds: float = 0.01


def simulate_run_data(run: RunSpec, ranks: int, injected: Fault, seed: int) -> RunData:
    """Return a run with this fault."""
    lines: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(ranks)}
    chance = np.random.default_rng(seed)
    for step in range(1, STEPS + 1):
        fault = injected if step >= injected.first_step else Fault()
        noise = {rank: float(chance.normal(1, 0.03)) for rank in range(ranks)}
        for rank, line in simulate_step_records(run, ranks, fault, noise).items():
            lines[rank].append({"step": step, "start": float(step), "peak_memory_bytes": 1, **line})
    records = {
        rank: RankRecord(
            rank=rank,
            host="host",
            device="cpu",
            offset_seconds=0.0,
            error_seconds=0.0,
            memory_bytes=2**34,
            cores=2,
            steps=lines[rank],
        )
        for rank in range(ranks)
    }
    return RunData(directory=Path("run"), run=run, world_size=ranks, ranks=records)


def simulate_step_records(run: RunSpec, ranks: int, fault: Fault, noise: dict[int, float]) -> dict[int, dict[str, Any]]:
    """Return the record of each rank: all wait for the last rank in the last
    collective, and in a pipeline for each other."""
    slower = {
        rank: noise[rank] * fault.slowdown_by_rank.get(rank, 1.0) * fault.expert_rows_factor_by_rank.get(rank, 1.0)
        for rank in range(ranks)
    }
    passes, stages, waits = (simulate_pipeline_passes if run.layout.pp > 1 else simulate_passes_without_pipeline)(
        run, ranks, fault, slower
    )
    seconds_before_reduce = {rank: fault.data_wait_by_rank.get(rank, 0.0001) + passes[rank] for rank in range(ranks)}
    last = max(seconds_before_reduce.values())
    records = {}
    for rank in range(ranks):
        reduce = last - seconds_before_reduce[rank] + fault.transfer_seconds
        records[rank] = {
            "seconds": {
                "data": fault.data_wait_by_rank.get(rank, 0.0001),
                "passes": passes[rank],
                "reduce": reduce,
                "optimizer": fault.optimizer_seconds,
            },
            "stages": stages[rank],
            "wait_seconds": {"data": 0.0, "passes": 0.0, "reduce": reduce, "optimizer": 0.0, "pipeline": waits[rank]},
        }
        if run.layout.ep > 1:
            hot = max(
                fault.expert_rows_factor_by_rank, key=lambda rank: fault.expert_rows_factor_by_rank[rank], default=0
            )
            records[rank]["expert_rows"] = int(1000 * fault.expert_rows_factor_by_rank.get(rank, 1.0))
            records[rank]["hot_expert"] = [3, 2 * hot + 1, 4.0] if fault.expert_rows_factor_by_rank else [5, 0, 1.1]
    return records


def simulate_passes_without_pipeline(
    run: RunSpec, ranks: int, fault: Fault, slower: dict[int, float]
) -> tuple[Any, Any, Any]:
    """Return the passes of ranks without a pipeline."""
    passes = {rank: COMPUTE_SECONDS * slower[rank] for rank in range(ranks)}
    stages = {rank: {"0": {"F": passes[rank] / 3, "B": 2 * passes[rank] / 3}} for rank in range(ranks)}
    return passes, stages, dict.fromkeys(range(ranks), 0.0)


def simulate_pipeline_passes(run: RunSpec, ranks: int, fault: Fault, slower: dict[int, float]) -> tuple[Any, Any, Any]:
    """Return the passes of ranks of a pipeline and its replicas."""
    sizes, micro_batches = parallel_dims(run.layout, ranks), ResolvedRun(run, ranks).batch.gradient_accumulation_steps
    schedule = layout_schedule(run.layout, micro_batches)
    passes, stages, waits = {}, {}, {}
    for copy in range(ranks // sizes.pp):
        members = [rank for rank in range(ranks) if pipeline_replica_index(run, ranks, rank) == copy]
        rank_by_pp = {sizes.coordinates(rank)["pp"]: rank for rank in members}
        seconds = [
            fault.slowdown_by_stage.get(stage, 1.0) * slower[rank_by_pp[schedule.rank_of[stage]]] / micro_batches
            for stage in range(schedule.stages)
        ]
        halves = [2 * second for second in seconds]
        timeline = simulate(
            schedule,
            ActionTimes(forward=seconds, input_grad=halves, weight_grad=0.0, transfer=fault.transfer_seconds / 4),
        )
        for pp_rank, rank in rank_by_pp.items():
            stage_seconds: dict[str, dict[str, float]] = {}
            for span in timeline.spans[pp_rank]:
                for action in actions(span.step):
                    kinds = stage_seconds.setdefault(str(action.stage), {})
                    kinds[action.kind] = kinds.get(action.kind, 0.0) + float(span.end - span.start)
            passes[rank] = float(timeline.spans[pp_rank][-1].end)  # then the rank waits in the collective
            stages[rank] = stage_seconds
            waits[rank] = passes[rank] - sum(sum(kinds.values()) for kinds in stage_seconds.values())
    return passes, stages, waits


def pipeline_replica_index(run: RunSpec, ranks: int, rank: int) -> int:
    """Return the index of a rank's pipeline replica."""
    coordinates = parallel_dims(run.layout, ranks).coordinates(rank)
    return coordinates["dp_replicate"] * parallel_dims(run.layout, ranks).dp_shard + coordinates["dp_shard"]


DDP4, ZERO8 = build_run_spec(4), build_run_spec(8, data_parallel="zero3")
PIPELINE = build_run_spec(4, pp=4, micro_batch_size=2)
REPLICATED_PIPELINE = build_run_spec(8, pp=4, data_parallel="zero1", micro_batch_size=2)
FEW_MICRO_BATCHES = build_run_spec(4, pp=4, micro_batch_size=16)
EXPERT_PARALLEL = build_run_spec(4, MOE, ep=4)
FULL_CHECKPOINTING = build_run_spec(4, activation_checkpointing="full")
NVME_OFFLOAD = build_run_spec(4, data_parallel="zero2", offload="nvme", offload_directory="/tmp")
FAULT_CASES: dict[str, tuple[RunSpec, int, Fault, Callable[[Bottleneck], bool]]] = {
    "nothing-ddp": (DDP4, 4, Fault(), lambda it: it.kind == "compute"),
    "nothing-zero3": (ZERO8, 8, Fault(), lambda it: it.kind == "compute"),
    "nothing-experts": (EXPERT_PARALLEL, 4, Fault(), lambda it: it.kind == "compute"),
    "slow-rank": (DDP4, 4, Fault(slowdown_by_rank={2: 1.6}), lambda it: (it.kind, it.rank) == ("straggler", 2)),
    "slow-rank-of-8": (ZERO8, 8, Fault(slowdown_by_rank={7: 1.5}), lambda it: (it.kind, it.rank) == ("straggler", 7)),
    "slow-rank-0": (ZERO8, 8, Fault(slowdown_by_rank={0: 2.0}), lambda it: (it.kind, it.rank) == ("straggler", 0)),
    "slow-later": (
        DDP4,
        4,
        Fault(first_step=21, slowdown_by_rank={1: 1.8}),
        lambda it: (it.kind, it.rank) == ("straggler", 1) and it.since is not None and abs(it.since - 21) <= 1,
    ),
    "slow-rank-of-a-pipeline": (
        REPLICATED_PIPELINE,
        8,
        Fault(slowdown_by_rank={5: 1.8}),
        lambda it: (it.kind, it.rank) == ("straggler", 5),
    ),
    "slow-rank-and-slow-link": (
        DDP4,
        4,
        Fault(slowdown_by_rank={3: 2.0}, transfer_seconds=0.3),
        lambda it: (it.kind, it.rank) == ("straggler", 3),
    ),
    "starved": (DDP4, 4, Fault(data_wait_by_rank={1: 0.7}), lambda it: (it.kind, it.rank) == ("input", 1)),
    "starved-all": (ZERO8, 8, Fault(data_wait_by_rank=dict.fromkeys(range(8), 0.5)), lambda it: it.kind == "input"),
    "starved-later": (
        DDP4,
        4,
        Fault(first_step=15, data_wait_by_rank={0: 0.9}),
        lambda it: (it.kind, it.rank) == ("input", 0) and it.since is not None and abs(it.since - 15) <= 1,
    ),
    "slow-link": (DDP4, 4, Fault(transfer_seconds=0.6), lambda it: it.kind == "communication"),
    "slow-link-zero3": (ZERO8, 8, Fault(transfer_seconds=1.5), lambda it: it.kind == "communication"),
    "slow-link-later": (
        ZERO8,
        8,
        Fault(first_step=10, transfer_seconds=1.0),
        lambda it: it.kind == "communication" and it.since is not None and abs(it.since - 10) <= 1,
    ),
    "slow-link-of-a-pipeline": (PIPELINE, 4, Fault(transfer_seconds=4.0), lambda it: it.kind == "communication"),
    "few-micro-batches": (FEW_MICRO_BATCHES, 4, Fault(), lambda it: it.kind == "bubble"),
    "uneven-stage": (PIPELINE, 4, Fault(slowdown_by_stage={2: 1.5}), lambda it: (it.kind, it.stage) == ("stage", 2)),
    "uneven-stage-of-copies": (
        REPLICATED_PIPELINE,
        8,
        Fault(slowdown_by_stage={0: 1.6}),
        lambda it: (it.kind, it.stage) == ("stage", 0),
    ),
    "hot-expert": (
        EXPERT_PARALLEL,
        4,
        Fault(expert_rows_factor_by_rank={2: 2.0}),
        lambda it: (it.kind, it.rank, it.expert) == ("expert", 2, (3, 5)),
    ),
    "hot-expert-later": (
        EXPERT_PARALLEL,
        4,
        Fault(first_step=25, expert_rows_factor_by_rank={0: 1.7}),
        lambda it: (it.kind, it.rank) == ("expert", 0) and it.since is not None and abs(it.since - 25) <= 1,
    ),
    "slow-rank-with-experts": (
        EXPERT_PARALLEL,
        4,
        Fault(slowdown_by_rank={1: 1.7}),
        lambda it: (it.kind, it.rank) == ("straggler", 1),
    ),
    "recomputed": (FULL_CHECKPOINTING, 4, Fault(), lambda it: it.kind == "memory"),
    "on-disk": (NVME_OFFLOAD, 4, Fault(optimizer_seconds=1.2), lambda it: it.kind == "memory"),
}


def find_simulated_bottlenecks(run: RunSpec, ranks: int, fault: Fault, seed: int) -> list[Bottleneck]:
    run_data = simulate_run_data(run, ranks, fault, seed)
    times = step_times(run_data)
    assert times is not None
    return find_bottlenecks(run_data, times)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULT_CASES)
def test_find_bottlenecks_identifies_injected_cause(name: str, seed: int) -> None:
    run, ranks, fault, expected = FAULT_CASES[name]
    bottlenecks = find_simulated_bottlenecks(run, ranks, fault, seed)
    assert expected(bottlenecks[0]), "\n".join(map(str, bottlenecks))
    assert bottlenecks[0].kind == "compute" or bottlenecks[0].share >= MIN_SHARE


def test_straggler_with_lower_clock_is_explained_by_it() -> None:
    run_data = simulate_run_data(DDP4, 4, Fault(slowdown_by_rank={2: 1.6}), seed=0)
    for rank, record in run_data.ranks.items():
        for line in record.steps:
            line["gpu_sample"] = {"clock_mhz": 1100 if rank == 2 else 1755, "throttle_reasons": []}
    times = step_times(run_data)
    assert times is not None
    evidence = find_bottlenecks(run_data, times)[0].evidence
    assert "; its GPU: SM clock of 1,100 MHz (median of the other ranks: 1,755 MHz)" in evidence


def test_bottleneck_share_equals_step_time_saved_without_straggler() -> None:
    slow, well = (
        find_simulated_bottlenecks(DDP4, 4, fault, seed=0)[0] for fault in (Fault(slowdown_by_rank={2: 1.6}), Fault())
    )
    assert slow.share == pytest.approx(0.6 / 1.63, abs=0.04)
    assert well.share == pytest.approx(1 / 1.06, abs=0.05)


def test_step_times_components_sum_to_step_duration() -> None:
    times = step_times(simulate_run_data(REPLICATED_PIPELINE, 8, Fault(), seed=1))
    assert isinstance(times, StepTimes)
    assert abs(times.unattributed).max() < 1e-9
    assert times.steps == list(range(3, STEPS + 1))


def test_step_times_bubble_matches_simulated_schedule() -> None:
    """A rank's wait in collectives after its last pass is also idle time."""
    times = step_times(simulate_run_data(PIPELINE, 4, Fault(transfer_seconds=0.0), seed=0))
    schedule = layout_schedule(PIPELINE.layout, ResolvedRun(PIPELINE, 4).batch.gradient_accumulation_steps)
    assert isinstance(times, StepTimes)
    assert times.bubble == pytest.approx(
        float(simulate(schedule, ActionTimes(forward=1.0, input_grad=2.0, weight_grad=0.0)).bubble), abs=0.03
    )


def test_find_bottlenecks_ignores_ranks_without_records() -> None:
    complete = simulate_run_data(DDP4, 4, Fault(slowdown_by_rank={2: 1.6}), seed=0)
    incomplete = replace(complete, ranks={rank: record for rank, record in complete.ranks.items() if rank != 1})
    times = step_times(incomplete)
    assert times is not None
    assert find_bottlenecks(incomplete, times)[0].rank == 2


@pytest.mark.parametrize(
    ("series", "expected"),
    [([0.0] * 10 + [1.0] * 10, 10), ([0.0] * 20, 0), ([1.0] * 10 + [0.0] * 10, 0), ([0.0] * 17 + [1.0] * 3, 17)],
)
def test_change_point_returns_first_index_of_lasting_increase(series: list[float], expected: int) -> None:
    assert change_point(np.array(series), min_increase=0.5) == expected
