"""What keeps a run from being faster: what each cause costs a step, on what evidence, and what to change first.

Waits do not tell who is late: a slow rank makes all others wait. So a wait that even the rank which waits least has is
communication; what others wait more is somebody's lateness, and that is found where it arises: in what a rank computes
beside what others compute for as much work (NVRx scores ranks likewise, and calls one a straggler below 0.75)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.exact.flops import recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.kinds import PHALANX_CHECKPOINTING
from phalanx.report.run_data import RunData
from phalanx.report.step_breakdown import StepTimes, flops_per_rank, pipeline_rank, simulate_measured, stage_times
from phalanx.schedule.simulate import Timeline
from phalanx.spec.parallel_dims import expert_parallel_groups, parallel_dims
from phalanx.spec.run import RunSpec

Kind = Literal["compute", "memory", "communication", "input", "straggler", "bubble", "stage", "expert"]
MIN_SHARE = 0.1
"""Of a step: what costs less does not keep a run from being faster."""
STRAGGLER_RATIO = 1 / 0.75
SLOW_ALONE = 1.6
"""How much longer a straggler takes for as much work as its copies do; as other stages do, which differ anyway."""
MIN_SEGMENT = 3
"""Steps before and after a change, at least."""
IMBALANCE_RATIO = 1.15
"""How much more of something than the others is more than chance."""


@dataclass(frozen=True)
class Bottleneck:
    """One cause."""

    kind: Kind
    share: float
    """Of a step's time, that would be gained without it."""
    evidence: str
    suggestion: str
    """What to change first."""
    rank: int | None = None
    stage: int | None = None
    expert: tuple[int, int] | None = None
    """Layer and expert."""
    since: int | None = None
    """The first step that shows it."""

    def __str__(self) -> str:
        return f"{self.kind}: {100 * self.share:.0f} % of a step; {self.evidence}"


def find_bottlenecks(run_data: RunData, times: StepTimes) -> list[Bottleneck]:
    """What costs time, the dearest first; the first is the verdict."""
    run = run_data.run
    timeline = None
    bottlenecks = [*_find_data_loading(times)]
    if run is not None:
        stragglers = [*_find_straggler(run_data, run, times)]
        bottlenecks += [*stragglers, *_find_memory_pressure(run, times)]
        if run.layout.pp > 1:
            stages = stage_times(run_data, times.steps)
            timeline = simulate_measured(run, run_data.world_size, stages)
            balanced_timeline = simulate_measured(run, run_data.world_size, stages, balanced=True)
            bottlenecks += _find_pipeline_waits(
                run,
                times,
                stages,
                timeline=timeline,
                balanced_timeline=balanced_timeline,
                has_straggler=bool(stragglers),
            )
    bottlenecks += _find_communication_wait(run_data, times, timeline)
    bottlenecks.sort(key=lambda finding: -finding.share)
    compute_bottleneck = _describe_compute(run_data, times)
    significant = [finding for finding in bottlenecks if finding.share >= MIN_SHARE]
    return [*significant, compute_bottleneck, *(finding for finding in bottlenecks if finding.share < MIN_SHARE)]


def _find_data_loading(times: StepTimes) -> Iterator[Bottleneck]:
    wait_seconds = times.data.max(1)
    start = change_point(wait_seconds / times.total.max(1), 0.05)
    rank = times.ranks[int(np.median(times.data[start:], 0).argmax())]
    yield Bottleneck(
        "input",
        times.share(wait_seconds, start),
        f"rank {rank} waits {np.median(wait_seconds[start:]):.3g} s of each step for its tokens",
        suggestion="prepare the text beforehand (phalanx data prepare), keep it on a local disk, or give the "
        "loader a core",
        rank=rank,
        since=times.steps[start],
    )


def _find_straggler(run_data: RunData, run: RunSpec, times: StepTimes) -> Iterator[Bottleneck]:
    """The rank that takes longest for its work, and why."""
    if len(times.ranks) < 2:
        return
    flops = flops_per_rank(run, run_data.world_size, times.ranks)
    compute_indices = np.flatnonzero(flops > 0)
    if len(compute_indices) < 2:
        return
    pipeline_ranks = np.array([pipeline_rank(run, run_data.world_size, rank) for rank in times.ranks])
    seconds_per_flop = times.compute / np.where(flops > 0, flops, np.inf)
    best: tuple[float, int, int, NDArray[np.float64]] | None = None
    for index in map(int, compute_indices):
        replicas = [
            other for other in compute_indices if other != index and pipeline_ranks[other] == pipeline_ranks[index]
        ]
        peers = replicas or [other for other in compute_indices if other != index]
        ratio = seconds_per_flop[:, index] / np.median(seconds_per_flop[:, peers], axis=1)
        start = change_point(np.log(ratio), float(np.log(IMBALANCE_RATIO)))
        score = float(np.median(ratio[start:])) / (STRAGGLER_RATIO if replicas else SLOW_ALONE)
        if best is None or score > best[0]:
            best = score, index, start, ratio
    assert best is not None
    score, index, start, ratio = best
    if score < 1:
        return
    rank = times.ranks[index]
    slowdown = float(np.median(ratio[start:]))
    step = times.steps[start]
    share = times.share(times.compute[:, index] * (1 - 1 / ratio), start)
    row_ratio = _relative_expert_rows(times, index, start)
    if row_ratio > IMBALANCE_RATIO and slowdown < row_ratio * STRAGGLER_RATIO:
        layer, expert, hot_share = _find_hot_expert(run_data, run, rank, step=step)
        detail = f"; expert {expert} of layer {layer} has {hot_share:.1f} times its share" if hot_share else ""
        yield Bottleneck(
            "expert",
            share,
            f"rank {rank} computes {slowdown:.1f} times as long as others, for its experts are sent "
            f"{row_ratio:.1f} times as many rows{detail}",
            suggestion="balance the router (model.moe.balance_loss_coef, model.moe.bias_update_rate, a lower "
            "learning rate), or "
            "give its experts to other ranks: phalanx experts --balance",
            rank=rank,
            expert=(layer, expert) if hot_share else None,
            since=step,
        )
        return
    yield Bottleneck(
        "straggler",
        share,
        f"rank {rank} on {run_data.ranks[rank].host} takes {slowdown:.2f} times as long as others "
        f"for as much work, since step {step}",
        suggestion="look at that device: what else runs there, its clock and temperature; leave the host out if "
        "it stays",
        rank=rank,
        since=step,
    )


def _relative_expert_rows(times: StepTimes, index: int, start: int) -> float:
    """How many times as many rows the experts of a rank are sent as those of the others."""
    if times.rows is None:
        return 1.0
    other_rows = np.delete(times.rows, index, axis=1).mean(1)
    return float(np.median((times.rows[:, index] / np.maximum(other_rows, 1))[start:]))


def _find_hot_expert(run_data: RunData, run: RunSpec, rank: int, step: int) -> tuple[int, int, float]:
    """Of the experts that are hottest of all in steps from this one on, the one of this rank that is so most often, and
    its median share of the layer's tokens times their number: 0 where it is always another rank's."""
    assert run.model.moe is not None
    groups = expert_parallel_groups(parallel_dims(run.layout, run_data.world_size))
    ep_rank = next(group.index(rank) for group in groups if rank in group)
    experts_per_rank = run.model.moe.num_experts // run.layout.ep
    lines = next(iter(run_data.ranks.values())).steps
    hot = [line["hot_expert"] for line in lines if "hot_expert" in line and line["step"] >= step]
    local_hot = [(layer, expert, share) for layer, expert, share in hot if expert // experts_per_rank == ep_rank]
    if not local_hot:
        return 0, 0, 0.0
    (layer, expert), _ = Counter((layer, expert) for layer, expert, _ in local_hot).most_common(1)[0]
    return layer, expert, float(np.median([share for *key, share in local_hot if key == [layer, expert]]))


def _find_memory_pressure(run: RunSpec, times: StepTimes) -> Iterator[Bottleneck]:
    """What is done for want of memory: computed again, or brought from where it rests."""
    recomputed_flops = recomputed_flops_per_token(
        run.model, run.training.seq_len, PHALANX_CHECKPOINTING[run.layout.activation_checkpointing]
    )
    if recomputed_flops:
        share = recomputed_flops / (recomputed_flops + training_flops_per_token(run.model, run.training.seq_len))
        yield Bottleneck(
            "memory",
            share * times.share(times.compute.max(1)),
            f"{100 * share:.0f} % of what is computed is computed again, for want of memory to keep it "
            f"(layout.activation_checkpointing = {run.layout.activation_checkpointing!r})",
            suggestion="see with phalanx advise what else makes room: a smaller micro-batch, more ranks that "
            "share the state",
        )
    if run.layout.offload != "none":
        yield Bottleneck(
            "memory",
            times.share(times.optimizer.max(1)),
            f"the update takes {np.median(times.optimizer.max(1)):.3g} s with its state in "
            f"{'files' if run.layout.offload == 'nvme' else 'CPU memory'}",
            suggestion="shard the state over more ranks instead (layout.data_parallel, more dp), or a faster "
            "disk for it",
        )


def _find_pipeline_waits(
    run: RunSpec,
    times: StepTimes,
    stages: dict[int, dict[str, float]],
    timeline: Timeline,
    balanced_timeline: Timeline,
    has_straggler: bool,
) -> Iterator[Bottleneck]:
    """What a pipeline waits: for its schedule's sake, and for a stage that takes longer. `real` and `even` are its
    schedule with the times of these stages, and with their mean; `late` says that a rank is to blame for its stage."""
    step_seconds = times.step_seconds
    name = run.layout.schedule_file or run.layout.schedule
    yield Bottleneck(
        "bubble",
        float(balanced_timeline.bubble * balanced_timeline.makespan) / step_seconds,
        f"of {name} with these micro-batches every rank stands still for "
        f"{100 * float(balanced_timeline.bubble):.0f} % of the passes, even with stages alike and nothing to send",
        suggestion="use more or smaller micro-batches (layout.micro_batch_size), interleaved stages or zero bubble "
        "(layout.schedule), or fewer stages",
    )
    if not has_straggler:
        seconds = {stage: sum(kinds.values()) for stage, kinds in stages.items()}
        stage = max(seconds, key=lambda stage: seconds[stage])
        slowdown = seconds[stage] / float(np.mean(list(seconds.values())))
        yield Bottleneck(
            "stage",
            max(0.0, float(timeline.makespan - balanced_timeline.makespan)) / step_seconds,
            f"stage {stage} takes {slowdown:.2f} times as long as the mean of the stages, and the others wait for it",
            suggestion="use as many stages as the blocks divide by, or interleave them (layout.schedule): "
            "phalanx pipeline split "
            "shows what each would have",
            stage=stage,
        )


def _find_communication_wait(run_data: RunData, times: StepTimes, timeline: Timeline | None) -> Iterator[Bottleneck]:
    """What is waited for messages; `real` is the schedule of a pipeline in which these take no time."""
    if not times.has_wait_times or len(times.ranks) < 2:
        return
    seconds = times.communication.min(1)
    start = change_point(seconds / times.total.max(1), 0.05)
    share = times.share(seconds, start)
    send_note = ""
    if timeline is not None:
        send_share = max(0.0, times.share(times.idle) - float(timeline.bubble * timeline.makespan) / times.step_seconds)
        share, send_note = (
            share + send_share,
            f"; sends between stages make it wait for {100 * send_share:.0f} % of the step",
        )
    yield Bottleneck(
        "communication",
        share,
        f"even the rank that waits least waits {np.median(seconds[start:]):.3g} s of a step for collectives"
        f"{describe_longest_wait(run_data)}{send_note}",
        suggestion="look at the link with phalanx bench collectives; keep the axis that sends most on the "
        "fastest links, send "
        "less often (larger steps, layout.data_parallel), or less (bf16, layout.gradient_compression)",
        since=times.steps[start],
    )


def describe_longest_wait(run_data: RunData) -> str:
    """The collective that ranks waited for most, where steps were looked at closely; said after a comma."""
    wait_seconds: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in run_data.ranks.values():
        for line in record.steps:
            for call in line.get("collectives", ()) if "memory" not in line else ():
                wait_seconds[call["operation"], tuple(call["group"])] += call["exposed"]
    if not wait_seconds:
        return ""
    (operation, group), _ = wait_seconds.most_common(1)[0]
    shown = ", ".join(map(str, group[:4])) + (", ..." if len(group) > 4 else "")
    return f", most for {operation} among ranks {shown}"


def _describe_compute(run_data: RunData, times: StepTimes) -> Bottleneck:
    mfus = [line["mfu"] for line in run_data.step_metrics if line["step"] in set(times.steps) and line.get("mfu")]
    mfu_note = f", at an MFU of {100 * float(np.median(mfus)):.0f} %" if mfus else ""
    seconds = times.computing.mean(1)
    # A CPU may have no instructions for bf16, and a run in bf16 has fp8 below it only.
    is_in_fp32 = run_data.run is None or run_data.run.training.precision != "bf16"
    has_gpu = any(record.device == "cuda" for record in run_data.ranks.values())
    lower = ", lower precision" if is_in_fp32 and has_gpu else ""
    return Bottleneck(
        "compute",
        times.share(seconds),
        f"forward and backward passes take {np.median(seconds):.3g} s of a step, in the mean over ranks{mfu_note}",
        suggestion=f"use larger micro-batches, training.compile{lower}; then more or faster devices",
    )


def change_point(series: NDArray[np.float64], min_increase: float) -> int:
    """From where on a series has been higher by at least `least`: a single change of its mean, where the squares of
    what is left are least. 0 where it has not changed."""
    split_points = np.arange(MIN_SEGMENT, len(series) - MIN_SEGMENT + 1)
    if not len(split_points):
        return 0
    sums = np.concatenate([[0.0], np.cumsum(series - series.mean())])[split_points]
    before = sums / split_points
    after = -sums / (len(series) - split_points)  # of the mean of all
    explained = np.where(after - before >= min_increase, -sums * (after - before), -np.inf)
    best = int(explained.argmax())
    return int(split_points[best]) if explained[best] > 0 else 0
