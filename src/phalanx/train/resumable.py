"""What learns on a rank, and where it is: kept on disk and in memory, and gone on from."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.parallel.frozen import Own
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint import (
    Checkpointer,
    load_state,
    newest_checkpoint,
    newest_step,
    random_state,
    restore_random_state,
    restore_state,
    set_random_state,
    state_tensors,
    told_by_first,
)
from phalanx.train.copies import Copies
from phalanx.train.corpus import Corpus
from phalanx.train.divergence import passed_over, rollbacks
from phalanx.train.learner import Learner
from phalanx.train.manifest import check_manifest, read_manifest, refuse_all_damaged, step_of
from phalanx.train.metrics import Record
from phalanx.train.optimizer import Rescaling


class Resumable(Learner):
    """A learner with its data and its count of steps: all that a run needs to go on where it was.

    torch.distributed must be initialised where there are several ranks.
    """

    def __init__(
        self, run: RunSpec, corpus: Corpus, directory: Path, device: torch.device, own: Own | None = None
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        super().__init__(run, build_mesh(run.layout, world_size, device.type), device, corpus.weights, own)
        self.corpus, self.directory = corpus, directory
        experts = run.model.moe.experts if run.model.moe else 0
        self.loads = torch.zeros(2, len(self.moe_layers), experts, dtype=torch.float64, device=device)
        """How often each expert of these layers was chosen, on all ranks: since the last evaluation, and between that
        and the one before."""
        self.loader = corpus.loader(run, self.cut.sequences, self.mesh.dp_rank, self.cut.dp)
        self.checkpointer = Checkpointer(directory / "checkpoints", run.checkpoint.keep)
        self.copies = None
        if run.recovery.copy_every:
            described = run.model_dump(mode="json", include={"model", "layout", "optimizer", "training", "data"})
            back = told_by_first(partial(rollbacks, directory))  # what was copied before it is not gone on from
            group = dist.new_group(backend="gloo") if dist.is_initialized() else None
            self.copies = Copies({"ranks": world_size, "back": back, **described}, group)
        self.rescaling = Rescaling(self.cut.learning_rate, self.cut.learning_rate, 0, 0)
        self.step = 0
        """Optimizer updates done."""
        self.began_after = 0
        """The step after which this start of the run went on."""
        self.tokens = 0
        """Target tokens learned from, over all ranks."""
        self.skipped = 0
        """Steps whose gradient was not finite."""

    def copy(self) -> None:
        """Keep this step's state where it outlives this rank."""
        if self.copies is not None:
            self.strategy.settle()
            manifest = {**self._manifest(), "step": self.step, "random": random_state()}
            self.copies.keep(self.step, state_tensors(self.strategy, self.optimizers), manifest)

    def save(self) -> None:
        """Begin a checkpoint of this step."""
        self.strategy.settle()
        tensors = state_tensors(self.strategy, self.optimizers)
        self.checkpointer.save(self.step, tensors, self._manifest(), on_disk=self.run.layout.offload == "nvme")

    def _manifest(self) -> Record:
        """What a run is, beside its tensors."""
        return {
            "tokens": self.tokens,
            "skipped": self.skipped,
            "loader": self.loader.state(self.step),
            "rescaling": asdict(self.rescaling),
            "model": self.run.model.model_dump(mode="json"),
            "optimizer": self.run.optimizer.name,
            "expert_tokens": self.loads.long().tolist(),
        }

    def resume(self) -> tuple[int, dict[str, str]]:
        """Continue from the newest intact checkpoint, if there is one; says how many ranks wrote it (0: there is none),
        and which newer ones are damaged.

        Raises UserError if the checkpoint is of another model or other data, or all that there are are damaged.
        """
        directory, checkpoint = self.checkpointer.directory, None
        damaged: dict[str, str] = {}
        kept = self.copies.newest() if self.copies is not None else None
        if kept is None or kept.step < newest_step(directory):
            checkpoint, damaged = newest_checkpoint(directory)
        if kept is not None and kept.step >= (step_of(checkpoint) if checkpoint else 0):
            restore_state(kept.shapes, kept.tensors, self.strategy, self.optimizers)
            set_random_state(kept.manifest["random"])
            self._go_on(kept.manifest)
            return self.mesh.degrees.world_size, damaged
        if checkpoint is None:
            refuse_all_damaged(directory)
            self._pass_over()
            return 0, damaged
        manifest = read_manifest(checkpoint)
        check_manifest(self.run, manifest)
        load_state(checkpoint, self.strategy, self.optimizers)
        restore_random_state(checkpoint, self.mesh.rank)
        self._go_on(manifest)
        self._pass_over()
        return int(manifest["world_size"]), damaged

    def _go_on(self, manifest: Record) -> None:
        """Be where a manifest says that the run was."""
        self.loader.resume(manifest["loader"], resized=self.run.training.scaling != "keep")
        if self.moe_layers and "expert_tokens" in manifest:
            self.loads.copy_(torch.tensor(manifest["expert_tokens"]))
        self.step, self.tokens, self.skipped = manifest["step"], manifest["tokens"], manifest["skipped"]
        self.began_after = self.step
        rescaling = Rescaling(**manifest["rescaling"])
        if rescaling.after != self.cut.learning_rate:  # the ranks are others
            warmup = self.run.optimizer.warmup_steps
            rescaling = Rescaling(rescaling.at(self.step - 1), self.cut.learning_rate, self.step, warmup)
        self.rescaling = rescaling

    def _pass_over(self) -> None:
        """Leave out text that led this run astray before."""
        steps = told_by_first(partial(passed_over, self.directory, self.step))
        if steps:
            self.loader.pass_over(steps)
