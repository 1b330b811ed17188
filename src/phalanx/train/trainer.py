"""The training loop of one rank: steps, their records, callbacks, checkpoints, and the agreement of ranks to stop."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.launch.process import STOP_SECONDS
from phalanx.model.transformer import set_rotary_embedding
from phalanx.parallel.comm.device_memory import peak_memory_bytes
from phalanx.parallel.comm.host_copy import PendingCopies
from phalanx.parallel.comm.objects import all_gather_objects, broadcast_from_rank0, rank_and_world_size
from phalanx.parallel.data.fsdp import reshard_parameters
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.parallel.mesh import build_mesh
from phalanx.runs.checkpoint_store import store_folder
from phalanx.runs.checkpoints import (
    CHECKPOINTS_DIR,
    adapter_table,
    check_manifest,
    check_not_all_damaged,
    implementations,
    read_manifest,
    saved_evaluation,
    step_name,
    step_of,
)
from phalanx.runs.create import read_run_directory, rewrite_run_file
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.reference_log_probs import ReferenceLogProbs
from phalanx.runs.step_records import PauseRecord, StepRecord
from phalanx.spec.batch import plan_batch
from phalanx.spec.phases import Phase, describe_phases, phase_at, phases_of, rate_spans, source_shares
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback, call_callback
from phalanx.train.checkpoint.checkpointer import Checkpointer, latest_step, latest_valid_checkpoint
from phalanx.train.checkpoint.in_memory import InMemoryCheckpointer
from phalanx.train.checkpoint.state import (
    checkpoint_tensors,
    load_checkpoint,
    restore_rng_state,
    restore_tensors,
    rng_state,
    set_rng_state,
)
from phalanx.train.evaluator import evaluate
from phalanx.train.expert_counts import expert_metrics, hottest_expert
from phalanx.train.guards.divergence import count_rollbacks, steps_to_skip
from phalanx.train.learner import Learner
from phalanx.train.loggers import Logger
from phalanx.train.model_weights import model_weights
from phalanx.train.optim.optimizers import (
    LearningRateRescaling,
    build_lr_function,
    can_skip_on_device,
    learning_rate_ratio,
    skip_if,
)
from phalanx.train.profiling.step_phases import StepPhaseTimer
from phalanx.train.progress import ProgressDisplay
from phalanx.train.reference import open_reference
from phalanx.train.step_metrics import LaunchedResults, ReadRecord, UtilizationMeter, time_metrics
from phalanx.train.step_sums import StepSums
from phalanx.train.time_budget import with_decided_steps
from phalanx.train.training_data import TrainingData

logger = logging.getLogger(__name__)

EXIT_SECONDS = 60
"""Seconds that a stopped rank needs after its wait for uploads."""


class Trainer(Learner):
    """A run on this rank: a learner with its data and its progress, and the loop around its steps.

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
        world_size = rank_and_world_size()[1]
        mesh = build_mesh(run.layout, world_size, device.type)
        super().__init__(run, mesh, device, corpus.weights, trained_experts, corpus.teacher_weights)
        self.corpus = corpus
        self.directory = directory
        self.phases = phases_of(run)
        """Phases of the run in order, of which most runs have one."""
        self.phase = self.phases[0]
        """The phase of the last step."""
        self.loader = corpus.phased_loader(self.phases, self.mesh.dp_rank, self.batch.dp_size)
        self.utilization = UtilizationMeter(run, world_size, device, peak_flops)
        self.rate_spans = rate_spans(run)
        """Learning-rate schedules of the run in order."""
        self.source_shares = source_shares(run)
        """Share of each source in the tokens of the run as it was started, by which evaluations divide their text."""
        self.lr_function = build_lr_function(run.optimizer)
        scale = self.batch.learning_rate_scale
        self.rescaling = LearningRateRescaling(scale, scale, 0, steps=0)
        # Progress, which checkpoints restore.
        self.step = 0
        """Number of optimizer updates."""
        self.resumed_at_step = 0
        """The step after which this start of the run resumed."""
        self.tokens = 0
        """Number of tokens computed in training, over all ranks."""
        self.targets = 0
        """Number of targets trained on, each counted by its weight: tokens without those whose target is ignored."""
        self.skipped = 0
        """Number of steps whose gradient was not finite."""
        self.reference: ReferenceLogProbs | None = None
        """Log-probabilities of answers by the initial weights, in a run on preferences, once they are known."""
        # Checkpoints.
        self.checkpointer = Checkpointer(directory / CHECKPOINTS_DIR, run.checkpoint.keep, store_folder(run))
        self.in_memory_checkpointer: InMemoryCheckpointer | None = None
        if run.recovery.in_memory_checkpoint_every:
            # Copies from before a rollback are not of this run.
            num_rollbacks = broadcast_from_rank0(partial(count_rollbacks, directory))
            identity = {"ranks": world_size, "rollbacks": num_rollbacks, **in_memory_identity(run)}
            group = dist.new_group(backend="gloo") if dist.is_initialized() else None
            self.in_memory_checkpointer = InMemoryCheckpointer(identity, group, device)
        self.unreported_checkpoint: Path | None = None
        """Directory of the checkpoint that is being saved."""
        self.has_pending_saves = False
        """True if a rank was still saving when it sent the sums of the last step."""
        # The loop.
        self.callbacks: Mapping[str, Callback] = {}
        """Callbacks by name, in the order in which their hooks run."""
        self.callback_states: dict[str, dict[str, Any]] = {}
        """States of callbacks in the restored checkpoint."""
        self.progress = ProgressDisplay(0, None, quiet=True)
        self.evaluation: MetricsRecord = {}
        """Record of the last evaluation."""
        self.launched: deque[ReadRecord] = deque()
        """Steps whose records are not read yet."""
        self.step_record: StepRecord | None = None
        """This rank's record of the last step."""
        self.rank_log: Logger | None = None
        """Log of this rank's records, while it trains."""
        self.profiles_next_step = False
        """True if the next step is profiled, before which all records are read."""
        self.allows_late_reads = device.type == "cuda"
        """True if the record of a step may be read while a GPU runs the next, where the optimizers permit it."""
        # The end of the run.
        self.stop_requested_at: float | None = None
        """Time (monotonic) of the first stop request by a signal on this rank."""
        self.finish_reason: str | None = None
        """Reason why this rank requests the end of the run."""
        self.stop_after_step: int | None = None
        """The step after which all ranks save and stop, because a rank received a stop request."""

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
    def stop_requested(self) -> bool:
        """True after a signal on this rank; set at any time."""
        return self.stop_requested_at is not None

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        # The time until ranks are killed begins with the first signal.
        requested_at = time.monotonic() if self.stop_requested_at is None else self.stop_requested_at
        self.stop_requested_at = requested_at if value else None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(
        self,
        callbacks: Mapping[str, Callback],
        progress: ProgressDisplay,
        step: Callable[[Iterator[Batch]], ReadRecord] | None = None,
    ) -> MetricsRecord:
        """Train to the last step or until a stop request, and return the last evaluation.

        `step` replaces `launch_step`, such as to profile it."""
        self.callbacks = callbacks
        self.progress = progress
        step = step or self.launch_step
        batches = prefetch(self.loader, self.step, self.run.training.steps)
        try:
            for name, state in self.callback_states.items():
                if name in callbacks:
                    call_callback(name, callbacks[name].load_state_dict, state)
            self.call_hook("on_train_start")
            while not (self.is_complete or self.should_stop):
                self.launched.append(step(batches))
                self.read_launched(keep=0 if self.must_read_before_next_launch else 1)
            self.read_launched(keep=0)
            self.finish_checkpoint()
            self.call_hook("on_train_end", self.evaluation)
        except BaseException as error:
            self._report_exception(error)
            raise
        finally:
            batches.close()
        return self.evaluation

    @property
    def must_read_before_next_launch(self) -> bool:
        """True if the record of the last step is read, and callbacks run, before another step changes weights."""
        if self.profiles_next_step or not self.reads_late:
            return True
        readers = [(name, callback) for name, callback in self.callbacks.items() if callback.reads_weights]
        return any(call_callback(name, callback.is_due, self) for name, callback in readers)

    def read_launched(self, keep: int) -> None:
        """Read the records of launched steps, and call `on_step_end`, until `keep` steps are left.

        A callback that reads weights is called if it is due, and no other step has been launched since."""
        while len(self.launched) > keep:
            record = self.launched.popleft()()
            # The sums of a step after the save are equal on all ranks. An asynchronous worker may receive older ones.
            saving = self.unreported_checkpoint
            if saving is not None and record["step"] > step_of(saving) and not self.has_pending_saves:
                self._report_checkpoint()
            for name, callback in self.callbacks.items():
                if not callback.reads_weights or (not self.launched and call_callback(name, callback.is_due, self)):
                    if callback.reads_weights:
                        self.strategy.wait_for_weights()
                    call_callback(name, callback.on_step_end, self, record)

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks; raises CallbackError if one of the user's fails."""
        self.strategy.wait_for_weights()
        for name, callback in self.callbacks.items():
            call_callback(name, getattr(callback, hook), self, *arguments)

    def _report_exception(self, error: BaseException) -> None:
        """Call `on_exception` of all callbacks. Errors in them are logged: they must not hide the first one."""
        for name, callback in self.callbacks.items():
            try:
                callback.on_exception(self, error)
            except Exception as second:
                logger.warning("%s: on_exception raised %s: %s", name, type(second).__name__, second)

    def prepare_reference(self) -> None:
        """Compute or read what the loss of preferences needs of the initial weights (a collective)."""
        if self.run.preference is not None and self.reference is None:
            self.reference = open_reference(self)

    def evaluate(self) -> MetricsRecord:
        """Return the loss on the held-out text, and the expert counts of the last interval."""
        return evaluate(self)

    def model_weights(self, dtype: str = "fp32") -> Iterator[tuple[str, Tensor]]:
        """Yield the current weights by Hugging Face name, one full tensor at a time (`train.model_weights`)."""
        return model_weights(self, dtype)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let passes use the current weights without training: gradients and random parts are off."""
        self.strategy.drain_pending_updates()
        self.module.eval()
        with torch.no_grad():
            yield
        self.module.train()
        reshard_parameters(self.module)

    @contextmanager
    def record_pause(self, pause: str) -> Iterator[None]:
        """Record the time of work between steps, under the name `pause`."""
        started_at = time.perf_counter()
        yield
        if self.rank_log is not None:
            seconds = time.perf_counter() - started_at
            record: PauseRecord = {"step": self.step, "pause": pause, "start": started_at, "seconds": seconds}
            self.rank_log.write(dict(record))

    # -- one step ----------------------------------------------------------------------------------------------------

    def train_step(self, batches: Iterator[Batch]) -> MetricsRecord:
        """Run one optimizer update, and return its record."""
        return self.launch_step(batches)()

    def launch_step(self, batches: Iterator[Batch]) -> ReadRecord:
        """Launch one optimizer update, and return the function that reads its record.

        The phases are forward and backward passes, their sum over ranks, and the update. With `reads_late` the host
        does not wait for a GPU here: fused AdamW skips a gradient that is not finite by itself."""
        self.enter_phase(phase_at(self.phases, self.step))
        self.prepare_reference()
        phases = StepPhaseTimer(self.strategy)
        reference = None if self.reference is None else self.reference.train
        micros = self.micro_batches(next(batches), reference, self.step) if self.strategy.runs_model else []
        phases.end("data")
        rank_sums = self.forward_backward(micros)
        rank_sums.stop_requests.fill_(self.stop_requested)
        rank_sums.finish_requests.fill_(self.finish_reason is not None)
        rank_sums.pending_saves.fill_(not self.checkpointer.is_complete)
        # A parameter server announces the step to its workers.
        if not self.strategy.runs_model:
            rank_sums.stop_step.fill_(self.stop_after_step or 0)
        phases.end("passes")
        reduced = self.reduce(rank_sums)
        # All values of a step are copied at once.
        on_host = PendingCopies(reduced.sums, reduced.norm)
        if self.reads_late:
            skip_if(self.optimizers, ~reduced.norm.isfinite())
            is_finite = True
        else:
            # The norm is equal on all ranks, so all ranks decide alike.
            is_finite = math.isfinite(on_host.wait()[1])
        phases.end("reduce")
        if self.experts.layers:
            # A worker of a parameter server has no trained parameters, and receives its biases.
            self.experts.add(
                self.unpack_sums(reduced.sums).expert_loads,
                self.routers,
                self.strategy.model_parallel.router_count_multiplicity,
                update_biases=is_finite and bool(self.strategy.trainable_parameters),
            )
        if is_finite:
            ratio = learning_rate_ratio(self.rate_spans, self.step, self.lr_function)
            self.update(ratio * self.rescaling.factor_at(self.step))
        else:
            self.strategy.zero_grad()
        phases.end("optimizer")
        phases.finish()
        self.step += 1
        pop_expert_rows = self.strategy.model_parallel.pop_expert_rows
        results = LaunchedResults(
            step=self.step,
            tokens=self.batch.global_batch_size * self.phase.run.training.seq_len,
            reduced=reduced,
            on_host=on_host,
            phases=phases,
            expert_rows=None if pop_expert_rows is None else pop_expert_rows(),
            learning_rate=self.optimizers[-1].param_groups[0]["lr"] if self.optimizers else None,
            peak_memory_bytes=peak_memory_bytes(self.device),
        )
        return partial(self._read_step, results)

    def enter_phase(self, phase: Phase) -> None:
        """Change to the batches and the rotary embedding of a phase, unless the last step was in it."""
        if phase is self.phase:
            return
        before = self.phase.run
        if phase.number != self.phase.number:
            changes = describe_phases(self.run)
            self.progress.log(phase.name if phase.number is None else changes[phase.number])
        self.phase = phase
        self.batch = plan_batch(phase.run, self.mesh.dims.dp_size)
        self.utilization.set_run(phase.run)
        if phase.run.model.rope != before.model.rope:
            set_rotary_embedding(self.module, phase.run.model)

    @property
    def reads_late(self) -> bool:
        """True if the record of a step is read while a GPU runs the next."""
        return self.allows_late_reads and self.can_read_late

    @property
    def can_read_late(self) -> bool:
        """True if a step can run before the host knows whether its gradient is finite."""
        moe = self.run.model.moe
        routers_need_it = moe is not None and moe.bias_update_rate > 0
        layout = self.run.layout
        steps_on_device = layout.offload == "none" and layout.data_parallel != "parameter_server"
        return can_skip_on_device(self.optimizers) and steps_on_device and not routers_need_it

    def _read_step(self, results: LaunchedResults) -> MetricsRecord:
        """Return the record of a launched step, and count its tokens, its targets, and a step that was skipped."""
        host_sums, norm = results.on_host.wait()
        sums = self.unpack_sums(host_sums)
        targets = float(sums.tokens)
        tokens = results.tokens
        self.tokens += tokens
        self.targets += round(targets)
        self.skipped += not math.isfinite(float(norm))
        self.has_pending_saves = bool(sums.pending_saves)
        record: MetricsRecord = {
            "step": results.step - results.reduced.steps_behind,
            "loss": float(sums.loss) / targets if targets else math.nan,
            "grad_norm": float(norm),
        }
        for source, loss, count in zip(self.run.data.source, sums.source_losses, sums.source_targets, strict=True):
            if count:
                record[f"loss/{source.name}"] = float(loss / count)
        if self.run.preference is not None:
            pairs, correct, margins = sums.preferences.tolist()
            record |= {"pairs": round(pairs), "pair_accuracy": correct / pairs, "reward_margin": margins / pairs}
        if self.run.distillation is not None:
            record["kl_loss"] = float(sums.divergences) / targets if targets else math.nan
        self._agree_to_stop(record["step"], sums)
        if results.reduced.staleness is not None and self.run.layout.max_staleness is not None:
            record["staleness"] = results.reduced.staleness
        self.step_record = results.phases.to_step_record(results.step, results.peak_memory_bytes)
        if self.run.model.moe and self.experts.layers:
            hottest = hottest_expert(sums.expert_loads, self.experts.layers)
            self.step_record["hot_expert"] = hottest
            record |= expert_metrics(sums, hottest, has_capacity=self.run.model.moe.capacity_factor is not None)
        if self.run.model.mtp:
            record["mtp_loss"] = float(sums.mtp_loss) / targets if targets else math.nan
        if results.expert_rows is not None:
            self.step_record["expert_rows"] = results.expert_rows
        seconds = sum(self.step_record["seconds"].values())
        record |= {
            "ranks": self.mesh.dims.world_size,
            "resumed_at_step": self.resumed_at_step,
            "tokens": self.tokens,
            "targets": self.targets,
            "tokens_per_second": tokens / seconds,
            "targets_per_second": targets / seconds,
            "step_seconds": seconds,
            **time_metrics(self.step_record, self.strategy),
            **self.utilization.metrics(tokens / seconds),
        }
        if results.learning_rate is not None:
            record["learning_rate"] = results.learning_rate
        return record | {"peak_memory_bytes": results.peak_memory_bytes, "skipped_steps": self.skipped}

    # -- the end of the run ------------------------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """Request that the run ends soon, as if the next step were its last (on a GPU, up to two steps later).

        One rank is enough. The run evaluates and saves as at its end, and records the reduced number of steps. Rank 0
        prints the reason if it is one of the ranks."""
        if self.is_complete:
            return
        if self.finish_reason is None:
            self.progress.log(f"step {self.step}: finishing the run after the next step: {reason}")
        self.finish_reason = reason

    def _agree_to_stop(self, step: int, sums: StepSums) -> None:
        """Decide after which step all ranks stop, from the sums over ranks in `step`, which all ranks read alike."""
        if self.stop_after_step is not None:
            return
        is_stopping = bool(sums.stop_requests)
        is_finishing = bool(sums.finish_requests)
        max_staleness = self.run.layout.max_staleness
        if max_staleness is None:
            if is_stopping or is_finishing:
                # A later step may have been launched already.
                self.stop_after_step = max(step, self.step)
        elif self.strategy.runs_model:
            self.stop_after_step = int(sums.stop_step) or None
        elif is_stopping or is_finishing:
            # Workers may miss a step. Servers miss none, and announce a later one that no rank can have passed by then.
            self.stop_after_step = step + 1 + max_staleness
        if self.stop_after_step is not None and is_finishing and not is_stopping:
            self.set_last_step(min(self.stop_after_step, self.run.training.steps))

    def set_last_step(self, step: int) -> None:
        """Set the number of steps of the run, at the same step on all ranks; rank 0 records it in the run directory."""
        self.run = with_decided_steps(self.run, step)
        self.phases = phases_of(self.run)
        self.phase = phase_at(self.phases, max(0, self.step - 1))
        self.rate_spans = rate_spans(self.run)
        self.progress.set_steps(step)
        if self.is_main:
            # The recorded run is only written back, so its components need no trust.
            recorded, _ = read_run_directory(self.directory, trust=True)
            rewrite_run_file(self.directory, with_decided_steps(recorded, step))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Start a checkpoint of this step."""
        self.strategy.drain_pending_updates()
        tensors = checkpoint_tensors(self.strategy, self.optimizers)
        self.checkpointer.save(self.step, tensors, self._build_manifest(), on_disk=self.run.layout.offload == "nvme")

    def save_in_memory(self) -> None:
        """Copy this step's state into memory that outlives this rank."""
        if self.in_memory_checkpointer is not None:
            self.strategy.drain_pending_updates()
            manifest = {**self._build_manifest(), "step": self.step, "random": rng_state()}
            self.in_memory_checkpointer.save(self.step, checkpoint_tensors(self.strategy, self.optimizers), manifest)

    def start_checkpoint(self) -> None:
        """Start a checkpoint of this step. The previous one is complete then, and reported first."""
        self.save()
        self._report_checkpoint()
        self.unreported_checkpoint = self.checkpointer.directory / step_name(self.step)

    def finish_checkpoint(self) -> None:
        """Wait until all ranks have completed the last checkpoint and its upload, and report it."""
        self.checkpointer.wait_for_all_ranks()
        self._report_checkpoint()
        missing = self.finish_uploads()
        folder = store_folder(self.run)
        if missing and self.is_main:
            text = "%s: not in %s, but only in %s. The next start with --resume and more steps uploads what it keeps"
            logger.warning(text, ", ".join(missing), folder, self.checkpointer.directory)
        elif folder is not None and self.is_main:
            logger.info("checkpoints uploaded to %s", folder)

    def finish_uploads(self) -> list[str]:
        """Wait for uploads on all ranks, after a stop request not for longer than ranks have until they are killed.

        Return the names of checkpoints that the store lacks."""
        if store_folder(self.run) is None:
            return []
        # A rank that left earlier than others would wait for them in its next collective.
        seconds = min(all_gather_objects(self._seconds_for_uploads))
        return self.checkpointer.finish_uploads(seconds, lambda: self._seconds_for_uploads <= 0)

    @property
    def _seconds_for_uploads(self) -> float:
        """Seconds for which this rank may still wait for uploads."""
        timeout_seconds = self.run.checkpoint.upload_timeout_seconds
        if self.stop_requested_at is None:
            return timeout_seconds
        killed_at = self.stop_requested_at + STOP_SECONDS
        return min(timeout_seconds, killed_at - EXIT_SECONDS - time.monotonic())

    def _report_checkpoint(self) -> None:
        """Call `on_checkpoint_saved` for the checkpoint that all ranks have completed, unless that was done."""
        directory = self.unreported_checkpoint
        if directory is not None:
            self.unreported_checkpoint = None
            self.call_hook("on_checkpoint_saved", directory)

    def _build_manifest(self) -> MetricsRecord:
        """Return the state of a run besides its tensors."""
        states = {name: call_callback(name, callback.state_dict) for name, callback in self.callbacks.items()}
        # The states are copied as JSON, because a thread writes them while callbacks continue to change their own.
        copies = {name: json.loads(call_callback(name, json.dumps, state)) for name, state in states.items() if state}
        return {
            "tokens": self.tokens,
            "targets": self.targets,
            "skipped": self.skipped,
            "loader": self.loader.state(self.step),
            "rescaling": asdict(self.rescaling),
            "model": self.run.model.model_dump(mode="json"),
            "optimizer": self.run.optimizer.name,
            "implementations": implementations(self.run),
            "adapter": adapter_table(self.run),
            "expert_tokens": self.experts.intervals.long().tolist(),
            "callbacks": copies,
            "evaluation": saved_evaluation(self.evaluation, self.step),
        }

    def resume(self) -> tuple[int, dict[str, str]]:
        """Continue from the newest intact checkpoint, on disk or in memory, if there is one.

        Returns the number of ranks that wrote it (0: there is none), and the problems of newer damaged ones by name.
        Raises UserError if the checkpoint has another model or other data, or all checkpoints are damaged."""
        started_at = time.perf_counter()
        directory = self.checkpointer.directory
        checkpoint = None
        damaged: dict[str, str] = {}
        in_memory = self.in_memory_checkpointer.load_latest() if self.in_memory_checkpointer is not None else None
        if in_memory is None or in_memory.step < latest_step(directory):
            checkpoint, damaged = latest_valid_checkpoint(directory)
        if in_memory is not None and in_memory.step >= (step_of(checkpoint) if checkpoint else 0):
            restore_tensors(in_memory.shapes, in_memory.tensors, self.strategy, self.optimizers)
            set_rng_state(in_memory.manifest["random"])
            self._restore_progress(in_memory.manifest)
            logger.debug("resumed after step %d from copies in memory", self.step)
            return self.mesh.dims.world_size, damaged
        if checkpoint is None:
            check_not_all_damaged(directory)
            self._skip_bad_steps()
            return 0, damaged
        manifest = read_manifest(checkpoint)
        check_manifest(self.run, manifest)
        load_checkpoint(checkpoint, self.strategy, self.optimizers)
        restore_rng_state(checkpoint, self.mesh.rank)
        self._restore_progress(manifest)
        logger.debug("resumed after step %d from %s in %.2f s", self.step, checkpoint, time.perf_counter() - started_at)
        self._skip_bad_steps()
        return int(manifest["world_size"]), damaged

    def _restore_progress(self, manifest: MetricsRecord) -> None:
        self.loader.resume(manifest["loader"])
        if self.experts.layers and "expert_tokens" in manifest:
            self.experts.load_state(manifest["expert_tokens"])
        self.callback_states = manifest.get("callbacks", {})
        self.step = self.resumed_at_step = manifest["step"]
        self.enter_phase(phase_at(self.phases, max(0, self.step - 1)))
        self.tokens = manifest["tokens"]
        # Earlier versions of Phalanx counted targets only, as "tokens".
        self.targets = manifest.get("targets", self.tokens)
        self.skipped = manifest["skipped"]
        rescaling = LearningRateRescaling(**manifest["rescaling"])
        if rescaling.after != self.batch.learning_rate_scale:  # the number of ranks has changed
            warmup = self.run.optimizer.warmup_within(self.run.training.steps)
            before = rescaling.factor_at(self.step - 1)
            rescaling = LearningRateRescaling(before, self.batch.learning_rate_scale, since=self.step, steps=warmup)
        self.rescaling = rescaling

    def _skip_bad_steps(self) -> None:
        """Skip text that led to divergence before."""
        steps = broadcast_from_rank0(partial(steps_to_skip, self.directory, self.step))
        if steps:
            self.loader.skip_steps(steps)


def in_memory_identity(run: RunSpec) -> dict[str, Any]:
    """Return the settings that a copy in memory must share with the run.

    They exclude the length of the run, which may be decided during the run (`training.seconds`)."""
    identity = run.model_dump(mode="json", include={"model", "layout", "optimizer", "training", "data", "phase"})
    for table, field in (("training", "steps"), ("training", "seconds"), ("optimizer", "warmup_steps")):
        del identity[table][field]
    return identity
