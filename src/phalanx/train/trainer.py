"""The training loop, with metrics, evaluation, checkpoints, guards and stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phalanx.cost.exact.flops import mfu, recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.exact.scalar_reductions import NUM_SCALARS
from phalanx.cost.kinds import PHALANX_CHECKPOINTING
from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.parallel.comm.device_memory import peak_memory_bytes
from phalanx.parallel.comm.host_copy import copy_to_host
from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.runs.errors import DivergenceError
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import PauseRecord, StepRecord
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.auto_interval import CheckpointScheduler
from phalanx.train.evaluator import evaluate, evaluation_message
from phalanx.train.guards.divergence import LossSpikeDetector
from phalanx.train.guards.replica_check import check_replica_consistency
from phalanx.train.loggers import Logger
from phalanx.train.optim.optimizers import learning_rate_factor
from phalanx.train.profiling.step_phases import StepPhaseTimer
from phalanx.train.progress import ProgressDisplay
from phalanx.train.resumable import ResumableLearner
from phalanx.train.sample import generate_sample, is_sample_due, sample_message
from phalanx.train.time_budget import TimeBudget
from phalanx.train.training_data import TrainingData


class Trainer(ResumableLearner):
    """A run on this rank: a resumable learner, and the loop around it.

    torch.distributed must be initialized if there are several ranks."""

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
        self.peak_flops = peak_flops
        ranks = self.mesh.dims.world_size
        self.checkpoint_scheduler = CheckpointScheduler(run, ranks, directory)
        self.flops_per_token = training_flops_per_token(run.model, run.training.seq_len)
        checkpointing = PHALANX_CHECKPOINTING[run.layout.activation_checkpointing]
        self.recomputed_flops = recomputed_flops_per_token(run.model, run.training.seq_len, checkpointing)
        self.step_record: StepRecord | None = None
        """This rank's record of the last step."""
        self.stop_requested = False
        """Set by a signal on this rank, at any time."""
        self.spike_detector = LossSpikeDetector(None)
        """Detector of loss spikes, which end this trainer; another trainer then resumes from before the spike."""
        self.stop_after_step: int | None = None
        """The step after which all ranks save and stop, because a rank received a stop request."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.mesh.rank == 0

    @property
    def should_stop(self) -> bool:
        """True if all ranks have agreed to save and stop now."""
        return self.stop_after_step is not None and self.step >= self.stop_after_step

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(
        self,
        logs: list[Logger],
        progress: ProgressDisplay,
        step: Callable[[Iterator[Batch]], MetricsRecord] | None = None,
        rank_log: Logger | None = None,
    ) -> MetricsRecord:
        """Train to the last step or until a stop request, and return the last evaluation.

        Args:
            logs: Loggers of metrics.
            progress: Display of the progress.
            step: Replacement of `train_step`.
            rank_log: Logger of this rank's record of each step.
        """
        consecutive_nonfinite = 0
        last_seen_step = -1
        evaluation = {}
        step = step or self.train_step
        batches = prefetch(self.loader, self.step, self.run.training.steps)
        self.checkpoint_scheduler.start(self.step)
        time_budget = TimeBudget(self)
        try:
            while self.step < self.run.training.steps and not self.should_stop:
                record = step(batches)
                time_budget.end_step(record["step_seconds"], progress)
                run = self.run
                is_finite = math.isfinite(record["grad_norm"])
                is_new_step = record["step"] != last_seen_step
                last_seen_step = record["step"]  # an asynchronous worker may receive a step twice
                consecutive_nonfinite = 0 if is_finite else consecutive_nonfinite + is_new_step
                if consecutive_nonfinite and is_new_step:
                    progress.log(f"step {self.step}: skipped, {_describe_step(record)}")
                self._write(logs, record, run.metrics.every)
                if rank_log is not None and self.step_record is not None:
                    rank_log.write(dict(self.step_record))
                progress.advance(record)
                if is_due(self.step, run.training.replica_check_interval):
                    self._check_replicas()
                self._check_divergence(record, consecutive_nonfinite)
                should_evaluate = self.step == run.training.steps or is_due(self.step, run.evaluation.every)
                if should_evaluate:
                    self.rotate_expert_counts()  # before saving, since a resumed run does not repeat the evaluation
                self._save_if_due(record, is_finite, progress, rank_log=rank_log)
                if should_evaluate:
                    with self._record_pause("evaluation", rank_log):
                        evaluation = self.evaluate()
                    self._write(logs, evaluation, 1)
                    if self.step < self.run.training.steps:  # the last one is printed at the end
                        progress.log(f"step {self.step}: {evaluation_message(evaluation)}")
                if is_sample_due(run, self.step):
                    with self._record_pause("sample", rank_log):
                        sample = generate_sample(self)
                    progress.log(sample_message(self.step, sample))
        finally:
            batches.close()
        self.checkpointer.wait()
        return evaluation

    def train_step(self, batches: Iterator[Batch]) -> MetricsRecord:
        """Run one optimizer update, and return its record.

        The phases are forward and backward passes, their sum over ranks, and the update."""
        phases = StepPhaseTimer(self.strategy)
        micros = self.micro_batches(next(batches)) if self.strategy.runs_model else []
        phases.end("data")
        stop_state = float(self.stop_requested), 0 if self.strategy.runs_model else self.stop_after_step or 0
        sums = self.forward_backward(micros, stop_state)
        phases.end("passes")
        reduced = self.reduce(sums)
        sums, norm = copy_to_host(reduced.sums, reduced.norm)  # all values of a step in one copy
        tokens, loss, auxiliary, stop_requests, announced_step, dropped = sums[:NUM_SCALARS].tolist()
        phases.end("reduce")
        record = {"step": self.step + 1 - reduced.steps_behind, "loss": loss / tokens, "grad_norm": float(norm)}
        is_finite = math.isfinite(record["grad_norm"])
        if self.moe_layers:
            self._count_expert_loads(reduced.sums[NUM_SCALARS:].view_as(self.expert_loads[0]), is_finite)
            loads = sums[NUM_SCALARS:].view(self.expert_loads[0].shape)
            if self.run.model.moe and self.run.model.moe.capacity_factor is not None:
                record["dropped_share"] = dropped / float(loads.sum())
            relative_loads = loads / loads.mean(1, keepdim=True)
            layer, expert = divmod(int(relative_loads.argmax()), relative_loads.shape[1])
            hot_expert = self.moe_layers[layer], expert, float(relative_loads[layer, expert])
            record |= {"auxiliary_loss": auxiliary / tokens, "hot_expert_share": hot_expert[2]}
        self._update_or_skip(is_finite)
        phases.end("optimizer")
        self.step, self.tokens = self.step + 1, self.tokens + int(tokens)
        self._update_stop_step(record["step"], bool(stop_requests), int(announced_step))
        if reduced.staleness is not None and self.run.layout.max_staleness is not None:
            record["staleness"] = reduced.staleness
        self.step_record = phases.to_step_record(self.step, peak_memory_bytes(self.device))
        if self.moe_layers:
            self.step_record["hot_expert"] = hot_expert
        if self.strategy.pop_expert_rows is not None:
            self.step_record["expert_rows"] = self.strategy.pop_expert_rows()
        return record | self._performance_metrics(self.step_record, int(tokens))

    def _update_stop_step(self, step: int, stop_requested: bool, announced_step: int) -> None:
        """Decide after which step all ranks stop, from the sums of `step`.

        Asynchronous workers may miss a step. Servers miss none, and announce a later step that no rank can have passed
        by then."""
        staleness = self.run.layout.max_staleness
        if self.stop_after_step is not None:
            return
        if staleness is None:
            self.stop_after_step = step if stop_requested else None
        elif self.strategy.runs_model:
            self.stop_after_step = announced_step or None
        elif stop_requested:
            self.stop_after_step = step + 1 + staleness

    def _update_or_skip(self, is_finite: bool) -> None:
        """Update, or skip a gradient that is not finite."""
        if is_finite:
            ratio = learning_rate_factor(self.run.optimizer, self.step, self.run.training.steps)
            self.update(ratio * self.rescaling.factor_at(self.step))
        else:
            self.skipped += 1
            self.strategy.zero_grad()

    def _count_expert_loads(self, loads: Tensor, apply: bool) -> None:
        """Accumulate the loads of experts over all ranks, and update the routers' biases."""
        self.expert_loads[0] += loads / self.strategy.router_count_multiplicity
        for moe_index, router in self.routers.items():
            router.load.copy_(loads[moe_index])
            router.update_bias(apply and bool(self.strategy.trainable_parameters))  # a worker receives its biases

    # -- evaluation and saving ---------------------------------------------------------------------------------------

    def evaluate(self) -> MetricsRecord:
        """Return the loss on the held-out text, and the expert counts of the last interval."""
        return evaluate(self, self.micro_batches)

    def rotate_expert_counts(self) -> None:
        """Move the expert counts to the record of the next evaluation, and restart them."""
        self.expert_loads = torch.stack([torch.zeros_like(self.expert_loads[0]), self.expert_loads[0]])

    def _save_if_due(
        self, record: MetricsRecord, is_finite: bool, progress: ProgressDisplay, rank_log: Logger | None
    ) -> None:
        """Save after a step, on disk and in memory, if due."""
        # Weights without a finite gradient may be corrupt. (Asynchronous ranks are not notified at once.)
        is_sound = is_finite or self.run.layout.max_staleness is not None
        is_scheduled = self.checkpoint_scheduler.due(self.step, record["step_seconds"], self.checkpointer.is_saving)
        if ((is_scheduled or self.should_stop) and is_sound) or self.step == self.run.training.steps:
            with self._record_pause("checkpoint", rank_log):
                self._save_and_schedule_next(progress)
        if is_due(self.step, self.run.recovery.in_memory_checkpoint_every) and is_sound:
            with self._record_pause("copy", rank_log):
                self.save_in_memory()

    def _save_and_schedule_next(self, progress: ProgressDisplay) -> None:
        """Save, and decide when the next checkpoint is due."""
        started_at = time.perf_counter()
        self.save()
        if self.run.checkpoint.every != "auto":
            return
        blocked_seconds = time.perf_counter() - started_at
        write_seconds = self.checkpointer.save_seconds
        self.checkpoint_scheduler.next_step = broadcast_from_rank0(
            partial(self.checkpoint_scheduler.next_due_step, self.step, blocked_seconds, write_seconds)
        )
        if self.checkpoint_scheduler.reason is not None:
            progress.log(self.checkpoint_scheduler.reason)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _performance_metrics(self, step_record: StepRecord, tokens: int) -> MetricsRecord:
        seconds = step_record["seconds"]
        waited = step_record.get("wait_seconds", {})
        step_seconds = sum(seconds.values())
        ranks = self.mesh.dims.world_size
        tokens_per_second = tokens / step_seconds
        record = {
            "ranks": ranks,
            "resumed_at_step": self.resumed_at_step,
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": step_seconds,
        }
        record |= {f"{phase}_seconds": phase_seconds for phase, phase_seconds in seconds.items()}
        if waited and self.strategy.runs_model:
            record["exposed_communication_seconds"] = sum(waited[phase] for phase in seconds)
        record |= {f"{name}_seconds": waited[name] for name in self.strategy.wait_timers if name in waited}
        if "pipeline" in waited:
            record["pipeline_wait_seconds"] = waited["pipeline"]
        if self.peak_flops:
            hardware_flops = self.flops_per_token + self.recomputed_flops
            if self.device.type == "cpu" and not self.run.cluster.peak_flops:  # a short measurement, perhaps too low
                self.peak_flops = max(self.peak_flops, tokens_per_second * hardware_flops / ranks)
            record["mfu"] = mfu(tokens_per_second, self.flops_per_token, self.peak_flops, ranks=ranks)
            record["hfu"] = mfu(tokens_per_second, hardware_flops, self.peak_flops, ranks=ranks)
        if self.optimizers:
            record["learning_rate"] = self.optimizers[-1].param_groups[0]["lr"]
        return record | {"peak_memory_bytes": step_record["peak_memory_bytes"], "skipped_steps": self.skipped}

    @contextmanager
    def _record_pause(self, pause: str, rank_log: Logger | None) -> Iterator[None]:
        """Record the time of work between steps."""
        started_at = time.perf_counter()
        yield
        if rank_log is not None:
            record: PauseRecord = {
                "step": self.step,
                "pause": pause,
                "start": started_at,
                "seconds": time.perf_counter() - started_at,
            }
            rank_log.write(dict(record))

    def _check_replicas(self) -> None:
        """Raise CorruptionError if replicated state differs between ranks."""
        every = self.run.training.replica_check_interval
        error = check_replica_consistency(self.strategy, self.optimizers, self.mesh.dims, step=self.step, every=every)
        if error is not None:
            self.checkpointer.wait()
            raise error

    def _check_divergence(self, record: MetricsRecord, consecutive_nonfinite: int) -> None:
        """Raise DivergenceError after too many steps that were not finite, or a spike of the loss."""
        if consecutive_nonfinite >= self.run.training.max_nonfinite_steps:
            self.checkpointer.wait()
            raise DivergenceError(
                f"step {self.step}: {consecutive_nonfinite} consecutive steps were not finite "
                f"({_describe_step(record)}); "
                "lower optimizer.learning_rate or increase optimizer.warmup_steps, then continue with --resume"
            )
        if (ratio := self.spike_detector.spike_ratio(record["loss"])) is not None:
            self.checkpointer.wait()
            raise DivergenceError(f"step {self.step}: loss {record['loss']:.4g} is {ratio:.1f} times the recent median")

    def _write(self, logs: list[Logger], record: MetricsRecord, every: int) -> None:
        if record["step"] % every == 0 or record["step"] == self.run.training.steps:
            for log in logs:
                log.write({**record, "time": round(time.time(), 3)})


def _describe_step(record: MetricsRecord) -> str:
    return f"loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}"


def is_due(step: int, every: int) -> bool:
    """Return whether an action that happens `every` steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
