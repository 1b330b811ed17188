"""The teacher of a run with distillation on this rank: a frozen model in the layout of the run.

It computes the input of its head for a micro-batch; the logits follow chunk by chunk in the loss of the student
(`parallel.distillation_loss`), so that those of both models never exist for all tokens. Without a pipeline it runs
before the student's forward pass; in one, for all micro-batches of a step before its schedule.

Why: `docs/design/decisions/online-teacher.md`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.model.init import DrawnWeights, Part, PartialWeights, Weights
from phalanx.parallel.apply import apply_layout, autocast_context
from phalanx.parallel.data.fsdp import reshard_parameters
from phalanx.parallel.distillation_loss import TeacherHead
from phalanx.parallel.mesh import Mesh
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.runs.create import TOKENIZER_FILE
from phalanx.spec.distillation import DistillationSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.teacher import FIELD, is_run_directory, teacher_run
from phalanx.spec.run import RunSpec

if TYPE_CHECKING:
    from phalanx.train.learner import MicroBatch


class Teacher:
    """A frozen model in the layout of a run."""

    def __init__(
        self,
        run: RunSpec,
        distillation: DistillationSpec,
        mesh: Mesh,
        device: torch.device,
        compiles: bool,
        weights: Weights | None = None,
    ) -> None:
        """Build the model of `teacher_run`; without `weights` they are drawn at random."""
        self.run = run
        self.distillation = distillation
        self.device = device
        layers = layers_per_stage(run) if run.layout.pp > 1 else ()
        weights = weights or DrawnWeights(run.model, run.training.seed)
        # Its experts are not divided.
        mesh = replace(mesh, ep_mesh=None, expert_dp_group=None)
        self.strategy = apply_layout(
            run.model, run.layout, mesh, device, weights, run.training.precision, compiles, layers
        )
        self.strategy.module.eval()

    @torch.no_grad()
    def outputs(self, micro: MicroBatch) -> list[TeacherHead]:
        """Return the last layer in a micro-batch; [] on ranks without it. All ranks of a pipeline make the call."""
        heads: list[TeacherHead] = []

        def keep(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            heads.append(
                TeacherHead(
                    x=x_BTD,
                    weight=weight_VD.detach(),
                    softcap=self.run.model.logits_softcap,
                    temperature=self.distillation.temperature,
                    share=self.distillation.weight,
                )
            )
            return x_BTD.new_zeros(())

        def run_model(model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            with autocast_context(self.strategy, self.run.training.precision, self.device):
                output: tuple[Tensor, Tensor] = model(*micro.inputs, head=keep)
            return output

        self.strategy.evaluate_micro_batch(micro, run_model)
        return heads[-1:]  # rehearsals of a pipeline precede it

    def end_passes(self) -> None:
        """Free what FSDP has gathered in the passes of a pipeline, but for the last layer, which its root has."""
        reshard_parameters(self.strategy.module, keeps_root=self.strategy.has_loss)

    def end_step(self) -> None:
        """Free what FSDP has gathered of the last layer, which the losses of a step have used."""
        reshard_parameters(self.strategy.module)


def teacher_weights(run: RunSpec) -> Weights | None:
    """Return the weights of a run's teacher by name, of which each rank reads its parts; None without distillation.

    Raises UserError if there are none."""
    teacher = teacher_run(run)
    if teacher is None or run.distillation is None:
        return None
    return _open_teacher(teacher, run.distillation)[0]


def _open_teacher(teacher: RunSpec, distillation: DistillationSpec) -> tuple[Weights, int | None]:
    """Return the weights of a teacher, and the step of its checkpoint, if it is a run directory."""
    directory = Path(distillation.teacher).expanduser()
    if distillation.step is not None and not is_run_directory(directory):
        problem = f"has no effect, because {directory} is not a run directory"
        raise UserError("distillation.step", distillation.step, problem, "remove it")
    try:
        if not is_run_directory(directory):
            from phalanx.model.huggingface.checkpoint import open_hf_weights

            return open_hf_weights(directory, teacher.model.without_tuning), None
        from phalanx.train.checkpoint.load_model import find_trained_weights

        found = find_trained_weights(directory, distillation.step)
        tensors = found.tensors()
    except UserError as error:
        if error.field == "--step":
            raise UserError("distillation.step", distillation.step, error.problem, error.fix) from None
        raise UserError(FIELD, str(directory), f"has no usable weights: {error.problem}", error.fix) from None

    def read_part(name: str, shape: torch.Size, part: Part) -> Tensor:
        return tensors[name][part[0]][(slice(None), *part[1:])] if part else tensors[name][...]

    return PartialWeights(read_part), found.step


def with_checked_teacher(run: RunSpec, tokenizer: Tokenizer) -> RunSpec:
    """Return a run with the step of its teacher's checkpoint, so that all ranks read the same one.

    Raises UserError if the teacher has no weights, or another tokenizer than the run."""
    teacher = teacher_run(run)
    if teacher is None or run.distillation is None:
        return run
    directory = Path(run.distillation.teacher).expanduser()
    _, step = _open_teacher(teacher, run.distillation)
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        problem = f"has no {TOKENIZER_FILE}, so that its tokens cannot be compared with those of the run"
        raise UserError(FIELD, str(directory), problem, "save its tokenizer there (AutoTokenizer.save_pretrained)")
    try:
        # Ends of text may differ, as those of a model and its tuned variant do.
        fingerprint = replace(load_tokenizer(file), end=tokenizer.end).fingerprint()
    except UserError as error:
        raise UserError(FIELD, str(directory), f"has an unusable tokenizer: {error.problem}", error.fix) from None
    if fingerprint != tokenizer.fingerprint():
        problem = "has another tokenizer than the run: its probabilities would be those of other tokens"
        raise UserError(FIELD, str(directory), problem, f"set data.tokenizer = {str(file)!r}")
    return run.replace(distillation=run.distillation.replace(step=step))
