"""Layouts of a run with phases: one layout for all of them, chosen for the phase with the most tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.phases import Phase, distinct_phases, phases_of
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class PhaseCost:
    """The predicted cost of a phase under the layout of the run."""

    phase: Phase
    layout: EvaluatedLayout

    @property
    def seconds(self) -> float:
        """Seconds of all steps of the phase."""
        return self.phase.steps * self.layout.step_seconds


def phase_with_most_tokens(run: RunSpec) -> Phase:
    """Return the phase of a run that reads the most tokens."""
    return max(phases_of(run), key=lambda phase: phase.steps * phase.run.training.tokens_per_step)


def largest_phase(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with the settings of the phase that has the most tokens, throughout."""
    if not resolved.run.phase:
        return resolved
    return ResolvedRun(phase_with_most_tokens(resolved.run).run, resolved.world_size)


def layout_of_run(run: RunSpec, layout: Layout) -> Layout:
    """Return a layout of the largest phase as that of the run's file, whose micro-batches may have other lengths."""
    if not run.phase or layout.micro_batch_size is None:
        return layout
    tokens = layout.micro_batch_size * phase_with_most_tokens(run).run.training.seq_len
    return layout.replace(micro_batch_size=max(1, tokens // run.training.seq_len))


def phase_costs(resolved: ResolvedRun, layout: Layout) -> list[PhaseCost]:
    """Return the predicted cost of each phase of a run under a layout, in order.

    Raises UserError if a phase cannot run with it."""
    run = resolved.run.replace(layout=layout_of_run(resolved.run, layout))
    return [
        PhaseCost(phase, evaluate_layout(ResolvedRun(phase.run, resolved.world_size), phase.run.layout))
        for phase in phases_of(run)
    ]


def fits_all_phases(resolved: ResolvedRun) -> Callable[[CandidateLayout], bool]:
    """Return the condition that a layout runs and is likely to fit in every phase of a run."""

    def fits(candidate: CandidateLayout) -> bool:
        layout = candidate.layout()
        try:
            run = resolved.run.replace(layout=layout_of_run(resolved.run, layout))
            own = largest_phase(ResolvedRun(run, resolved.world_size)).run.layout
            if own.micro_batch_size != layout.micro_batch_size:
                return False
            evaluated = [
                evaluate_layout(ResolvedRun(phase.run, resolved.world_size), phase.run.layout)
                for phase in distinct_phases(run)
            ]
        except UserError:
            return False
        return all(option.p_oom < MAX_OOM_PROBABILITY for option in evaluated)

    return fits
