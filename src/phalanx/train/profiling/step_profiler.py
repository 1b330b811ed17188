"""Profiler of steps: times of each pass, wait and collective, and each rank's memory by part."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch

from phalanx.data.packing import Batch
from phalanx.parallel.comm.collectives import REQUESTED_OPERATION
from phalanx.parallel.data.ddp import POWERSGD_FROM_STEP
from phalanx.parallel.data.fsdp import all_gather_buffers
from phalanx.parallel.strategy import Strategy
from phalanx.runs.gpu_profile import GpuProfile
from phalanx.runs.measured import write_measured
from phalanx.runs.step_records import CollectiveSpan, StepRecord, downsample_memory, gpu_trace_file
from phalanx.spec.run import RunSpec
from phalanx.train.learner import Learner
from phalanx.train.profiling.clock_sync import ClockOffset, measure_clock_offset
from phalanx.train.profiling.collective_recorder import CollectiveCall, CollectiveRecorder
from phalanx.train.profiling.flop_counter import FlopCounter
from phalanx.train.profiling.gpu_tracer import trace_gpu_step
from phalanx.train.profiling.memory_meter import MemoryMeter
from phalanx.train.profiling.step_phases import executed_passes, pass_timestamps
from phalanx.train.step_metrics import ReadRecord
from phalanx.train.trainer import Trainer

MEASURED_STEP = 3
"""Step after a start that is measured: optimizer state exists, and DDP has rebuilt its buckets."""
COMMUNICATION = "communication"
PIPELINE = "pipeline"
Wait = tuple[float, float]
StepResult = TypeVar("StepResult")


def first_steady_step(run: RunSpec) -> int:
    """Return the first step after a start whose memory and traffic equal those of all later steps."""
    if run.layout.gradient_compression == "powersgd":
        return POWERSGD_FROM_STEP + 2
    # With a static graph, DDP rebuilds its buckets a step later.
    return MEASURED_STEP + run.layout.ddp_static_graph


class StepProfiler:
    """Replacement of a trainer's step function that profiles some steps.

    One of them is measured fully, which takes several times as long: its memory, traffic and FLOPs are written to
    `measured/`. On a GPU the last step, if it comes later, runs under torch.profiler, which writes a trace. For the
    others only times are recorded. Only in the traced step is compiled code used."""

    def __init__(self, trainer: Trainer, window: range) -> None:
        """Create the profiler; `window` are remaining steps."""
        self.trainer = trainer
        self.window = window
        self.clock_offset = ClockOffset()
        self.first_steady_step = trainer.step + first_steady_step(trainer.run)
        """The first step that equals all later ones."""
        self.metered_step = next((step for step in window if step >= self.first_steady_step), None)
        is_traced = trainer.device.type == "cuda" and self.metered_step is not None and window[-1] > self.metered_step
        self.traced_step = window[-1] if is_traced else None
        """The step under torch.profiler, without the other recorders, whose work on the host delays launches."""

    def __call__(self, batches: Iterator[Batch]) -> ReadRecord:
        """Run a step, with profiling if the step is in the window.

        Earlier records are read before a profiled step, because its profile belongs to its own record."""
        trainer = self.trainer
        step_number = trainer.step + 1
        trainer.profiles_next_step = step_number + 1 in self.window
        if step_number not in self.window:
            return trainer.launch_step(batches)
        # Clocks drift apart, so the offset measured at the start of the run is outdated.
        if step_number == self.window[0]:
            timeout_seconds = trainer.run.training.collective_timeout_seconds
            self.clock_offset = measure_clock_offset(trainer.device, timeout_seconds, f"step {step_number}")
        tokens = trainer.experts.current.clone()
        step = partial(trainer.train_step, batches)
        if step_number == self.metered_step:
            record, profile = profile_step(trainer, lambda _: step(), over_time=True)
            write_measured(trainer.directory, trainer.mesh.rank, {"step": record["step"], **profile.as_dict})
        elif step_number == self.traced_step:
            file = gpu_trace_file(trainer.directory, trainer.mesh.rank, step_number)
            with _record_waits(trainer.strategy) as waits:
                record, gpu = trace_gpu_step(step, file, trainer.device)
            profile = StepProfile(waits=waits, gpu=gpu)
        else:
            record, profile = time_step(trainer, step)
        assert trainer.step_record is not None
        trainer.step_record |= profile.as_step_record(self.clock_offset)
        timeline = trainer.strategy.timeline
        pass_times = trainer.strategy.clock.resolve(pass_timestamps(timeline))
        trainer.step_record["spans"] = [span.to_row() for span in executed_passes(timeline, pass_times)]
        if trainer.experts.layers:
            trainer.step_record["expert_tokens"] = (trainer.experts.current - tokens).long().tolist()
        return lambda: record | {"profiled": True}


@dataclass(kw_only=True)
class StepProfile:
    """The profile of a step."""

    waits: dict[str, list[Wait]]
    """Start and end of each wait, by its reason."""
    calls: list[CollectiveCall] = field(default_factory=list)
    resident_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by part between the backward pass and the update."""
    peak: dict[str, int] = field(default_factory=dict)
    """Peak bytes of each part, and of all parts together."""
    flops: int = 0
    """FLOPs of forward and backward passes."""
    memory_history: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)
    """Bytes by part over time."""
    gpu: GpuProfile | None = None
    """Figures of the GPU's trace."""

    @property
    def as_dict(self) -> dict[str, Any]:
        """The profile in the format of `measured/`."""
        return {
            "held_bytes": dict(self.resident_bytes),
            "peak_bytes": self.peak,
            "flops": self.flops,
            "collectives": summarize_collectives(self.calls, self.waits[COMMUNICATION]),
        }

    def as_step_record(self, offset: ClockOffset) -> StepRecord:
        """Return the additional fields of the step's record."""
        record: dict[str, Any] = {
            "clock": (offset.seconds, offset.error_seconds),
            "waits": [(wait_name, *wait) for wait_name, waits in self.waits.items() for wait in waits],
            "collectives": [self._collective_span(call) for call in self.calls],
        }
        if self.memory_history:
            record["memory"] = downsample_memory(self.memory_history)
        if self.gpu is not None:
            record["gpu"] = self.gpu
        return cast(StepRecord, record)

    def _collective_span(self, call: CollectiveCall) -> CollectiveSpan:
        return {
            "operation": call.operation,
            "executed_as": call.executed_as,
            "group": list(call.group),
            "bytes": call.size_bytes,
            "start": call.start,
            "end": call.end,
            "exposed": call.exposed_seconds(self.waits[COMMUNICATION]),
        }


class StepRecorders:
    """The recorders of one step: memory, collectives and FLOPs."""

    def __init__(self, learner: Learner, history: list[tuple[float, Mapping[str, int]]] | None = None) -> None:
        """Create the recorders; `history` receives the bytes by part over time."""
        gathered = all_gather_buffers(learner.strategy.module)
        if learner.teacher is not None:
            gathered += all_gather_buffers(learner.teacher.strategy.module)
        self.memory = MemoryMeter(
            lambda: learner.resident_tensors(learner.optimizers),
            gathered,
            history,
            other_memory=() if learner.device.type == "cpu" else ("offloaded",),
            known_after_collectives=lambda: learner.resident_tensors(()),  # no collective creates optimizer state
        )
        self.collectives = CollectiveRecorder(REQUESTED_OPERATION.get, learner.strategy.clock)
        self.flops = FlopCounter()


def profile_step(
    learner: Learner, step: Callable[[StepRecorders], StepResult], over_time: bool = False
) -> tuple[StepResult, StepProfile]:
    """Run a step several times slower, without compiled code, and return its result and full profile.

    `over_time` records the memory over time, not only its peak."""
    strategy = learner.strategy
    profile = StepProfile(waits={})
    recorders = StepRecorders(learner, profile.memory_history if over_time else None)
    memory = recorders.memory

    def record_flops() -> None:
        profile.flops = recorders.flops.flops

    def record_resident_memory() -> None:
        memory.reclassify()
        profile.resident_bytes.update(memory.bytes_by_part)

    # Finish the gathers of the previous update, so that the step contains those of one update.
    strategy.wait_for_weights()
    learner.after_passes.append(record_flops)
    learner.after_reduction.append(record_resident_memory)
    try:
        gradients = memory.tracking_gradients(learner.module.parameters())
        with (
            gradients,
            _record_waits(strategy) as profile.waits,
            _disable_compiled_code(learner),
            memory,
            recorders.collectives,
            recorders.flops,
        ):
            result = step(recorders)
            strategy.wait_for_weights()
    finally:
        learner.after_passes.remove(record_flops)
        learner.after_reduction.remove(record_resident_memory)
    recorders.collectives.resolve_device_times()
    profile.peak = {**memory.peaks, "working": memory.peak_working, "total": memory.peak_total}
    profile.calls = recorders.collectives.calls
    return result, profile


@contextmanager
def _disable_compiled_code(learner: Learner) -> Iterator[None]:
    """Run compiled blocks eagerly.

    A recorder of operations sees nothing of compiled code. And once a block was called under a recorder, PyTorch would
    never use the block's compiled code again."""
    if not learner.compiles:  # the import below takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def time_step(learner: Learner, step: Callable[[], StepResult]) -> tuple[StepResult, StepProfile]:
    """Run a step without compiled code, and return its result and the times of its waits and collectives."""
    strategy = learner.strategy
    recorder = CollectiveRecorder(REQUESTED_OPERATION.get, strategy.clock)
    with _record_waits(strategy) as waits, _disable_compiled_code(learner), recorder:
        result = step()
    recorder.resolve_device_times()
    return result, StepProfile(waits=waits, calls=recorder.calls)


def summarize_collectives(calls: list[CollectiveCall], waits: list[Wait]) -> list[dict[str, Any]]:
    """Return the collectives of a step by requested operation, executed operation, and group of ranks.

    Bytes are those of the requested operation; `sent_bytes` is the number that a rank sends with a ring algorithm."""
    rows: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = defaultdict(
        lambda: {"calls": 0, "bytes": 0, "sent_bytes": 0.0, "seconds": 0.0, "exposed_seconds": 0.0}
    )
    for call in calls:
        row = rows[call.operation, call.executed_as, call.group]
        row["calls"] += 1
        row["bytes"] += call.size_bytes
        row["sent_bytes"] += call.sent_bytes
        if call.end is not None:
            row["seconds"] += call.end - call.start
            row["exposed_seconds"] += call.exposed_seconds(waits)
    return [
        {"operation": operation, "executed_as": executed_as, "group": list(group), **row}
        for (operation, executed_as, group), row in sorted(rows.items())
    ]


@contextmanager
def _record_waits(strategy: Strategy) -> Iterator[dict[str, list[Wait]]]:
    timers = {COMMUNICATION: strategy.comm_wait, **strategy.model_parallel.wait_timers}
    if strategy.pipeline_wait is not None:
        timers[PIPELINE] = strategy.pipeline_wait
    waits: dict[str, list[Wait]] = {}
    for wait_name, timer in timers.items():
        waits[wait_name] = timer.spans = []
    try:
        yield waits
    finally:
        for timer in timers.values():
            timer.spans = None
