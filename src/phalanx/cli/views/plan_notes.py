"""Notes of `phalanx plan` below a table: safer and faster layouts, full training, assumptions."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.common.text import print_line
from phalanx.plan.search.evaluate import layout_to_text
from phalanx.plan.search.explain import equally_fast
from phalanx.plan.search.faster_layout import FasterLayout
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY, describe_host_need, describe_memory_limit
from phalanx.plan.search.result import EvaluatedLayout, Plan
from phalanx.plan.tables.machine_columns import describe_assumptions
from phalanx.plan.training_cost import TrainingCost
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.formatting import format_duration, format_gib, format_si, plural
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.terminal import Terminal

PREDICTED_TRAINER = "Phalanx's own trainer"
"""Trainer whose time and memory a plan predicts. Other trainers differ by tens of GiB."""


def describe_setup(resolved: ResolvedRun) -> str:
    """Describe the model, the machine and the batch."""
    run = resolved.run
    name = run.model_name
    return f"{name} on {resolved.world_size:,} x {run.cluster.preset or 'the cluster'}, {describe_batch(run)}"


def describe_batch(run: RunSpec) -> str:
    """Describe the tokens of a step."""
    return f"{run.training.tokens_per_step:,} tokens a step in sequences of {run.training.seq_len:,}"


def training_to_json(run: RunSpec) -> dict[str, object]:
    """Return what a plan depends on besides the model and the machine."""
    training = run.training
    return {
        "seq_len": training.seq_len,
        "tokens_per_step": training.tokens_per_step,
        "precision": training.precision,
        "optimizer": run.optimizer.name,
    }


def list_assumptions(resolved: ResolvedRun, layouts: Sequence[EvaluatedLayout]) -> list[str]:
    """List the assumptions of predictions of these layouts."""
    run = resolved.run
    offload_targets = {layout.candidate.offload for layout in layouts}
    balanced = ["evenly loaded experts"] if run.model.moe else []
    offloads_activations = any(layout.candidate.activation_checkpointing == "offload" for layout in layouts)
    precision = run.training.precision
    training = run.training
    unset = [
        f"training.{field} = {getattr(training, field)}"
        for field in ("seq_len", "tokens_per_step", "precision")
        if field not in training.model_fields_set
    ]
    unset += [] if "name" in run.optimizer.model_fields_set else [f"optimizer.name = {run.optimizer.name}"]
    machine = describe_assumptions(run.cluster, resolved.world_size, offload_targets, precision, offloads_activations)
    reference = []
    if run.preference is not None:
        reference = ["no time for the reference's forward pass over all pairs, before step 1"]
    if run.distillation is not None and any(layout.candidate.pp > 1 for layout in layouts):
        reference = ["no pipeline bubble of the teacher's passes"]
    return [*unset, *machine, *balanced, *reference]


def print_assumptions(console: Terminal, resolved: ResolvedRun, layouts: Sequence[EvaluatedLayout]) -> None:
    """Print the assumptions of predictions of these layouts."""
    line = f"assumed: {'; '.join(list_assumptions(resolved, layouts)) or 'nothing about the machine'}"
    print_line(console, line, "dim")


def describe_safer_layout(plan: Plan, fastest: EvaluatedLayout) -> str:
    """Return a warning that the fastest layout may not fit, with an alternative."""
    warning = f"Layout 1 may not fit (P(OOM) {fastest.p_oom:.0%})."
    safe = plan.first_safe
    if safe is None:
        return f"{warning} None shown is below {SAFE_OOM_PROBABILITY:.0%}."
    number = plan.layouts.index(safe) + 1
    slower = safe.step_seconds / fastest.step_seconds - 1
    longer = "equally fast"
    if not equally_fast(safe, fastest):
        longer = f"with steps {abs(slower):.1%} {'longer' if slower > 0 else 'shorter'}"
    return f"{warning} The first below {SAFE_OOM_PROBABILITY:.0%} is {number}, {longer}: {safe.candidate}"


def describe_faster_layout(faster: FasterLayout) -> list[str]:
    """Describe a faster layout that does not fit in two lines: its speed and missing memory; the command."""
    layout = faster.option
    missing = {"device": faster.missing_device_bytes, "CPU": faster.missing_host_bytes}
    shortage = " and ".join(
        f"{format_gib(size)} of {memory_name} memory" for memory_name, size in missing.items() if size
    )
    remedy = ""
    if faster.fitting_seq_len is not None:
        seconds = f"{faster.fitting_step_seconds:,.1f} s a step"
        remedy = f"It fits with --set training.seq_len={faster.fitting_seq_len} ({seconds}). "
    fields = layout_to_text(layout.candidate.layout())
    return [
        f"A layout that does not fit would be {faster.speedup:,.1f} times as fast as the fastest layout that fits: "
        f"{layout.candidate}, {layout.step_seconds:,.1f} s a step. It lacks {shortage} (P(OOM) {layout.p_oom:.0%}).",
        f'{remedy}phalanx plan compare RUN.toml "{fields}" compares it with layout 1.',
    ]


def describe_memory_column(cluster: ClusterSpec, layouts: Sequence[EvaluatedLayout]) -> list[str]:
    """Describe the required memory of layouts, and the device and CPU memory available."""
    offloads = any(layout.candidate.offloads for layout in layouts)
    need = describe_host_need(cluster, max(layout.host_bytes for layout in layouts), offloads=offloads)
    measured_object = "process" if cluster.calibration else "tensors"
    meaning = f"GiB: {measured_object} of the fullest rank" + (" + CPU memory of a node" if need else "")
    return [f"{meaning}; {describe_memory_limit(cluster)}.", *([f"{need}."] if need else [])]


def format_training(run: RunSpec, cost: TrainingCost) -> list[str]:
    """Format the cost of a full training as text."""
    days = f"{cost.days:,.1f} days" if cost.days >= 2 else f"{24 * cost.days:,.1f} hours"
    is_default = cost.tokens == run.training.steps * run.training.tokens_per_step and not (
        {"steps", "seconds"} & run.training.model_fields_set
    )
    length = f" ({run.training.steps:,} steps, the default; --tokens sets another length)" if is_default else ""
    lines = [f"{cost.tokens:.3g} tokens{length} with layout 1: {days} at a goodput of {cost.goodput:.1%}"]
    intervals = cost.interval_seconds, cost.young_interval_seconds, cost.daly_interval_seconds
    best, young, daly = map(format_duration, intervals)
    written = f"{format_si(cost.checkpoint_bytes)}B in {cost.write_seconds:,.1f} s"
    lines.append(
        f"a failure every {format_duration(cost.mtbf_seconds)}; a checkpoint ({written}) is best written every "
        f"{best}, or {plural(cost.interval_steps, 'step')} (Young's formula: {young}; Daly's: {daly})"
    )
    if cost.device_kwh is not None:
        lines.append(
            f"energy at rated power, an upper limit: cards {cost.device_kwh:,.0f} kWh, "
            f"rest of the nodes {cost.host_kwh:,.0f} kWh, "
            f"facility {cost.facility_kwh:,.0f} kWh (PUE {run.cluster.pue:g})"
        )
        lines[-1] += f": {cost.electricity:,.0f} for electricity" if cost.electricity else ""
    price = run.cluster.price_per_device_hour
    rent = f" at {price:g}: {cost.rent:,.0f}" if price else " (cluster.price_per_device_hour gives them a price)"
    lines.append(f"{cost.device_hours:,.0f} device-hours{rent}")
    return lines
