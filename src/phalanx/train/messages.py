"""Messages at the start and at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from phalanx.cost.exact.parameters import count_parameters
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.formatting import plural
from phalanx.spec.phases import describe_phases
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.train.evaluator import evaluation_message
from phalanx.train.profiling.peak_flops import has_fast_bf16
from phalanx.train.sample import sample_message
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import held_out_names

MAX_SIZE_DIFFERENCE = 0.05
"""Maximum relative difference between a network's number of parameters and that of its description that goes
unreported."""
OFFLOAD_TARGET_NAMES = {"cpu": "CPU memory", "nvme": "files"}


def start_message(trainer: Trainer, resumed: int) -> str:
    """Return the message before the first step.

    `resumed` is the number of ranks that wrote the checkpoint to resume from; 0 without one."""
    precision = f"{trainer.run.training.precision}{', compiled' if trainer.compiles else ''}"
    size = f"{trainer.num_parameters:,} parameters on {_describe_layout(trainer)}, {precision}"
    lines = [size, _describe_batch(trainer), *_describe_held_out_text(trainer), *_describe_phases(trainer)]
    lines += _describe_surprising_settings(trainer)
    if resumed:
        saved_by = f" of {plural(resumed, 'rank')}" if resumed != trainer.mesh.dims.world_size else ""
        lines.append(f"resumed after step {trainer.step}{saved_by}")
        if trainer.step == trainer.run.training.steps:
            lines.append("this was the last step; increase training.steps to continue")
    return "\n".join(lines)


def _describe_layout(trainer: Trainer) -> str:
    layout = trainer.run.layout
    sizes = trainer.mesh.dims
    pipeline = f"pipeline ({layout.schedule_file or layout.schedule})"
    names = {"pp": pipeline, "cp": layout.cp_method, "tp": "tensor", "ep": "expert"}
    parts = [f"{plural(sizes.world_size, 'rank')} ({trainer.device.type})"]
    parts += [f"{name} x {getattr(sizes, axis)}" for axis, name in names.items() if getattr(sizes, axis) > 1]
    if sizes.dp_size > 1 or sizes.servers:
        parts.append(layout.data_parallel)
    if layout.offload != "none":
        parts.append(f"state in {OFFLOAD_TARGET_NAMES[layout.offload]}")
    return ", ".join(parts)


def _describe_batch(trainer: Trainer) -> str:
    batch = trainer.batch
    seq_len = trainer.phase.run.training.seq_len
    num_tokens = trainer.corpus.num_train_tokens
    return (
        f"{batch.global_batch_size * seq_len:,} tokens per update = {batch.micro_batch_size} sequences of "
        f"{seq_len} x {plural(batch.dp_size, 'rank')} x {batch.gradient_accumulation_steps} accumulated"
        f"{', shared unevenly' if batch.global_batch_size % batch.dp_size else ''}"
        f"{f'; the text is {num_tokens:,} tokens' if num_tokens is not None else ''}"
    )


def _describe_held_out_text(trainer: Trainer) -> Iterator[str]:
    """Yield a line with the size of each named set, or of the held-out part of each source."""
    if datasets := trainer.corpus.held_out_sources:
        named = zip(held_out_names(trainer.run.data), datasets, strict=True)
        yield f"held-out text (validation set): {', '.join(f'{name} {text.size:,} tokens' for name, text in named)}"


def _describe_phases(trainer: Trainer) -> list[str]:
    """Return a line for each `[[phase]]` that has not ended."""
    if not trainer.run.phase:
        return []
    remaining = {phase.number for phase in trainer.phases if phase.end > trainer.step}
    return [line for number, line in describe_phases(trainer.run).items() if number in remaining]


def _describe_surprising_settings(trainer: Trainer) -> Iterator[str]:
    """Yield a line for each setting that may surprise."""
    training = trainer.run.training
    model = trainer.run.model
    described_parameters = count_parameters(model).total
    if abs(trainer.num_parameters / described_parameters - 1) > MAX_SIZE_DIFFERENCE:
        yield f"[model] describes {described_parameters:,} parameters: predictions and MFU are for that size"
    if training.precision in BF16_PRECISIONS and not has_fast_bf16(trainer.device):
        yield 'this CPU computes bf16 in software, far slower than fp32: set training.precision = "fp32"'
    if training.precision == "fp8" and trainer.device.type == "cpu":
        yield "CPUs emulate fp8: products have the rounding of float8, and take longer than in bf16"
    if training.compile is None and trainer.compiles:
        yield "blocks are compiled in the first step, which takes longer: training.compile = false prevents it"
    if trainer.batch.learning_rate_scale != 1:
        yield (
            f"learning rates x {trainer.batch.learning_rate_scale:.4g} ({training.batch_scaling}): "
            f"{plural(trainer.batch.dp_size, 'rank')} instead of {training.base_dp_size}"
        )
    if training.seq_len > model.max_seq_len:
        yield (
            f"sequences of {training.seq_len:,} are longer than model.max_seq_len = {model.max_seq_len:,}, "
            "which exports declare as the maximum"
        )
    optimizer = trainer.run.optimizer
    if training.has_decided_steps and optimizer.warmup_steps >= training.steps:
        yield (
            f"warms up in {plural(optimizer.warmup_within(training.steps), 'step')}, half of the run: "
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, but training.steps is {training.steps}"
        )
    stop_after = trainer.run.evaluation.stop_after
    if stop_after and not trainer.run.checkpoint.keep.best:
        evaluations = f"{plural(stop_after, 'evaluation')} without a lower loss"
        yield f"ends after {evaluations}, and may keep no checkpoint of the lowest: checkpoint.keep.best is 0"
    if training.seconds is not None:
        end = datetime.now() + timedelta(seconds=training.seconds)
        yield f"trains for {training.seconds:g} s, until {end:%H:%M:%S}, and then evaluates"


def end_message(trainer: Trainer, evaluation: MetricsRecord, sample: str) -> str:
    """Return the message at the end of a run; `evaluation` and `sample` are empty if there are none."""
    lines = []
    # A run that was stopped has printed its last evaluation before.
    if evaluation and trainer.is_complete:
        earlier = "" if evaluation["step"] == trainer.step else f"step {evaluation['step']}: "
        lines.append(f"{earlier}{evaluation_message(evaluation)}")
    if trainer.should_stop and not trainer.is_complete:
        lines.append(f"stopped by a signal after step {trainer.step}; continue with --resume")
    if sample:
        lines.append(sample_message(trainer.step, sample))
    return "\n".join([*lines, f"run directory: {trainer.directory}"])
