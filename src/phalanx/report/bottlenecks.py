"""Bottlenecks of a run: the cost of each cause per step, its evidence, and the first change to try.

A wait does not identify the late rank, since one slow rank makes all others wait. The wait of the rank that waits least
counts as communication. Any further wait is caused by a late rank, which has a longer compute time than others for
equal work (NVRx scores ranks likewise, and calls one a straggler below 0.75).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.cost.exact.flops import run_recomputed_flops_per_token, training_flops_per_token
from phalanx.report.gpu_samples import describe_slow_clock
from phalanx.report.run_data import RunData
from phalanx.report.slowdowns import IMBALANCE_RATIO, STRAGGLER_RATIO, change_point, measure_slowdowns
from phalanx.report.step_breakdown import StepTimes, simulate_measured, stage_times
from phalanx.schedule.simulate import Timeline
from phalanx.spec.parallel_dims import expert_parallel_groups
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

Kind = Literal["compute", "memory", "communication", "input", "straggler", "bubble", "stage", "expert"]
MIN_SHARE = 0.1
"""Minimum share of a step for a cause to count as a bottleneck."""
MIN_SHOWN_SHARE = 0.005
"""Minimum share of a step for a cause to be listed: less is 0 % of a step."""


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """One cause of lost time."""

    kind: Kind
    share: float
    """Share of a step's time that would be saved without this cause."""
    evidence: str
    suggestion: str
    """The first change to try."""
    rank: int | None = None
    stage: int | None = None
    expert: tuple[int, int] | None = None
    """Layer and expert."""
    since: int | None = None
    """The first affected step."""

    def __str__(self) -> str:
        return f"{self.kind}: {100 * self.share:.0f} % of a step; {self.evidence}"


def find_bottlenecks(run_data: RunData, times: StepTimes) -> list[Bottleneck]:
    """Return the bottlenecks of a run, the most expensive first; the first one is the verdict."""
    resolved = run_data.resolved
    timeline = None
    bottlenecks = [*_find_data_loading(times)]
    if resolved is not None:
        run = resolved.run
        stragglers = [*_find_straggler(run_data, resolved, times)]
        bottlenecks += [*stragglers, *_find_memory_pressure(run, times)]
        if run.layout.pp > 1:
            stages = stage_times(run_data, times.steps)
            timeline = simulate_measured(resolved, stages)
            balanced_timeline = simulate_measured(resolved, stages, balanced=True)
            bottlenecks.append(_describe_bubble(run, times, balanced_timeline))
            if not stragglers:
                bottlenecks.append(_describe_slow_stage(times, stages, timeline, balanced_timeline))
    bottlenecks += _find_communication_wait(run_data, times, timeline)
    bottlenecks.sort(key=lambda finding: -finding.share)
    significant = [finding for finding in bottlenecks if finding.share >= MIN_SHARE]
    minor = [finding for finding in bottlenecks if MIN_SHOWN_SHARE <= finding.share < MIN_SHARE]
    return [*significant, _describe_compute(run_data, times), *minor]


def _find_data_loading(times: StepTimes) -> Iterator[Bottleneck]:
    wait_seconds = times.data.max(1)
    start = change_point(wait_seconds / times.total.max(1), 0.05)
    rank = times.ranks[int(np.median(times.data[start:], 0).argmax())]
    yield Bottleneck(
        kind="input",
        share=times.share(wait_seconds, start),
        evidence=f"rank {rank} waits {np.median(wait_seconds[start:]):.3g} s of each step for tokens",
        suggestion="prepare the tokens in advance (phalanx data prepare), store them on a local disk, or reserve a "
        "core for the loader",
        rank=rank,
        since=times.steps[start],
    )


def _find_straggler(run_data: RunData, resolved: ResolvedRun, times: StepTimes) -> Iterator[Bottleneck]:
    """Find the rank with the longest time for its work, and the reason: more rows for its experts, or a slow device."""
    slowdown = max(measure_slowdowns(resolved, times), key=lambda slowdown: slowdown.score, default=None)
    if slowdown is None or slowdown.score < 1:
        return
    index = slowdown.index
    rank = times.ranks[index]
    step = times.steps[slowdown.start]
    lost_share = times.share(times.compute[:, index] * (1 - 1 / slowdown.ratio), slowdown.start)
    row_ratio = 1.0
    if times.rows is not None:
        other_rows = np.delete(times.rows, index, axis=1).mean(1)
        row_ratio = float(np.median((times.rows[:, index] / np.maximum(other_rows, 1))[slowdown.start :]))
    if row_ratio > IMBALANCE_RATIO and slowdown.factor < row_ratio * STRAGGLER_RATIO:
        layer, expert, hot_share = _find_hot_expert(run_data, resolved, rank, step)
        detail = f"; expert {expert} of layer {layer} receives {hot_share:.1f} times an even share" if hot_share else ""
        yield Bottleneck(
            kind="expert",
            share=lost_share,
            evidence=f"rank {rank} computes {slowdown.factor:.1f} times as long as other ranks, because its experts "
            f"receive {row_ratio:.1f} times as many rows{detail}",
            suggestion="balance the router (model.moe.balance_loss_coef, model.moe.bias_update_rate, a lower learning "
            "rate), or move experts to other ranks: phalanx experts --balance",
            rank=rank,
            expert=(layer, expert) if hot_share else None,
            since=step,
        )
        return
    yield Bottleneck(
        kind="straggler",
        share=lost_share,
        evidence=f"rank {rank} on {run_data.ranks[rank].host} takes {slowdown.factor:.2f} times as long as other "
        f"ranks for equal work, since step {step}{describe_slow_clock(run_data, rank)}",
        suggestion="check the device: other processes, clock and temperature; exclude the host if the rank stays slow",
        rank=rank,
        since=step,
    )


def _find_hot_expert(run_data: RunData, resolved: ResolvedRun, rank: int, step: int) -> tuple[int, int, float]:
    """Return layer, expert and relative load of this rank's most frequent hot expert.

    Only steps from `step` on count in which the hottest expert of all ranks belongs to this rank. The load is the
    median share of the layer's tokens times the number of experts; it is 0 without such steps.
    """
    moe = resolved.run.model.moe
    assert moe is not None
    groups = expert_parallel_groups(resolved.dims)
    ep_rank = next(group.index(rank) for group in groups if rank in group)
    experts_per_rank = moe.num_experts // resolved.layout.ep
    lines = next(iter(run_data.ranks.values())).steps
    hot = [line["hot_expert"] for line in lines if "hot_expert" in line and line["step"] >= step]
    local_hot = [(layer, expert, share) for layer, expert, share in hot if expert // experts_per_rank == ep_rank]
    if not local_hot:
        return 0, 0, 0.0
    (layer, expert), _ = Counter((layer, expert) for layer, expert, _ in local_hot).most_common(1)[0]
    return layer, expert, float(np.median([share for *key, share in local_hot if key == [layer, expert]]))


def _find_memory_pressure(run: RunSpec, times: StepTimes) -> Iterator[Bottleneck]:
    """Find the costs of saving memory: recomputation and offload."""
    recomputed_flops = run_recomputed_flops_per_token(run)
    if recomputed_flops:
        share = recomputed_flops / (recomputed_flops + training_flops_per_token(run.model, run.training.seq_len))
        yield Bottleneck(
            kind="memory",
            share=share * times.share(times.compute.max(1)),
            evidence=f"{100 * share:.0f} % of the compute is recomputation, which saves memory "
            f"(layout.activation_checkpointing = {run.layout.activation_checkpointing!r})",
            suggestion="find other ways to save memory with phalanx advise: a smaller micro-batch, or more ranks that "
            "shard the state",
        )
    if run.layout.offload != "none":
        yield Bottleneck(
            kind="memory",
            share=times.share(times.optimizer.max(1)),
            evidence=f"the update takes {np.median(times.optimizer.max(1)):.3g} s with the optimizer state in "
            f"{'files' if run.layout.offload == 'nvme' else 'CPU memory'}",
            suggestion="shard the state over more ranks instead (layout.data_parallel, larger dp) or use a faster disk",
        )


def _describe_bubble(run: RunSpec, times: StepTimes, balanced_timeline: Timeline) -> Bottleneck:
    """Return the wait for the schedule of a pipeline, simulated with equal stages."""
    return Bottleneck(
        kind="bubble",
        share=float(balanced_timeline.bubble * balanced_timeline.makespan) / times.step_seconds,
        evidence=f"with {run.layout.schedule_file or run.layout.schedule} and this number of micro-batches, every "
        f"rank idles for {100 * float(balanced_timeline.bubble):.0f} % of the passes, even with equal stages and "
        "instant sends",
        suggestion="use more or smaller micro-batches (layout.micro_batch_size), interleaved stages or zero bubble "
        "(layout.schedule), or fewer stages",
    )


def _describe_slow_stage(
    times: StepTimes, stages: dict[int, dict[str, float]], timeline: Timeline, balanced_timeline: Timeline
) -> Bottleneck:
    """Return the wait for the slowest stage; `stages` maps each stage to its seconds by kind of pass."""
    seconds = {stage: sum(kinds.values()) for stage, kinds in stages.items()}
    stage = max(seconds, key=lambda stage: seconds[stage])
    slowdown = seconds[stage] / float(np.mean(list(seconds.values())))
    return Bottleneck(
        kind="stage",
        share=max(0.0, float(timeline.makespan - balanced_timeline.makespan)) / times.step_seconds,
        evidence=f"stage {stage} takes {slowdown:.2f} times as long as the mean stage, and the other stages wait for "
        "it",
        suggestion="use a number of stages that divides the number of blocks, or interleaved stages "
        "(layout.schedule); phalanx pipeline split shows the load of each stage",
        stage=stage,
    )


def _find_communication_wait(run_data: RunData, times: StepTimes, timeline: Timeline | None) -> Iterator[Bottleneck]:
    """Find the wait for communication; `timeline` is a pipeline's schedule in which sends take no time."""
    if not times.has_wait_times or len(times.ranks) < 2:
        return
    seconds = times.communication.min(1)
    start = change_point(seconds / times.total.max(1), 0.05)
    share = times.share(seconds, start)
    send_note = ""
    if timeline is not None:
        send_share = max(0.0, times.share(times.idle) - float(timeline.bubble * timeline.makespan) / times.step_seconds)
        share += send_share
        send_note = f"; waits for sends between stages take {100 * send_share:.0f} % of the step"
    yield Bottleneck(
        kind="communication",
        share=share,
        evidence=f"every rank spends at least {np.median(seconds[start:]):.3g} s per step waiting for collectives"
        f"{describe_longest_wait(run_data)}{send_note}",
        suggestion="check the link with phalanx bench collectives; place the axis with the most traffic on the fastest "
        "links, send less often (larger steps, layout.data_parallel), or send fewer bytes (bf16, "
        "layout.gradient_compression)",
        since=times.steps[start],
    )


def describe_longest_wait(run_data: RunData) -> str:
    """Return the collective of profiled steps that ranks waited for most, as text after a comma."""
    wait_seconds: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in run_data.ranks.values():
        for line in record.steps:
            if "memory" in line:
                continue
            for call in line.get("collectives", ()):
                wait_seconds[call["operation"], tuple(call["group"])] += call["exposed"]
    if not wait_seconds:
        return ""
    (operation, group), _ = wait_seconds.most_common(1)[0]
    group_text = ", ".join(map(str, group[:4])) + (", ..." if len(group) > 4 else "")
    return f", the longest of them {operation} among ranks {group_text}"


def _describe_compute(run_data: RunData, times: StepTimes) -> Bottleneck:
    """Return the time in passes, with the settings that may shorten them, and otherwise the devices that would."""
    run = run_data.run
    mfus = [line["mfu"] for line in run_data.step_metrics if line["step"] in set(times.steps) and line.get("mfu")]
    mfu_note = f", at an MFU of {100 * float(np.median(mfus)):.0f} %" if mfus else ""
    seconds = times.computing.mean(1)
    has_gpu = any(record.device == "cuda" for record in run_data.ranks.values())
    settings = []
    if run_data.resolved is not None and run_data.resolved.micro_batches > 1:
        settings.append("larger micro-batches")
    if run is None or not run.on_device("cuda" if has_gpu else "cpu").compiles:
        settings.append("training.compile")
    # A CPU may lack instructions for bf16. For a run in bf16, only fp8 is lower.
    if has_gpu and (run is None or run.training.precision not in BF16_PRECISIONS):
        settings.append("lower precision")
    average = ", averaged over ranks" if len(times.ranks) > 1 else ""
    return Bottleneck(
        kind="compute",
        share=times.share(seconds),
        evidence=f"forward and backward passes take {np.median(seconds):.3g} s of a step{average}{mfu_note}",
        suggestion=f"use {', '.join(settings)}{'; otherwise ' if settings else ''}more or faster devices",
    )
