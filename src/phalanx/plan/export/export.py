"""Export of a run's model, batch and layout as the configuration of another trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.plan.export.automodel import automodel
from phalanx.plan.export.common import TRAINER_NAMES, ExportedConfig, ExportJob, Trainer, with_comment_header
from phalanx.plan.export.deepspeed import deepspeed
from phalanx.plan.export.megatron import megatron
from phalanx.plan.export.nanotron import nanotron
from phalanx.plan.export.torchtitan import torchtitan
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.explain import plan_or_raise
from phalanx.plan.search.result import Plan
from phalanx.plan.search.search import ProgressCallback, search_layouts
from phalanx.spec.base import require
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

WRITERS: dict[Trainer, Callable[[ExportJob], ExportedConfig]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "automodel": automodel,
    "deepspeed": deepspeed,
    "nanotron": nanotron,
}


def export(resolved: ResolvedRun, trainer: Trainer) -> ExportedConfig:
    """Return the configuration with which `trainer` trains the run's model, with its batch and layout.

    Raises UserError if the layout cannot run, or the trainer cannot express the run; the fix lists the trainers that
    can.
    """
    require_known_trainer(trainer)
    check_layout(resolved)
    job = _build_export_job(resolved, trainer)
    try:
        return with_comment_header(WRITERS[trainer](job), trainer)
    except UserError as error:
        able_trainers = (
            ", ".join(
                TRAINER_NAMES[candidate_trainer]
                for candidate_trainer in WRITERS
                if _can_express(job, candidate_trainer)
            )
            or "none of them"
        )
        raise UserError(
            error.field, error.value, error.problem, fix=f"{error.fix}; trainers for the unchanged run: {able_trainers}"
        ) from None


def check_run(run: RunSpec, trainer: Trainer) -> None:
    """Raise UserError for options that a trainer cannot express in any layout, not even in the simplest."""
    export(ResolvedRun(run.replace(layout=Layout(micro_batch_size=1)), 1), trainer)


def search_exportable(
    resolved: ResolvedRun, trainer: Trainer, keep: int, report: ProgressCallback = lambda *_: None
) -> Plan:
    """Return the `keep` fastest layouts that a trainer can express; if none, the fastest of all.

    Raises UserError if no layout fits.
    """

    def is_exportable(candidate: CandidateLayout) -> bool:
        try:
            return _can_express(_build_export_job(resolved.with_layout(candidate.layout()), trainer), trainer)
        except UserError:
            return False

    plan = search_layouts(resolved, keep, report, is_wanted=is_exportable, prefer_simple=True)
    return plan if plan.layouts else plan_or_raise(resolved, 1, report)


def _can_express(job: ExportJob, trainer: Trainer) -> bool:
    """Return whether a trainer can express a run."""
    try:
        WRITERS[trainer](job)
    except UserError:
        return False
    return True


def require_known_trainer(name: str, field: str = "trainer") -> Trainer:
    """Return the trainer of a name. Raises UserError for an unknown one."""
    require(name in WRITERS, field, name, problem="is not known", fix=f"use one of {', '.join(WRITERS)}")
    return cast("Trainer", name)


def _build_export_job(resolved: ResolvedRun, trainer: Trainer) -> ExportJob:
    """Return the inputs of an export.

    Raises UserError if ranks have unequal shares of a step, which no other trainer supports.
    """
    job = ExportJob(resolved.run, resolved.world_size)
    run = job.run
    batch = job.batch
    if not batch.has_equal_micro_batches:
        sequences = batch.micro_batch_size * batch.dp_size * batch.gradient_accumulation_steps
        problem = (
            f"gives ranks unequal shares ({batch.global_batch_size} sequences per step), "
            f"which {TRAINER_NAMES[trainer]} does not support"
        )
        fix = f"use training.tokens_per_step = {sequences * run.training.seq_len}, or another layout.micro_batch_size"
        raise UserError("training.tokens_per_step", run.training.tokens_per_step, problem, fix)
    return job
