"""Traces of torch.profiler: recorded on this CPU, and hand-written ones of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.report.gpu_profile.trace import parse_gpu_trace, read_gpu_trace
from tests.helpers.gpu_traces import complete, step_events, write_trace


def test_read_gpu_trace_finds_annotation_in_recorded_cpu_trace(tmp_path: Path) -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        (weight @ weight).relu().sum().backward()
    file = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    trace = read_gpu_trace(file)
    assert trace.events == []
    start, end = trace.annotations["step"]
    assert 0 <= start < end < 60


def test_read_gpu_trace_sorts_events_and_finds_their_launches(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    write_trace(file, step_events("step"))
    trace = read_gpu_trace(file)
    starts = [event.start for event in trace.events]
    assert starts == sorted(starts)
    assert len(starts) == 9
    start, end = trace.annotations["step"]
    assert end - start == pytest.approx(1e-3)
    first_in_step = trace.events[1]
    assert first_in_step.launched_at == pytest.approx(start + 10e-6, abs=2e-9)
    assert first_in_step.start == pytest.approx(start + 20e-6, abs=2e-9)
    assert first_in_step.args["stream"] == 7


def test_parse_gpu_trace_has_no_launch_time_without_launch_call() -> None:
    [event] = parse_gpu_trace([complete("gpu_memset", "Memset (Device)", 0, 3, correlation=1)]).events
    assert event.launched_at is None
    assert parse_gpu_trace([]).events == []
