"""The metrics of a step: the results of a launched step, its times, and the utilization of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.cost.exact.flops import mfu, run_recomputed_flops_per_token, training_flops_per_token
from phalanx.parallel.comm.host_copy import PendingCopies
from phalanx.parallel.strategy import StepReduction, Strategy
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import StepRecord
from phalanx.spec.run import RunSpec
from phalanx.train.profiling.step_phases import StepPhaseTimer

ReadRecord = Callable[[], MetricsRecord]
"""Reads the record of a launched step, once; waits until a GPU has run it."""


@dataclass(frozen=True, kw_only=True)
class LaunchedResults:
    """Results of a launched step, which its record is made of."""

    step: int
    """Number of optimizer updates with this one."""
    tokens: int
    """Tokens of this step, over all ranks."""
    reduced: StepReduction
    on_host: PendingCopies
    """Copies of the sums and the norm."""
    phases: StepPhaseTimer
    expert_rows: int | None
    """Rows of this rank's experts, with expert parallelism."""
    learning_rate: float | None
    peak_memory_bytes: int


class UtilizationMeter:
    """Model and hardware FLOPs utilization of the ranks of a run."""

    def __init__(self, run: RunSpec, ranks: int, device: torch.device, peak_flops: float | None) -> None:
        """Measure against the peak of a rank in FLOP/s; if it is unknown (None), utilization is not recorded."""
        self.set_run(run)
        self.ranks = ranks
        self.peak_flops = peak_flops
        self.raises_peak = device.type == "cpu" and not run.cluster.peak_flops
        """True if the peak is from a short measurement, which may be too low."""

    def set_run(self, run: RunSpec) -> None:
        """Count the FLOPs of steps with the lengths of a run, from the next step on."""
        self.model_flops = training_flops_per_token(run.model, run.training.seq_len)
        self.hardware_flops = self.model_flops + run_recomputed_flops_per_token(run)

    def metrics(self, tokens_per_second: float) -> MetricsRecord:
        """Return the utilization at a speed of all ranks."""
        if not self.peak_flops:
            return {}
        if self.raises_peak:
            self.peak_flops = max(self.peak_flops, tokens_per_second * self.hardware_flops / self.ranks)
        return {
            "mfu": mfu(tokens_per_second, self.model_flops, self.peak_flops, self.ranks),
            "hfu": mfu(tokens_per_second, self.hardware_flops, self.peak_flops, self.ranks),
        }


def time_metrics(step_record: StepRecord, strategy: Strategy) -> MetricsRecord:
    """Return the seconds of a step's phases, and of its waits on this rank."""
    seconds = step_record["seconds"]
    waited = step_record.get("wait_seconds", {})
    metrics: MetricsRecord = {f"{phase}_seconds": phase_seconds for phase, phase_seconds in seconds.items()}
    if waited and strategy.runs_model:
        metrics["exposed_communication_seconds"] = sum(waited[phase] for phase in seconds)
    metrics |= {f"{name}_seconds": waited[name] for name in strategy.model_parallel.wait_timers if name in waited}
    if "pipeline" in waited:
        metrics["pipeline_wait_seconds"] = waited["pipeline"]
    return metrics
