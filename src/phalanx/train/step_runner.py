"""One optimizer update of a run: launched on the device, and read into a record, with what ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from phalanx.data.packing import Batch
from phalanx.parallel.comm.device_memory import peak_memory_bytes
from phalanx.parallel.comm.host_copy import PendingCopies
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.runs.create import read_run_directory, rewrite_run_file
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import StepRecord
from phalanx.spec.run import RunSpec
from phalanx.train.expert_counts import expert_metrics, hottest_expert
from phalanx.train.optim.optimizers import build_lr_function, can_skip_on_device, learning_rate_factor, skip_if
from phalanx.train.profiling.step_phases import StepPhaseTimer
from phalanx.train.progress import ProgressDisplay
from phalanx.train.resumable import ResumableLearner
from phalanx.train.step_metrics import LaunchedResults, ReadRecord, UtilizationMeter, time_metrics
from phalanx.train.step_sums import StepSums
from phalanx.train.time_budget import with_decided_steps
from phalanx.train.training_data import TrainingData


class StepRunner(ResumableLearner):
    """A resumable learner that runs optimizer updates, and agrees with the other ranks on when to stop."""

    def __init__(
        self,
        run: RunSpec,
        corpus: TrainingData,
        directory: Path,
        device: torch.device,
        peak_flops: float | None = None,
        trained_experts: TrainedExperts | None = None,
    ) -> None:
        super().__init__(run, corpus, directory, device, trained_experts)
        self.utilization = UtilizationMeter(run, self.mesh.dims.world_size, device, peak_flops=peak_flops)
        self.lr_function = build_lr_function(run.optimizer)
        self.step_record: StepRecord | None = None
        """This rank's record of the last step."""
        self.stop_requested = False
        """Set by a signal on this rank, at any time."""
        self.finish_reason: str | None = None
        """Reason why this rank requests the end of the run."""
        self.stop_after_step: int | None = None
        """The step after which all ranks save and stop, because a rank received a stop request."""
        self.has_pending_saves = False
        """True if a rank was still saving when it sent the sums of the last step."""
        self.progress = ProgressDisplay(0, None, quiet=True)
        self.allows_late_reads = device.type == "cuda"
        """True if the record of a step may be read while a GPU runs the next, where the optimizers permit it."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.mesh.rank == 0

    @property
    def is_complete(self) -> bool:
        """True after the last step of the run."""
        return self.step >= self.run.training.steps

    @property
    def should_stop(self) -> bool:
        """True if all ranks have agreed to save and stop now."""
        return self.stop_after_step is not None and self.step >= self.stop_after_step

    @property
    def reads_late(self) -> bool:
        """True if the record of a step is read while a GPU runs the next."""
        return self.allows_late_reads and self.can_read_late

    @property
    def can_read_late(self) -> bool:
        """True if a step can run without reading its results: whether the gradient is finite."""
        moe = self.run.model.moe
        routers_need_it = moe is not None and moe.bias_update_rate > 0
        return (
            can_skip_on_device(self.optimizers)
            and self.run.layout.offload == "none"
            and self.run.layout.data_parallel != "parameter_server"
            and not routers_need_it
        )

    def train_step(self, batches: Iterator[Batch]) -> MetricsRecord:
        """Run one optimizer update, and return its record."""
        return self.launch_step(batches)()

    def launch_step(self, batches: Iterator[Batch]) -> ReadRecord:
        """Launch one optimizer update, and return the function that reads its record.

        The phases are forward and backward passes, their sum over ranks, and the update. With `reads_late` the host
        does not wait for a GPU here: fused AdamW skips a gradient that is not finite by itself."""
        phases = StepPhaseTimer(self.strategy)
        micros = self.micro_batches(next(batches)) if self.strategy.runs_model else []
        phases.end("data")
        rank_sums = self.forward_backward(micros)
        self._set_requests(rank_sums)
        phases.end("passes")
        reduced = self.reduce(rank_sums)
        on_host = PendingCopies(reduced.sums, reduced.norm)  # all values of a step in one copy
        if self.reads_late:
            skip_if(self.optimizers, ~reduced.norm.isfinite())
            is_finite = True
        else:
            is_finite = math.isfinite(on_host.wait()[1])
        phases.end("reduce")
        if self.experts.layers:
            self._count_expert_loads(StepSums.unpack(reduced.sums, self.experts.load_shape), is_finite)
        self._update_or_skip(is_finite)
        phases.end("optimizer")
        phases.finish()
        self.step += 1
        expert_rows = None if self.strategy.pop_expert_rows is None else self.strategy.pop_expert_rows()
        results = LaunchedResults(
            step=self.step,
            reduced=reduced,
            on_host=on_host,
            phases=phases,
            expert_rows=expert_rows,
            learning_rate=self.optimizers[-1].param_groups[0]["lr"] if self.optimizers else None,
            peak_memory_bytes=peak_memory_bytes(self.device),
        )
        return partial(self._read_step, results)

    def _set_requests(self, rank_sums: StepSums) -> None:
        """Set what this rank tells the others in the sums of a step."""
        rank_sums.stop_requests.fill_(self.stop_requested)
        rank_sums.finish_requests.fill_(self.finish_reason is not None)
        rank_sums.pending_saves.fill_(not self.checkpointer.is_complete)
        if not self.strategy.runs_model:  # a parameter server, which announces the step to its workers
            rank_sums.stop_step.fill_(self.stop_after_step or 0)

    def _read_step(self, results: LaunchedResults) -> MetricsRecord:
        """Return the record of a launched step, and count what it says: tokens, skipped steps, requests to stop."""
        host_sums, norm = results.on_host.wait()
        sums = StepSums.unpack(host_sums, self.experts.load_shape)
        record: MetricsRecord = {
            "step": results.step - results.reduced.steps_behind,
            "loss": float(sums.loss) / float(sums.tokens) if sums.tokens else math.nan,
            "grad_norm": float(norm),
        }
        self.skipped += not math.isfinite(record["grad_norm"])
        targets = int(sums.tokens)
        tokens = self.batch.global_batch_size * self.run.training.seq_len
        self.tokens += tokens
        self.targets += targets
        self._update_stop_step(record["step"], sums)
        self.has_pending_saves = bool(sums.pending_saves)
        if results.reduced.staleness is not None and self.run.layout.max_staleness is not None:
            record["staleness"] = results.reduced.staleness
        self.step_record = results.phases.to_step_record(results.step, results.peak_memory_bytes)
        if self.run.model.moe and self.experts.layers:
            hottest = hottest_expert(sums.expert_loads, self.experts.layers)
            self.step_record["hot_expert"] = hottest
            record |= expert_metrics(sums, hottest, has_capacity=self.run.model.moe.capacity_factor is not None)
        if results.expert_rows is not None:
            self.step_record["expert_rows"] = results.expert_rows
        return record | self._performance_metrics(results, self.step_record, tokens, targets=targets)

    def _performance_metrics(
        self, results: LaunchedResults, step_record: StepRecord, tokens: int, *, targets: int
    ) -> MetricsRecord:
        """Return the metrics of speed and size of a step.

        Args:
            results: Results of the step.
            step_record: Its times on this rank.
            tokens: Tokens that all ranks computed, which speed and utilization refer to.
            targets: Those of them with a target.
        """
        step_seconds = sum(step_record["seconds"].values())
        metrics: MetricsRecord = {
            "ranks": self.mesh.dims.world_size,
            "resumed_at_step": self.resumed_at_step,
            "tokens": self.tokens,
            "targets": self.targets,
            "tokens_per_second": tokens / step_seconds,
            "targets_per_second": targets / step_seconds,
            "step_seconds": step_seconds,
            **time_metrics(step_record, self.strategy),
            **self.utilization.metrics(tokens / step_seconds),
        }
        if results.learning_rate is not None:
            metrics["learning_rate"] = results.learning_rate
        return metrics | {"peak_memory_bytes": results.peak_memory_bytes, "skipped_steps": self.skipped}

    def _update_stop_step(self, step: int, sums: StepSums) -> None:
        """Decide after which step all ranks stop, from the sums over ranks in `step`, which all ranks read alike."""
        if self.stop_after_step is not None:
            return
        is_stopping = bool(sums.stop_requests)
        is_finishing = bool(sums.finish_requests)
        if self.run.layout.max_staleness is not None:
            self.stop_after_step = self._asynchronous_stop_step(step, sums, is_stopping or is_finishing)
        elif is_stopping or is_finishing:
            self.stop_after_step = max(step, self.step)  # a later step may have been launched
        if self.stop_after_step is not None and is_finishing and not is_stopping:
            self.set_last_step(min(self.stop_after_step, self.run.training.steps))

    def _asynchronous_stop_step(self, step: int, sums: StepSums, is_requested: bool) -> int | None:
        """Return the step after which asynchronous workers stop, if it is known.

        Workers may miss a step. Servers miss none, and announce a later step that no rank can have passed by then."""
        if self.strategy.runs_model:
            return int(sums.stop_step) or None
        return step + 1 + (self.run.layout.max_staleness or 0) if is_requested else None

    def set_last_step(self, step: int) -> None:
        """Set the number of steps of the run on this rank; rank 0 records it in the run directory.

        All ranks must call this at the same step.
        """
        self.run = with_decided_steps(self.run, step)
        self.progress.set_steps(step)
        if self.is_main:
            recorded, _ = read_run_directory(self.directory, trust=True)  # it is only written
            rewrite_run_file(self.directory, with_decided_steps(recorded, step))

    def _update_or_skip(self, is_finite: bool) -> None:
        """Update, or skip a gradient that is not finite. The norm is equal on all ranks, so all decide alike."""
        if is_finite:
            steps = self.run.training.steps
            ratio = learning_rate_factor(self.run.optimizer, self.step, steps, lr_function=self.lr_function)
            self.update(ratio * self.rescaling.factor_at(self.step))
        else:
            self.strategy.zero_grad()

    def _count_expert_loads(self, sums: StepSums, is_finite: bool) -> None:
        """Count the choices of experts over all ranks, and update the routers' biases."""
        self.experts.add(
            sums.expert_loads,
            self.routers,
            self.strategy.router_count_multiplicity,
            update_biases=is_finite and bool(self.strategy.trainable_parameters),  # a worker receives its biases
        )
