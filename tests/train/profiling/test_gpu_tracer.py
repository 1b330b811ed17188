"""Steps under torch.profiler: recorded here on the CPU, and with the GPU's events by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from phalanx.report.gpu_profile.trace import read_gpu_trace
from phalanx.train.profiling import gpu_tracer
from phalanx.train.profiling.gpu_tracer import STEP_ANNOTATION, read_step_profile, trace_gpu_step
from tests.helpers.gpu_traces import step_events, write_trace


def test_trace_gpu_step_writes_trace_with_annotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized = []
    monkeypatch.setattr(gpu_tracer, "ACTIVITIES", (ProfilerActivity.CPU,))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    file = tmp_path / "trace" / "rank.json.gz"
    device = torch.device("cpu")
    result, profile = trace_gpu_step(lambda: float(torch.ones(8).sum()), file, device)
    assert result == 8
    assert profile is None  # the CPU's trace has no events of a GPU
    assert synchronized == [device, device]
    start, end = read_gpu_trace(file).annotations[STEP_ANNOTATION]
    assert start < end


def test_read_step_profile_uses_window_of_annotation(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    write_trace(file, step_events(STEP_ANNOTATION))
    profile = read_step_profile(file)
    assert profile is not None
    assert profile["seconds"] == pytest.approx(1e-3)


def test_read_step_profile_is_none_for_invalid_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b'{"traceEvents": [{"name": "\\x"}'))
    assert read_step_profile(file) is None
