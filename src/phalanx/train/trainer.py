"""The training loop: steps, the hooks of callbacks, and stopping on all ranks together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phalanx.cost.exact.flops import mfu, recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.kinds import PHALANX_CHECKPOINTING
from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.parallel.comm.device_memory import peak_memory_bytes
from phalanx.parallel.comm.host_copy import copy_to_host
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.runs.checkpoints import step_name
from phalanx.runs.create import read_run_directory, rewrite_run_file
from phalanx.runs.errors import CallbackError, DivergenceError
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import PauseRecord, StepRecord
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback
from phalanx.train.evaluator import evaluate
from phalanx.train.expert_counts import expert_metrics, hottest_expert
from phalanx.train.loggers import Logger
from phalanx.train.optim.optimizers import build_lr_function, learning_rate_factor
from phalanx.train.profiling.step_phases import StepPhaseTimer
from phalanx.train.progress import ProgressDisplay
from phalanx.train.resumable import ResumableLearner
from phalanx.train.step_sums import StepSums
from phalanx.train.time_budget import with_decided_steps
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
        self.flops_per_token = training_flops_per_token(run.model, run.training.seq_len)
        checkpointing = PHALANX_CHECKPOINTING[run.layout.activation_checkpointing]
        self.recomputed_flops = recomputed_flops_per_token(run.model, run.training.seq_len, checkpointing)
        self.lr_function = build_lr_function(run.optimizer)
        self.step_record: StepRecord | None = None
        """This rank's record of the last step."""
        self.stop_requested = False
        """Set by a signal on this rank, at any time."""
        self.finish_reason: str | None = None
        """Reason why this rank requests the end of the run."""
        self.stop_after_step: int | None = None
        """The step after which all ranks save and stop, because a rank received a stop request."""
        self.evaluation: MetricsRecord = {}
        """Record of the last evaluation."""
        self.has_pending_saves = False
        """True if a rank was still saving at the start of the last step."""
        self.unreported_checkpoint: Path | None = None
        """Directory of the checkpoint that is being saved."""
        self.progress = ProgressDisplay(0, None, quiet=True)
        self.rank_log: Logger | None = None
        """Log of this rank's records, while it trains."""

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

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(
        self,
        callbacks: Mapping[str, Callback],
        progress: ProgressDisplay,
        step: Callable[[Iterator[Batch]], MetricsRecord] | None = None,
    ) -> MetricsRecord:
        """Train to the last step or until a stop request, and return the last evaluation.

        Args:
            callbacks: Callbacks by name, in the order in which their hooks run.
            progress: Display of the progress.
            step: Replacement of `train_step`.
        """
        self.callbacks = callbacks
        self.progress = progress
        for name, state in self.callback_states.items():
            if name in callbacks:
                callbacks[name].load_state_dict(state)
        step = step or self.train_step
        batches = prefetch(self.loader, self.step, self.run.training.steps)
        try:
            self.call_hook("on_train_start")
            while not (self.is_complete or self.should_stop):
                record = step(batches)
                self.report_saved_checkpoint()
                self.call_hook("on_step_end", record)
        except BaseException as error:
            self.call_hook("on_exception", error)
            raise
        finally:
            batches.close()
        self.finish_checkpoint()
        self.call_hook("on_train_end", self.evaluation)
        return self.evaluation

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks.

        Raises:
            CallbackError: A callback of the user raised an error, other than one that Phalanx handles.
        """
        for name, callback in self.callbacks.items():
            try:
                getattr(callback, hook)(self, *arguments)
            except (UserError, DivergenceError):
                raise
            except Exception as error:
                if name not in self.run.callbacks:
                    raise
                raise CallbackError(f"callbacks.{name}: {hook} raised {type(error).__name__}: {error}") from error

    def finish(self, reason: str) -> None:
        """Request that the run ends after the next step, as if that were its last step.

        One rank is enough. The run evaluates and saves as at its end, and records the reduced number of steps.

        Args:
            reason: The reason to print.
        """
        if self.finish_reason is None:
            self.progress.log(f"step {self.step}: finishing the run after the next step: {reason}")
        self.finish_reason = reason

    def train_step(self, batches: Iterator[Batch]) -> MetricsRecord:
        """Run one optimizer update, and return its record.

        The phases are forward and backward passes, their sum over ranks, and the update."""
        phases = StepPhaseTimer(self.strategy)
        micros = self.micro_batches(next(batches)) if self.strategy.runs_model else []
        phases.end("data")
        rank_sums = self.forward_backward(micros)
        rank_sums.stop_requests.fill_(self.stop_requested)
        rank_sums.finish_requests.fill_(self.finish_reason is not None)
        rank_sums.pending_saves.fill_(self.checkpointer.is_saving)
        rank_sums.stop_step.fill_(0 if self.strategy.runs_model else self.stop_after_step or 0)
        phases.end("passes")
        reduced = self.reduce(rank_sums)
        host_sums, norm = copy_to_host(reduced.sums, reduced.norm)  # all values of a step in one copy
        sums = StepSums.unpack(host_sums, self.experts.load_shape)
        phases.end("reduce")
        record: MetricsRecord = {
            "step": self.step + 1 - reduced.steps_behind,
            "loss": float(sums.loss) / float(sums.tokens),
            "grad_norm": float(norm),
        }
        is_finite = math.isfinite(record["grad_norm"])
        if self.experts.layers:
            self._count_expert_loads(StepSums.unpack(reduced.sums, self.experts.load_shape), is_finite)
        self._update_or_skip(is_finite)
        phases.end("optimizer")
        self.step += 1
        self.tokens += int(sums.tokens)
        self._update_stop_step(record["step"], sums)
        self.has_pending_saves = bool(sums.pending_saves)
        if reduced.staleness is not None and self.run.layout.max_staleness is not None:
            record["staleness"] = reduced.staleness
        self.step_record = phases.to_step_record(self.step, peak_memory_bytes(self.device))
        if self.run.model.moe and self.experts.layers:
            hottest = hottest_expert(sums.expert_loads, self.experts.layers)
            self.step_record["hot_expert"] = hottest
            record |= expert_metrics(sums, hottest, has_capacity=self.run.model.moe.capacity_factor is not None)
        if self.strategy.pop_expert_rows is not None:
            self.step_record["expert_rows"] = self.strategy.pop_expert_rows()
        return record | self._performance_metrics(self.step_record, int(sums.tokens))

    def _update_stop_step(self, step: int, sums: StepSums) -> None:
        """Decide after which step all ranks stop, from the sums over ranks in `step`.

        Asynchronous workers may miss a step. Servers miss none, and announce a later step that no rank can have passed
        by then."""
        staleness = self.run.layout.max_staleness
        stops = bool(sums.stop_requests) or bool(sums.finish_requests)
        if self.stop_after_step is not None:
            return
        if staleness is None:
            self.stop_after_step = step if stops else None
        elif self.strategy.runs_model:
            self.stop_after_step = int(sums.stop_step) or None
        elif stops:
            self.stop_after_step = step + 1 + staleness
        if self.stop_after_step is not None and bool(sums.finish_requests) and not bool(sums.stop_requests):
            self.set_last_step(min(self.stop_after_step, self.run.training.steps))

    def set_last_step(self, step: int) -> None:
        """Set the number of steps of the run on this rank; rank 0 records it in the run directory.

        All ranks must call this at the same step.
        """
        self.run = with_decided_steps(self.run, step)
        self.progress.set_steps(step)
        if self.is_main:
            recorded, _ = read_run_directory(self.directory)
            rewrite_run_file(self.directory, with_decided_steps(recorded, step))

    def _update_or_skip(self, is_finite: bool) -> None:
        """Update, or skip a gradient that is not finite."""
        if is_finite:
            steps = self.run.training.steps
            ratio = learning_rate_factor(self.run.optimizer, self.step, steps, lr_function=self.lr_function)
            self.update(ratio * self.rescaling.factor_at(self.step))
        else:
            self.skipped += 1
            self.strategy.zero_grad()

    def _count_expert_loads(self, sums: StepSums, is_finite: bool) -> None:
        """Count the choices of experts over all ranks, and update the routers' biases."""
        self.experts.add(
            sums.expert_loads,
            self.routers,
            self.strategy.router_count_multiplicity,
            update_biases=is_finite and bool(self.strategy.trainable_parameters),  # a worker receives its biases
        )

    # -- evaluation and saving ---------------------------------------------------------------------------------------

    def evaluate(self) -> MetricsRecord:
        """Return the loss on the held-out text, and the expert counts of the last interval."""
        return evaluate(self, self.micro_batches)

    def start_checkpoint(self) -> None:
        """Start a checkpoint of this step, after the previous one is complete."""
        self.save()
        self.report_saved_checkpoint(is_complete=True)
        self.unreported_checkpoint = self.checkpointer.directory / step_name(self.step)

    def report_saved_checkpoint(self, is_complete: bool = False) -> None:
        """Call `on_checkpoint_saved` if the last checkpoint is complete on all ranks: in the same step on each."""
        directory = self.unreported_checkpoint
        if directory is not None and (is_complete or not self.has_pending_saves):
            self.unreported_checkpoint = None
            self.call_hook("on_checkpoint_saved", directory)

    def finish_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete, and report it."""
        self.checkpointer.wait()
        self.report_saved_checkpoint(is_complete=True)

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
    def record_pause(self, pause: str) -> Iterator[None]:
        """Record the time of work between steps.

        Args:
            pause: Name of the work.
        """
        started_at = time.perf_counter()
        yield
        if self.rank_log is not None:
            record: PauseRecord = {
                "step": self.step,
                "pause": pause,
                "start": started_at,
                "seconds": time.perf_counter() - started_at,
            }
            self.rank_log.write(dict(record))
