"""Figures of one step from the events of a GPU: compute, exposed communication, idle time, late launches, families."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.report.gpu_profile.intervals import Interval, merge_intervals, subtract_intervals, total_length
from phalanx.report.gpu_profile.kernels import FAMILIES, collective_name, kernel_family
from phalanx.report.gpu_profile.trace import KERNEL, GpuEvent
from phalanx.runs.gpu_profile import CollectiveSum, GpuProfile, GroupCommunication, KernelSum


def profile_gpu_step(events: Iterable[GpuEvent], window: Interval) -> GpuProfile | None:
    """Return the figures of a step, or None if the GPU did nothing in it.

    Events are those of one GPU, in the order of their starts; the window is start and end of the step in seconds.
    """
    window_start, window_end = window
    # Events that overlap with the window, without their time outside it
    inside = [
        replace(event, start=max(event.start, window_start), end=min(event.end, window_end))
        for event in events
        if event.start < window_end and event.end > window_start
    ]
    if not inside:
        return None
    by_family: dict[str, list[GpuEvent]] = defaultdict(list)
    for event in inside:
        by_family[kernel_family(event.name) if event.category == KERNEL else "memory"].append(event)
    nccl = [event for event in inside if is_nccl(event)]
    compute = merged_times(event for event in inside if event.category == KERNEL and not is_nccl(event))
    communication = merged_times(nccl)
    memory = merged_times(event for event in inside if event.category != KERNEL)
    kernels = merge_intervals([*compute, *communication])
    late = late_launches(inside, window)
    return {
        "seconds": window_end - window_start,
        "compute_seconds": total_length(compute),
        "communication_seconds": total_length(communication),
        "exposed_communication_seconds": total_length(subtract_intervals(communication, compute)),
        "memory_seconds": total_length(memory),
        "exposed_memory_seconds": total_length(subtract_intervals(memory, kernels)),
        "idle_seconds": total_length(subtract_intervals([window], merged_times(inside))),
        "late_launch_seconds": total_length(late),
        "late_launches": len(late),
        "families": {family: sum_kernels(by_family[family]) for family in FAMILIES if family in by_family},
        "groups": communication_by_group(nccl, compute),
    }


def is_nccl(event: GpuEvent) -> bool:
    """Return whether an event is a kernel of NCCL."""
    return event.category == KERNEL and kernel_family(event.name) == "nccl"


def merged_times(events: Iterable[GpuEvent]) -> list[Interval]:
    """Return the times in which at least one of the events runs."""
    return merge_intervals((event.start, event.end) for event in events)


def late_launches(events: Sequence[GpuEvent], window: Interval) -> list[Interval]:
    """Return the idle times that the host caused, because it had not yet launched the next event.

    A gap is idle time between the end of all earlier events, or the start of the window, and the start of an event.
    Its late part ends when the host's call that launched this event returns, or when the event starts. The rest of
    a gap is the GPU's: the latency of a launch, and waits for other streams. The idle time after the last event is
    not a gap.

    Events lie inside the window (start and end of the step in seconds), in the order of their starts.
    """
    late = []
    busy_until = window[0]
    for event in events:
        if event.launched_at is not None and event.start > busy_until:
            late.append((busy_until, min(event.launched_at, event.start)))
        busy_until = max(busy_until, event.end)
    return merge_intervals(late)


def sum_kernels(events: Sequence[GpuEvent]) -> KernelSum:
    """Return the number of events and the sum of their durations."""
    return {"count": len(events), "seconds": sum(event.end - event.start for event in events)}


def communication_by_group(nccl: Iterable[GpuEvent], compute: Sequence[Interval]) -> list[GroupCommunication]:
    """Return the communication of each process group, in the order of their first kernels.

    Kernels of NCCL carry the fields of the operator `record_param_comms` that launched them. `compute` has the
    merged times of compute kernels.
    """
    by_group: dict[str, list[GpuEvent]] = defaultdict(list)
    for event in nccl:
        by_group[str(event.args.get("Process Group Name", ""))].append(event)
    groups: list[GroupCommunication] = []
    for group, events in by_group.items():
        times = merged_times(events)
        args = events[0].args
        groups.append(
            {
                "group": group,
                "description": str(args.get("Process Group Description", "")),
                "ranks": int(args.get("Group size", 0)),
                "busy_seconds": total_length(times),
                "exposed_seconds": total_length(subtract_intervals(times, compute)),
                "collectives": sum_collectives(events),
            }
        )
    return groups


def sum_collectives(events: Iterable[GpuEvent]) -> list[CollectiveSum]:
    """Return the kernels of each collective of a process group, in the order of their first kernels."""
    by_collective: dict[str, list[GpuEvent]] = defaultdict(list)
    for event in events:
        by_collective[collective_name(event.args.get("Collective name"), event.name)].append(event)
    return [
        {"collective": name, "busy_seconds": total_length(merged_times(calls)), **sum_kernels(calls)}
        for name, calls in by_collective.items()
    ]
