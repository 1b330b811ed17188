"""Figures of a step: from a hand-written trace, and from random events compared with a count of every microsecond."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.report.gpu_profile.step import profile_gpu_step
from phalanx.report.gpu_profile.trace import GpuEvent, parse_gpu_trace
from tests.helpers.gpu_traces import GEMM, group_fields, kernel, nccl, step_events

MICROSECOND = 1e-6


def step_profile() -> Any:
    """Return the figures of the hand-made step."""
    trace = parse_gpu_trace(step_events("step"))
    return profile_gpu_step(trace.events, trace.annotations["step"])


def approx(microseconds: float) -> Any:
    return pytest.approx(microseconds * MICROSECOND, abs=5e-9)


def test_gpu_profile_splits_step_into_compute_exposed_and_idle_time() -> None:
    profile = step_profile()
    expected = {
        "seconds": 1000,
        "compute_seconds": 530,
        "communication_seconds": 400,
        "exposed_communication_seconds": 200,
        "memory_seconds": 50,
        "exposed_memory_seconds": 50,
        "idle_seconds": 220,
    }
    assert {name: profile[name] for name in expected} == {name: approx(value) for name, value in expected.items()}


def test_gpu_profile_counts_idle_time_until_launch_as_late() -> None:
    profile = step_profile()
    # 10 us until the first launch and 80 us of the third gap. The copy was launched before its gap.
    assert profile["late_launch_seconds"] == approx(90)
    assert profile["late_launches"] == 2


def test_gpu_profile_has_communication_of_each_group() -> None:
    dp, tp = step_profile()["groups"]
    assert (dp["group"], dp["description"], dp["ranks"]) == ("3", "mesh_dp_shard", 2)
    assert (tp["group"], tp["description"], tp["ranks"]) == ("5", "mesh_tp", 2)
    assert dp["busy_seconds"] == approx(350)
    assert dp["exposed_seconds"] == approx(150)
    assert tp["exposed_seconds"] == approx(50)
    assert [(row["collective"], row["count"], row["seconds"]) for row in dp["collectives"]] == [
        ("all_gather", 1, approx(200)),
        ("reduce_scatter", 1, approx(150)),
    ]


def test_gpu_profile_has_families_without_kernels_outside_step() -> None:
    families = step_profile()["families"]
    assert {name: (row["count"], row["seconds"]) for name, row in families.items()} == {
        "matmul": (1, approx(180)),
        "attention": (1, approx(150)),
        "elementwise": (1, approx(100)),
        "optimizer": (1, approx(100)),
        "nccl": (3, approx(400)),
        "memory": (1, approx(50)),
    }


def test_simultaneous_collectives_of_group_are_summed_and_merged() -> None:
    fields = group_fields("allreduce", "0", "default_pg", 8)
    events = nccl("AllReduce", 0, 100, 0, **fields) + nccl("AllReduce", 50, 150, 0, **fields)
    profile = profile_gpu_step(parse_gpu_trace(events).events, (0.0, 1.0))
    assert profile is not None
    [group] = profile["groups"]
    [row] = group["collectives"]
    assert row["seconds"] == approx(200)
    assert row["busy_seconds"] == group["busy_seconds"] == group["exposed_seconds"] == approx(150)


def test_nccl_kernel_without_fields_belongs_to_unnamed_group() -> None:
    profile = profile_gpu_step(parse_gpu_trace(nccl("SendRecv", 0, 10, 0)).events, (0.0, 1.0))
    assert profile is not None
    [group] = profile["groups"]
    assert (group["group"], group["description"], group["ranks"]) == ("", "", 0)
    assert group["collectives"][0]["collective"] == "send_recv"


def test_step_without_events_of_gpu_has_no_profile() -> None:
    events = parse_gpu_trace(kernel(GEMM, 0, 10, 0)).events
    assert profile_gpu_step(events, (1.0, 2.0)) is None
    assert profile_gpu_step([], (0.0, 1.0)) is None


KINDS = {"compute": ("kernel", GEMM), "nccl": ("kernel", "ncclDevKernel_AllReduce"), "memory": ("gpu_memcpy", "Memcpy")}


@st.composite
def gpu_events(draw: st.DrawFn) -> list[GpuEvent]:
    """Return events in integer seconds between 0 and 40, with or without a launch."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(sorted(KINDS)),
                st.integers(0, 30),
                st.integers(1, 10),
                st.none() | st.integers(0, 40),
            ),
            min_size=1,
            max_size=12,
        )
    )
    return [
        GpuEvent(
            name=KINDS[kind][1],
            category=KINDS[kind][0],
            start=start,
            end=start + length,
            launched_at=None if launched_at is None else min(launched_at, start),
            args={},
        )
        for kind, start, length, launched_at in sorted(rows, key=lambda row: row[1])
    ]


def covered(events: list[GpuEvent], kind: str, window: tuple[int, int]) -> set[int]:
    """Return the seconds of a window in which an event of a kind runs."""
    matching = [event for event in events if (event.category, event.name) == KINDS[kind]]
    return {second for event in matching for second in range(int(event.start), int(event.end))} & set(range(*window))


@given(gpu_events(), st.tuples(st.integers(0, 15), st.integers(16, 40)))
def test_gpu_profile_equals_count_of_every_second(events: list[GpuEvent], window: tuple[int, int]) -> None:
    profile = profile_gpu_step(events, window)
    compute, communication, memory = (covered(events, kind, window) for kind in ("compute", "nccl", "memory"))
    if profile is None:
        assert not compute | communication | memory
        return
    assert profile["compute_seconds"] == len(compute)
    assert profile["communication_seconds"] == len(communication)
    assert profile["exposed_communication_seconds"] == len(communication - compute)
    assert profile["memory_seconds"] == len(memory)
    assert profile["exposed_memory_seconds"] == len(memory - compute - communication)
    idle = set(range(*window)) - compute - communication - memory
    assert profile["idle_seconds"] == len(idle)
    assert sum(group["exposed_seconds"] for group in profile["groups"]) == len(communication - compute)
    assert 0 <= profile["late_launch_seconds"] <= profile["idle_seconds"]
    late = {
        second
        for second in idle
        for event in [next((event for event in events if event.start > second), None)]
        if event is not None and event.start < window[1]
        if event.launched_at is not None and event.launched_at > second
    }
    assert profile["late_launch_seconds"] == len(late)
