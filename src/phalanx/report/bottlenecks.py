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
from phalanx.spec.degrees import expert_parallel_groups, parallel_dims
from phalanx.spec.run import RunSpec

Kind = Literal["compute", "memory", "communication", "input", "straggler", "bubble", "stage", "expert"]
MIN_SHARE = 0.1
"""Of a step: what costs less does not keep a run from being faster."""
STRAGGLER_RATIO, SLOW_ALONE = 1 / 0.75, 1.6
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


def find_bottlenecks(recorded: RunData, columns: StepTimes) -> list[Bottleneck]:
    """What costs time, the dearest first; the first is the verdict."""
    run, real = recorded.run, None
    found = [*_data_loading(columns)]
    if run is not None:
        late = [*_straggler(recorded, run, columns)]
        found += [*late, *_memory(run, columns)]
        if run.layout.pp > 1:
            stages = stage_times(recorded, columns.steps)
            real = simulate_measured(run, recorded.world_size, stages)
            even = simulate_measured(run, recorded.world_size, stages, balanced=True)
            found += _pipeline(run, columns, stages, real, even, bool(late))
    found += _communication(recorded, columns, real)
    found.sort(key=lambda finding: -finding.share)
    computing = _compute(recorded, columns)
    dear = [finding for finding in found if finding.share >= MIN_SHARE]
    return [*dear, computing, *(finding for finding in found if finding.share < MIN_SHARE)]


def _data_loading(columns: StepTimes) -> Iterator[Bottleneck]:
    waited = columns.data.max(1)
    begun = change_point(waited / columns.whole.max(1), 0.05)
    rank = columns.ranks[int(np.median(columns.data[begun:], 0).argmax())]
    yield Bottleneck(
        "input",
        columns.share(waited, begun),
        f"rank {rank} waits {np.median(waited[begun:]):.3g} s of each step for its tokens",
        "prepare the text beforehand (phalanx data prepare), keep it on a local disk, or give the loader a core",
        rank=rank,
        since=columns.steps[begun],
    )


def _straggler(recorded: RunData, run: RunSpec, columns: StepTimes) -> Iterator[Bottleneck]:
    """The rank that takes longest for its work, and why."""
    if len(columns.ranks) < 2:
        return
    flops = flops_per_rank(run, recorded.world_size, columns.ranks)
    computing = np.flatnonzero(flops > 0)
    if len(computing) < 2:
        return
    places = np.array([pipeline_rank(run, recorded.world_size, rank) for rank in columns.ranks])
    each = columns.compute / np.where(flops > 0, flops, np.inf)
    best: tuple[float, int, int, NDArray[np.float64]] | None = None
    for at in map(int, computing):
        copies = [other for other in computing if other != at and places[other] == places[at]]
        peers = copies or [other for other in computing if other != at]
        ratio = each[:, at] / np.median(each[:, peers], axis=1)
        begun = change_point(np.log(ratio), float(np.log(IMBALANCE_RATIO)))
        score = float(np.median(ratio[begun:])) / (STRAGGLER_RATIO if copies else SLOW_ALONE)
        if best is None or score > best[0]:
            best = score, at, begun, ratio
    assert best is not None
    score, at, begun, ratio = best
    if score < 1:
        return
    rank, times, step = columns.ranks[at], float(np.median(ratio[begun:])), columns.steps[begun]
    share = columns.share(columns.compute[:, at] * (1 - 1 / ratio), begun)
    rows = _relative_expert_rows(columns, at, begun)
    if rows > IMBALANCE_RATIO and times < rows * STRAGGLER_RATIO:
        layer, expert, hottest = _hottest(recorded, run, rank, step)
        said = f"; expert {expert} of layer {layer} has {hottest:.1f} times its share" if hottest else ""
        yield Bottleneck(
            "expert",
            share,
            f"rank {rank} computes {times:.1f} times as long as others, for its experts are sent {rows:.1f} times as "
            f"many rows{said}",
            "balance the router (moe.balance_loss, moe.bias_update_rate, a lower learning rate), or give its experts "
            "to other ranks: phalanx experts --balance",
            rank=rank,
            expert=(layer, expert) if hottest else None,
            since=step,
        )
        return
    yield Bottleneck(
        "straggler",
        share,
        f"rank {rank} on {recorded.ranks[rank].host} takes {times:.2f} times as long as others for as much work, since "
        f"step {step}",
        "look at that device: what else runs there, its clock and temperature; leave the host out if it stays",
        rank=rank,
        since=step,
    )


def _relative_expert_rows(columns: StepTimes, at: int, begun: int) -> float:
    """How many times as many rows the experts of a rank are sent as those of the others."""
    if columns.rows is None:
        return 1.0
    others = np.delete(columns.rows, at, axis=1).mean(1)
    return float(np.median((columns.rows[:, at] / np.maximum(others, 1))[begun:]))


def _hottest(recorded: RunData, run: RunSpec, rank: int, step: int) -> tuple[int, int, float]:
    """Of the experts that are hottest of all in steps from this one on, the one of this rank that is so most often, and
    its median share of the layer's tokens times their number: 0 where it is always another rank's."""
    assert run.model.moe is not None
    groups = expert_parallel_groups(parallel_dims(run.layout, recorded.world_size))
    place = next(group.index(rank) for group in groups if rank in group)
    each = run.model.moe.num_experts // run.layout.ep
    lines = next(iter(recorded.ranks.values())).steps
    hot = [line["hot_expert"] for line in lines if "hot_expert" in line and line["step"] >= step]
    mine = [(layer, expert, share) for layer, expert, share in hot if expert // each == place]
    if not mine:
        return 0, 0, 0.0
    (layer, expert), _ = Counter((layer, expert) for layer, expert, _ in mine).most_common(1)[0]
    return layer, expert, float(np.median([share for *where, share in mine if where == [layer, expert]]))


def _memory(run: RunSpec, columns: StepTimes) -> Iterator[Bottleneck]:
    """What is done for want of memory: computed again, or brought from where it rests."""
    again = recomputed_flops_per_token(
        run.model, run.training.seq_len, PHALANX_CHECKPOINTING[run.layout.activation_checkpointing]
    )
    if again:
        part = again / (again + training_flops_per_token(run.model, run.training.seq_len))
        yield Bottleneck(
            "memory",
            part * columns.share(columns.compute.max(1)),
            f"{100 * part:.0f} % of what is computed is computed again, for want of memory to keep it "
            f"(layout.activation_checkpointing = {run.layout.activation_checkpointing!r})",
            "see with phalanx advise what else makes room: a smaller micro-batch, more ranks that share the state",
        )
    if run.layout.offload != "none":
        yield Bottleneck(
            "memory",
            columns.share(columns.optimizer.max(1)),
            f"the update takes {np.median(columns.optimizer.max(1)):.3g} s with its state in "
            f"{'files' if run.layout.offload == 'nvme' else 'CPU memory'}",
            "shard the state over more ranks instead (layout.data_parallel, more dp), or a faster disk for it",
        )


def _pipeline(
    run: RunSpec, columns: StepTimes, stages: dict[int, dict[str, float]], real: Timeline, even: Timeline, late: bool
) -> Iterator[Bottleneck]:
    """What a pipeline waits: for its schedule's sake, and for a stage that takes longer. `real` and `even` are its
    schedule with the times of these stages, and with their mean; `late` says that a rank is to blame for its stage."""
    whole = columns.step_seconds
    name = run.layout.schedule_file or run.layout.schedule
    yield Bottleneck(
        "bubble",
        float(even.bubble * even.makespan) / whole,
        f"of {name} with these micro-batches every rank stands still for {100 * float(even.bubble):.0f} % of the "
        "passes, even with stages alike and nothing to send",
        "use more or smaller micro-batches (layout.micro_batch_size), interleaved stages or zero bubble "
        "(layout.schedule), or fewer stages",
    )
    if not late:
        seconds = {stage: sum(kinds.values()) for stage, kinds in stages.items()}
        stage = max(seconds, key=lambda stage: seconds[stage])
        times = seconds[stage] / float(np.mean(list(seconds.values())))
        yield Bottleneck(
            "stage",
            max(0.0, float(real.makespan - even.makespan)) / whole,
            f"stage {stage} takes {times:.2f} times as long as the mean of the stages, and the others wait for it",
            "use as many stages as the blocks divide by, or interleave them (layout.schedule): phalanx pipeline split "
            "shows what each would have",
            stage=stage,
        )


def _communication(recorded: RunData, columns: StepTimes, real: Timeline | None) -> Iterator[Bottleneck]:
    """What is waited for messages; `real` is the schedule of a pipeline in which these take no time."""
    if not columns.waits_are_known or len(columns.ranks) < 2:
        return
    seconds = columns.communication.min(1)
    begun = change_point(seconds / columns.whole.max(1), 0.05)
    share, sent = columns.share(seconds, begun), ""
    if real is not None:
        late = max(0.0, columns.share(columns.idle) - float(real.bubble * real.makespan) / columns.step_seconds)
        share, sent = share + late, f"; sends between stages make it wait for {100 * late:.0f} % of the step"
    yield Bottleneck(
        "communication",
        share,
        f"even the rank that waits least waits {np.median(seconds[begun:]):.3g} s of a step for collectives"
        f"{most_waited_collective(recorded)}{sent}",
        "look at the link with phalanx bench collectives; keep the axis that sends most on the fastest links, send "
        "less often (larger steps, layout.data_parallel), or less (bf16, layout.gradient_compression)",
        since=columns.steps[begun],
    )


def most_waited_collective(recorded: RunData) -> str:
    """The collective that ranks waited for most, where steps were looked at closely; said after a comma."""
    waited: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in recorded.ranks.values():
        for line in record.steps:
            for call in line.get("collectives", ()) if "memory" not in line else ():
                waited[call["operation"], tuple(call["group"])] += call["exposed"]
    if not waited:
        return ""
    (operation, group), _ = waited.most_common(1)[0]
    shown = ", ".join(map(str, group[:4])) + (", ..." if len(group) > 4 else "")
    return f", most for {operation} among ranks {shown}"


def _compute(recorded: RunData, columns: StepTimes) -> Bottleneck:
    mfus = [line["mfu"] for line in recorded.step_metrics if line["step"] in set(columns.steps) and line.get("mfu")]
    known = f", at an MFU of {100 * float(np.median(mfus)):.0f} %" if mfus else ""
    seconds = columns.computing.mean(1)
    return Bottleneck(
        "compute",
        columns.share(seconds),
        f"forward and backward passes take {np.median(seconds):.3g} s of a step{known}",
        "use larger micro-batches, training.compile, lower precision; then more or faster devices",
    )


def change_point(series: NDArray[np.float64], least: float) -> int:
    """From where on a series has been higher by at least `least`: a single change of its mean, where the squares of
    what is left are least. 0 where it has not changed."""
    cuts = np.arange(MIN_SEGMENT, len(series) - MIN_SEGMENT + 1)
    if not len(cuts):
        return 0
    sums = np.concatenate([[0.0], np.cumsum(series - series.mean())])[cuts]
    before, after = sums / cuts, -sums / (len(series) - cuts)  # of the mean of all
    explained = np.where(after - before >= least, -sums * (after - before), -np.inf)
    at = int(explained.argmax())
    return int(cuts[at]) if explained[at] > 0 else 0
