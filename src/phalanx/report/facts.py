"""Facts of a run as one table: the output of `phalanx report --json`, shown by the page and the text.

Predicted and measured numbers have the same names and units.

Why: `docs/design/decisions/report-facts.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.predicted_vs_measured import Comparison, compare_with_prediction
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.report import profiled_steps, swarm_rounds
from phalanx.report.bottlenecks import find_bottlenecks
from phalanx.report.formatting import format_times, format_tokens
from phalanx.report.gpu_profile.facts import gpu_facts
from phalanx.report.gpu_samples import gpu_sample_facts
from phalanx.report.marks import run_marks
from phalanx.report.measured_machine import measured_peak
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import RunData
from phalanx.report.step_breakdown import StepTimes, step_times
from phalanx.report.step_comparison import step_rows
from phalanx.runs.jsonl import JsonRecord
from phalanx.runs.metrics import has_ignored_targets, have_same_held_out_text
from phalanx.runs.scores import Score, read_scores
from phalanx.schedule.registry import representative_schedule
from phalanx.schedule.simulate import Timeline
from phalanx.spec.errors import UserError

CURVES = (
    "loss",
    "pair_accuracy",
    "reward_margin",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "targets_per_second",
    "step_seconds",
    "mfu",
    "peak_memory_bytes",
    "hot_expert_share",
    "gradient_noise_scale",
)
"""Fields of `metrics.jsonl` that are drawn over steps."""


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """Facts of a run, in the order of their keys. Unknown ones are None or empty, and `problems` has the reasons."""

    run: Facts
    """Name, ranks, progress and settings."""
    verdict: Facts | None
    """The most expensive bottleneck."""
    findings: list[Facts]
    """All bottlenecks (`bottlenecks.Bottleneck`)."""
    comparison: list[Facts]
    """Rows of predicted and measured values."""
    measures: Facts
    """Measures without a prediction."""
    ranks: list[Facts]
    """Time breakdown of each rank."""
    curves: Facts
    """Metrics over steps."""
    scores: list[Facts]
    """Metrics of tasks, each at some steps (`phalanx evaluate`)."""
    timeline: Facts | None
    """Passes of a profiled step."""
    memory: Facts | None
    """Bytes by part over a profiled step."""
    gpu: Facts | None
    """Figures of each GPU in a profiled step."""
    gpu_samples: Facts | None
    """Clocks, power, temperature and ECC errors of the GPUs during the run."""
    traffic: Facts | None
    """Bytes from each rank to each."""
    experts: Facts | None
    """Tokens of each expert."""
    problems: list[str]
    """Texts of the problems: data that is missing or cannot be read, failures, and facts that are unknown."""
    swarm: Facts | None
    """Rounds of a swarm; other runs do not have this key."""

    def to_json(self) -> Facts:
        """Return the facts as JSON values."""
        facts = {fact.name: _replace_non_finite(getattr(self, fact.name)) for fact in fields(self)}
        if self.swarm is None:
            del facts["swarm"]
        return facts


def report_facts(run_data: RunData) -> Facts:
    """Return the facts of a run as JSON values (`ReportFacts`)."""
    resolved = run_data.resolved
    times = step_times(run_data)
    is_swarm = bool(run_data.rounds) or run_data.swarm_journal is not None
    problems = [*run_data.problems, *_find_changed_held_out_text(run_data.evaluations)]
    if times is None and not is_swarm:
        problems.append("too few steps were recorded for a time breakdown, which excludes the first steps")

    # The prediction of the run's own layout, and the planned timeline of a pipeline
    evaluated: EvaluatedLayout | None = None
    planned_timeline: Timeline | None = None
    planned_speed = 1.0
    if resolved is not None:
        try:
            evaluated = evaluate_layout(resolved, resolved.layout)
        except UserError as error:
            first_line = str(error).partition("\n")[0]
            problems.append(f"the step time cannot be predicted: {first_line}")
        if evaluated is not None and resolved.layout.pp > 1:
            with suppress(UserError):
                planned_timeline = simulate_candidate(resolved, candidate_from_run(resolved))
                if resolved.run.cluster.ranks_per_core > 1:
                    planned_speed = float(planned_timeline.makespan) / evaluated.schedule_seconds

    stage_problem = _find_missing_stages(run_data)
    if times is not None and stage_problem is not None:
        problems.append(stage_problem)
    bottlenecks = find_bottlenecks(run_data, times) if times is not None and stage_problem is None else []
    findings = [asdict(bottleneck) for bottleneck in bottlenecks]

    # Predicted and measured values of a step, of ranks and of rounds
    comparison: list[Comparison] = []
    if times is not None:
        comparison += step_rows(run_data, times, evaluated, planned_timeline)
    if resolved is not None and run_data.measured:
        comparison += compare_with_prediction(resolved, run_data.measured)
    comparison += swarm_rounds.round_rows(run_data.run, run_data.world_size, run_data.rounds)
    return ReportFacts(
        run=_summarize_run(run_data),
        verdict=findings[0] if findings else None,
        findings=findings,
        comparison=[_comparison_to_json(row) for row in comparison],
        measures=_measure_variation_and_overlap(run_data, times),
        ranks=_break_down_ranks(run_data, times),
        curves=_collect_curves(run_data),
        scores=group_scores(read_scores(run_data.directory)),
        timeline=profiled_steps.pass_timeline(
            run_data, planned_timeline, planned_speed, can_simulate=stage_problem is None
        ),
        memory=profiled_steps.memory_timeline(run_data),
        gpu=gpu_facts(run_data),
        gpu_samples=gpu_sample_facts(run_data),
        traffic=profiled_steps.traffic_matrix(run_data),
        experts=profiled_steps.expert_loads(run_data),
        problems=problems,
        swarm=_count_swarm_rounds(run_data) if is_swarm else None,
    ).to_json()


def group_scores(scores: Sequence[Score]) -> list[Facts]:
    """Return the scores of each metric of a task, by step. A later score of the same step replaces an earlier one."""
    metrics: dict[tuple[str, str], dict[str, float]] = {}
    for score in scores:
        step = "" if score.step is None else str(score.step)
        shots = "" if score.num_fewshot is None else f", {score.num_fewshot} examples"
        questions = "" if score.limit is None else f", {score.limit} questions"
        metrics.setdefault((f"{score.task}{shots}{questions}", score.metric), {})[step] = score.value
    return [{"task": task, "metric": metric, "values": values} for (task, metric), values in metrics.items()]


def _find_missing_stages(run_data: RunData) -> str | None:
    """Return why a pipeline cannot be simulated with measured times, or None if it can."""
    run = run_data.run
    if run is None or run.layout.pp == 1:
        return None
    stages = representative_schedule(run.layout).stages
    recorded_stages = {stage for record in run_data.ranks.values() for line in record.steps for stage in line["stages"]}
    missing = stages - len(recorded_stages)
    return f"no verdict is possible: no rank recorded {missing} of {stages} stages" if missing else None


def _count_swarm_rounds(run_data: RunData) -> Facts:
    """Return the number of planned rounds, and a node's rounds or the updates to a coordinator per round."""
    run = run_data.run
    journal = run_data.swarm_journal
    planned = run.training.steps // run.swarm.steps_per_round if run is not None and run.swarm is not None else None
    return {
        "planned": planned,
        "rounds": swarm_rounds.node_rounds(run_data.rounds) if journal is None else None,
        "updates": swarm_rounds.updates_per_round(journal) if journal is not None else None,
    }


def _replace_non_finite(value: Any) -> Any:
    """Return a value in which NaN and infinity, which JSON does not have, are None."""
    if isinstance(value, dict):
        return {name: _replace_non_finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summarize_run(run_data: RunData) -> Facts:
    """Return the name, ranks and progress of a run, and its settings if run.toml is readable."""
    records = run_data.ranks.values()
    summary: Facts = {}
    if run_data.swarm_journal is not None:
        summary["leads"] = True
    summary |= {
        "name": run_data.name,
        "directory": str(run_data.directory),
        "ranks": run_data.world_size,
        "hosts": sorted({record.host for record in records}),
        "device": next((record.device for record in records), None),
        "step": run_data.step,
        "failed": run_data.failure is not None,
        "under_way": run_data.in_progress,
        "finish_reason": run_data.finish_reason,
        "clock_error_seconds": max((record.error_seconds for record in records), default=0.0),
    }
    run = run_data.run
    if run is None:
        return summary
    if run.training.has_decided_steps:
        summary["steps"] = run.training.steps
    if run_data.phases:
        summary["phases"] = run_data.phases
    return summary | {
        "settings": run_data.settings or run.settings,
        "parameters": count_parameters(run.model).total,
        "precision": run.training.precision,
        "layout": run.layout.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "tokens_per_step": run.training.tokens_per_step,
        "peak_flops": measured_peak(run, run_data.step_metrics, run_data.world_size),
        "sequence": run.training.seq_len,
    }


def _comparison_to_json(row: Comparison) -> Facts:
    facts: Facts = {"quantity": row.quantity, "unit": row.unit, **row.to_json(), "ratio": row.ratio}
    if row.interval is not None:
        facts["low"], facts["high"] = row.interval
    return facts


def _measure_variation_and_overlap(run_data: RunData, times: StepTimes | None) -> Facts:
    """Return measures without a prediction: variation of steps and ranks, and overlap of collectives."""
    if times is None:
        return {}
    # The share of the collectives' time in profiled steps in which the rank did not wait for them
    calls = [
        call
        for record in run_data.ranks.values()
        for line in record.steps
        for call in line.get("collectives", ())
        if call["end"] is not None and "memory" not in line
    ]
    collective_seconds = sum(call["end"] - call["start"] for call in calls)
    exposed_seconds = sum(call["exposed"] for call in calls)
    steps = times.total.max(1)
    rank_seconds = np.median(times.computing, 0)
    return {
        "steps": len(times.steps),
        "step_p95_over_median": float(np.percentile(steps, 95) / np.median(steps)),
        "step_variation": float(steps.std() / steps.mean()),
        "rank_variation": float(rank_seconds.std() / rank_seconds.mean()) if rank_seconds.mean() else 0.0,
        "overlap": 1 - exposed_seconds / collective_seconds if collective_seconds else None,
    }


def _break_down_ranks(run_data: RunData, times: StepTimes | None) -> list[Facts]:
    """Return the time breakdown of each rank: medians in seconds."""
    if times is None:
        return []
    names = ("compute", "communication", "pipeline", "data", "optimizer", "unattributed")
    medians = {name: np.median(getattr(times, name), 0) for name in names}
    return [
        {"rank": rank, "host": run_data.ranks[rank].host}
        | {name: float(medians[name][index]) for name in names}
        | {"peak_memory_bytes": max(line["peak_memory_bytes"] for line in run_data.ranks[rank].steps)}
        for index, rank in enumerate(times.ranks)
    ]


def _collect_curves(run_data: RunData) -> Facts:
    """Return the metrics of each step, a curve per held-out text, the last evaluated one last, and marks of starts.

    A mixture has losses by source (`RunData.source_losses`)."""
    step_metrics = run_data.step_metrics
    curves: Facts = {"step": [line["step"] for line in step_metrics]}
    has_targets = any(map(has_ignored_targets, step_metrics))
    for name in CURVES:
        if name == "targets_per_second" and not has_targets:
            continue
        if any(line.get(name) is not None for line in step_metrics):
            curves[name] = [line.get(name) for line in step_metrics]
    held_out: list[Facts] = []
    for line in run_data.evaluations:
        curve = next((curve for curve in held_out if have_same_held_out_text(curve, line)), None)
        if curve is None:
            curve = {"held_out_tokens": line.get("held_out_tokens"), "held_out_set": None, "loss": []}
        else:
            held_out.remove(curve)
        curve["held_out_set"] = line.get("held_out_set") or curve["held_out_set"]
        curve["loss"].append([line["step"], line["held_out_loss"]])
        held_out.append(curve)
    if sources := run_data.source_losses:
        curves["sources"] = sources
    return curves | {"held_out": held_out, "marks": run_marks(run_data.run_events)}


def _find_changed_held_out_text(evaluations: Sequence[JsonRecord]) -> Iterator[str]:
    """Yield a problem if a start of the run evaluated another text than the start before."""
    changes = [pair for pair in pairwise(evaluations) if not have_same_held_out_text(*pair)]
    if changes:
        before, after = changes[-1]
        tokens = [format_tokens(line.get("held_out_tokens")) for line in (before, after)]
        counts = "" if tokens[0] == tokens[1] else f" ({tokens[0]} before, {tokens[1]} since)"
        last_change = f"the last time after step {before['step']}{counts}"
        times = format_times(len(changes))
        yield f"the held-out text changed {times}, {last_change}: losses before and after are not comparable"
