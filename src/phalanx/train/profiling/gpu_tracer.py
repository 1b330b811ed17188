"""Trace of a step on a GPU by torch.profiler: the trace itself, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.report.gpu_profile.step import profile_gpu_step
from phalanx.report.gpu_profile.trace import read_gpu_trace
from phalanx.runs.gpu_profile import GpuProfile

ACTIVITIES = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
STEP_ANNOTATION = "phalanx: step"
"""Name of the annotation in the trace: from an idle GPU to the end of the step's last event."""
StepResult = TypeVar("StepResult")


def trace_gpu_step(
    step: Callable[[], StepResult], file: Path, device: torch.device
) -> tuple[StepResult, GpuProfile | None]:
    """Run a step under torch.profiler (a collective); return its result and the figures of its trace."""
    with profile(activities=ACTIVITIES) as profiler:
        # Wait until all ranks have started their profilers. Otherwise this wait would count as communication.
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
        with record_function(STEP_ANNOTATION):
            result = step()
            torch.cuda.synchronize(device)
    file.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(file))
    return result, read_step_profile(file)


def read_step_profile(file: Path) -> GpuProfile | None:
    """Return the figures of a trace, or None if it has no events of the GPU or is not valid JSON."""
    try:
        trace = read_gpu_trace(file)
    except ValueError:
        # A trace that cannot be read is no reason to end a run.
        return None
    return profile_gpu_step(trace.events, trace.annotations[STEP_ANNOTATION])
