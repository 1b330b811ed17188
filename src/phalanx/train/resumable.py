"""Learner with checkpointing: save and restore the model, the optimizers and the progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.parallel.mesh import build_mesh
from phalanx.runs.checkpoints import (
    CHECKPOINTS_DIR,
    check_manifest,
    check_not_all_damaged,
    implementations,
    read_manifest,
    step_of,
)
from phalanx.runs.errors import CallbackError, DivergenceError
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback
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
from phalanx.train.guards.divergence import count_rollbacks, steps_to_skip
from phalanx.train.learner import Learner
from phalanx.train.optim.optimizers import LearningRateRescaling
from phalanx.train.training_data import TrainingData


def in_memory_identity(run: RunSpec) -> dict[str, Any]:
    """Return the settings that a copy in memory must share with the run.

    They exclude the length of the run, which may be decided during the run (`training.seconds`)."""
    identity = run.model_dump(mode="json", include={"model", "layout", "optimizer", "training", "data"})
    for table, field in (("training", "steps"), ("training", "seconds"), ("optimizer", "warmup_steps")):
        del identity[table][field]
    return identity


class ResumableLearner(Learner):
    """A learner with its data and its step count: all state to continue a run.

    torch.distributed must be initialized if there are several ranks."""

    def __init__(
        self,
        run: RunSpec,
        corpus: TrainingData,
        directory: Path,
        device: torch.device,
        trained_experts: TrainedExperts | None = None,
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        super().__init__(run, build_mesh(run.layout, world_size, device.type), device, corpus.weights, trained_experts)
        self.corpus = corpus
        self.directory = directory
        self.loader = corpus.loader(run, self.batch.global_batch_size, self.mesh.dp_rank, ranks=self.batch.dp_size)
        self.checkpointer = Checkpointer(directory / CHECKPOINTS_DIR, run.checkpoint.keep)
        self.in_memory_checkpointer = None
        if run.recovery.in_memory_checkpoint_every:
            identity = in_memory_identity(run)
            num_rollbacks = broadcast_from_rank0(
                partial(count_rollbacks, directory)
            )  # copies from before the last rollback are not restored
            group = dist.new_group(backend="gloo") if dist.is_initialized() else None
            self.in_memory_checkpointer = InMemoryCheckpointer(
                {"ranks": world_size, "back": num_rollbacks, **identity}, group, device
            )
        self.rescaling = LearningRateRescaling(
            self.batch.learning_rate_scale, self.batch.learning_rate_scale, 0, steps=0
        )
        self.callbacks: Mapping[str, Callback] = {}
        """Callbacks of the training loop, by name."""
        self.callback_states: dict[str, dict[str, Any]] = {}
        """States of callbacks in the restored checkpoint."""
        self.step = 0
        """Number of optimizer updates."""
        self.resumed_at_step = 0
        """The step after which this start of the run resumed."""
        self.tokens = 0
        """Number of tokens computed in training, over all ranks."""
        self.targets = 0
        """Number of targets trained on: of the tokens without those whose target is ignored."""
        self.skipped = 0
        """Number of steps whose gradient was not finite."""

    def save_in_memory(self) -> None:
        """Copy this step's state into memory that outlives this rank."""
        if self.in_memory_checkpointer is not None:
            self.strategy.drain_pending_updates()
            manifest = {**self._manifest(), "step": self.step, "random": rng_state()}
            self.in_memory_checkpointer.save(self.step, checkpoint_tensors(self.strategy, self.optimizers), manifest)

    def save(self) -> None:
        """Start a checkpoint of this step."""
        self.strategy.drain_pending_updates()
        tensors = checkpoint_tensors(self.strategy, self.optimizers)
        self.checkpointer.save(self.step, tensors, self._manifest(), on_disk=self.run.layout.offload == "nvme")

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of a callback.

        Raises:
            CallbackError: A callback of the user raised an error, other than one that Phalanx handles.
        """
        try:
            return method(*arguments)
        except (UserError, DivergenceError):
            raise
        except Exception as error:
            if not name.startswith("callbacks."):
                raise
            raise CallbackError(f"{name}: {method.__name__} raised {type(error).__name__}: {error}") from error

    def _saved_callback_states(self) -> dict[str, dict[str, Any]]:
        """Return copies of the states of callbacks, as JSON: a thread writes them while callbacks go on."""
        states = {name: self._call(name, each.state_dict) for name, each in self.callbacks.items()}
        return {name: json.loads(self._call(name, json.dumps, state)) for name, state in states.items() if state}

    def _manifest(self) -> MetricsRecord:
        """Return the state of a run besides its tensors."""
        return {
            "tokens": self.tokens,
            "targets": self.targets,
            "skipped": self.skipped,
            "loader": self.loader.state(self.step),
            "rescaling": asdict(self.rescaling),
            "model": self.run.model.model_dump(mode="json"),
            "optimizer": self.run.optimizer.name,
            "implementations": implementations(self.run),
            "expert_tokens": self.experts.intervals.long().tolist(),
            "callbacks": self._saved_callback_states(),
        }

    def resume(self) -> tuple[int, dict[str, str]]:
        """Continue from the newest intact checkpoint, if there is one.

        Returns:
            The number of ranks that wrote it (0: there is none), and the problems of newer damaged ones by name.

        Raises:
            UserError: the checkpoint has another model or other data, or all checkpoints are damaged.
        """
        directory = self.checkpointer.directory
        checkpoint = None
        damaged: dict[str, str] = {}
        in_memory = self.in_memory_checkpointer.load_latest() if self.in_memory_checkpointer is not None else None
        if in_memory is None or in_memory.step < latest_step(directory):
            checkpoint, damaged = latest_valid_checkpoint(directory)
        if in_memory is not None and in_memory.step >= (step_of(checkpoint) if checkpoint else 0):
            restore_tensors(in_memory.shapes, in_memory.tensors, self.strategy, optimizers=self.optimizers)
            set_rng_state(in_memory.manifest["random"])
            self._restore_progress(in_memory.manifest)
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
        self._skip_bad_steps()
        return int(manifest["world_size"]), damaged

    def _restore_progress(self, manifest: MetricsRecord) -> None:
        """Restore the progress of a manifest."""
        self.loader.resume(manifest["loader"], resized=self.run.training.batch_scaling != "keep")
        if self.experts.layers and "expert_tokens" in manifest:
            self.experts.load_state(manifest["expert_tokens"])
        self.callback_states = manifest.get("callbacks", {})
        self.step = manifest["step"]
        self.tokens = manifest["tokens"]
        self.targets = manifest.get("targets", self.tokens)  # earlier versions counted targets alone
        self.skipped = manifest["skipped"]
        self.resumed_at_step = self.step
        rescaling = LearningRateRescaling(**manifest["rescaling"])
        if rescaling.after != self.batch.learning_rate_scale:  # the number of ranks has changed
            warmup = self.run.optimizer.warmup_within(self.run.training.steps)
            rescaling = LearningRateRescaling(
                rescaling.factor_at(self.step - 1), self.batch.learning_rate_scale, self.step, steps=warmup
            )
        self.rescaling = rescaling

    def _skip_bad_steps(self) -> None:
        """Skip text that led to divergence before."""
        steps = broadcast_from_rank0(partial(steps_to_skip, self.directory, self.step))
        if steps:
            self.loader.skip_steps(steps)
