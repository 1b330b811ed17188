"""Messages at the start and at the end of a run."""

from __future__ import annotations

from datetime import datetime, timedelta

from phalanx.cost.exact.parameters import count_parameters
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.formatting import plural
from phalanx.train.evaluator import evaluation_message
from phalanx.train.profiling.peak_flops import has_fast_bf16
from phalanx.train.sample import sample_message
from phalanx.train.trainer import Trainer

MAX_SIZE_DIFFERENCE = 0.05
"""Largest relative difference between a network's parameters and their description that is not reported."""
OFFLOAD_TARGET_NAMES = {"cpu": "CPU memory", "nvme": "files"}


def start_message(trainer: Trainer, resumed: int) -> str:
    """Return the message before the first step.

    `resumed` is the number of ranks that wrote the checkpoint to resume from; 0 without one."""
    run = trainer.run
    batch = trainer.batch
    sizes = trainer.mesh.dims
    ranks = f"{plural(sizes.world_size, 'rank')} ({trainer.device.type})"
    schedule = run.layout.schedule_file or run.layout.schedule
    names = {"pp": f"pipeline ({schedule})", "cp": run.layout.cp_method, "tp": "tensor", "ep": "expert"}
    layout = "".join(f", {name} x {getattr(sizes, axis)}" for axis, name in names.items() if getattr(sizes, axis) > 1)
    layout += f", {run.layout.data_parallel}" if sizes.dp_size > 1 or sizes.servers else ""
    layout += f", state in {OFFLOAD_TARGET_NAMES[run.layout.offload]}" if run.layout.offload != "none" else ""
    train = trainer.corpus.train
    text = f"; the text is {train.size:,} tokens" if train is not None else ""
    lines = [
        f"{trainer.num_parameters:,} parameters on {ranks}{layout}, {run.training.precision}",
        f"{batch.global_batch_size * run.training.seq_len:,} tokens per update = {batch.micro_batch_size} sequences of "
        f"{run.training.seq_len} x {plural(batch.dp_size, 'rank')} x {batch.gradient_accumulation_steps} accumulated"
        f"{', shared unevenly' if batch.global_batch_size % batch.dp_size else ''}{text}",
    ]
    described = count_parameters(run.model).total
    if abs(trainer.num_parameters / described - 1) > MAX_SIZE_DIFFERENCE:
        lines.append(f"[model] describes {described:,} parameters: predictions and MFU are for that size")
    if run.training.precision == "bf16" and not has_fast_bf16(trainer.device):
        lines.append('this CPU computes bf16 in software, far slower than fp32: set training.precision = "fp32"')
    if batch.learning_rate_scale != 1:
        lines.append(
            f"learning rates x {batch.learning_rate_scale:.4g} ({run.training.batch_scaling}): "
            f"{plural(batch.dp_size, 'rank')} instead of {run.training.base_dp_size}"
        )
    if run.training.seq_len > run.model.max_seq_len:
        lines.append(
            f"sequences of {run.training.seq_len:,} are longer than model.max_seq_len = {run.model.max_seq_len:,}, "
            "which exports declare as the maximum"
        )
    if run.training.has_decided_steps and run.optimizer.warmup_steps >= run.training.steps:
        warmup_steps = run.optimizer.warmup_within(run.training.steps)
        lines.append(
            f"warms up in {plural(warmup_steps, 'step')}, half of the run: optimizer.warmup_steps is "
            f"{run.optimizer.warmup_steps}, but training.steps is {run.training.steps}"
        )
    if run.training.seconds is not None:
        end = datetime.now() + timedelta(seconds=run.training.seconds)
        lines.append(f"trains for {run.training.seconds:g} s, until {end:%H:%M:%S}, and then evaluates")
    if resumed:
        saved_by = f" of {plural(resumed, 'rank')}" if resumed != sizes.world_size else ""
        lines.append(f"resumed after step {trainer.step}{saved_by}")
        if trainer.step == run.training.steps:
            lines.append("this was the last step; increase training.steps to continue")
    return "\n".join(lines)


def end_message(trainer: Trainer, evaluation: MetricsRecord, sample: str) -> str:
    """Return the message at the end of a run.

    Args:
        trainer: Trainer after its last step.
        evaluation: Record of the last evaluation; empty without one.
        sample: Text that the model generated; empty without one.
    """
    lines = []
    if evaluation:
        lines.append(evaluation_message(evaluation))
    if trainer.should_stop and not trainer.is_complete:
        lines.append(f"stopped by a signal after step {trainer.step}; continue with --resume")
    if sample:
        lines.append(sample_message(trainer.step, sample))
    return "\n".join([*lines, f"run directory: {trainer.directory}"])
