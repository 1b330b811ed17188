"""Output of `phalanx plan`: tables, breakdowns and comparisons."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.table import Column, Table

from phalanx.cli.common.text import print_line, text_table
from phalanx.cli.views.plan_notes import (
    PREDICTED_TRAINER,
    describe_faster_layout,
    describe_memory_column,
    describe_safer_layout,
    describe_setup,
    format_training,
    print_assumptions,
)
from phalanx.plan.search.explain import (
    PART_DESCRIPTIONS,
    equally_fast,
    evaluate_what_ifs,
    explain_slowdown,
    slow_link_warnings,
)
from phalanx.plan.search.faster_layout import find_faster_layout
from phalanx.plan.search.oom_risk import (
    MAX_OOM_PROBABILITY,
    SAFE_OOM_PROBABILITY,
    describe_host_need,
    describe_memory_limit,
    node_host_bytes,
)
from phalanx.plan.search.phases import largest_phase, phase_costs, phase_with_most_tokens
from phalanx.plan.search.pipeline_simulation import show_command, simulate_candidate
from phalanx.plan.search.result import EvaluatedLayout, Plan
from phalanx.plan.search.search import UNCERTAIN_GAIN
from phalanx.plan.tables.predict import Prediction, PredictionFailure
from phalanx.plan.training_cost import estimate_training_cost
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.formatting import GIB, format_duration, format_gib, format_percent
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.terminal import Terminal

WIDTH = 100
"""Minimum width of tables."""
UNBROKEN_WIDTH = 1000
"""Width in which no row is broken."""
BATCH_TRAINERS = (
    "each row's own trainer, from `schedule` and `facts`; never Phalanx, whose runs `phalanx plan RUN.toml` predicts"
)


def print_layout_table(resolved: ResolvedRun, plan: Plan, top: int, tokens: float | None) -> None:
    """Print the `top` fastest layouts, the Pareto front of time and memory, and the cost of a full training.

    The plan has at least one layout. `tokens` are those of a full training; None for those of the run.
    """
    whole = resolved
    resolved = largest_phase(resolved)
    run = resolved.run
    console = plan_console()
    _print_plan_summary(console, resolved, plan)
    table = plan_table("", "layout", "step s", "80 % of steps", "tokens/s", "MFU", "GiB", "P(OOM)", "exposed", "bubble")
    front = plan.pareto_front
    for number, layout in enumerate(plan.layouts[:top], 1):
        marker = "*" if layout in front else " "
        table.add_row(f"{number}{marker}", str(layout.candidate), *format_figures(run.cluster, layout))
    console.print(table)
    console.print()
    limit = f"P(OOM) below {MAX_OOM_PROBABILITY:.0%}"
    if (fastest := plan.layouts[0]).p_oom >= SAFE_OOM_PROBABILITY:
        print_line(console, describe_safer_layout(plan, fastest), "yellow")
    if (faster := find_faster_layout(resolved, plan)) is not None:
        for note in describe_faster_layout(faster):
            print_line(console, note, "yellow")
    console.print(f"*: on the Pareto front of time and memory. All layouts shown have {limit}.", style="dim")
    for note in (
        f"Step times within {UNCERTAIN_GAIN:.0%} count as equal: layouts without offload, then with fewer kinds of "
        "parallelism, come first.",
        "One row per layout, with its best schedule; --all shows every schedule.",
        *describe_memory_column(run.cluster, plan.layouts[:top]),
    ):
        print_line(console, note, "dim")
    exposed = "exposed: communication not hidden by compute."
    console.print(f"{exposed} phalanx plan explain RUN.toml K shows the parts of time and memory.", style="dim")
    first = "the first layout that is unlikely to run out of memory"
    print_line(console, f"--out FILE writes a run file with these settings and {first}; --set changes them.", "dim")
    console.print()
    if whole.run.phase:
        _print_phases(console, whole, plan.best)
    elif run.training.epochs is not None and tokens is None:
        print_line(console, "training.epochs needs the size of the text: --tokens N shows the cost of a full training")
    else:
        for line in format_training(run, estimate_training_cost(resolved, plan.layouts[0], tokens)):
            print_line(console, line)
    print_assumptions(console, resolved, plan.layouts[:top])


def _print_phases(console: Terminal, resolved: ResolvedRun, layout: EvaluatedLayout) -> None:
    """Print the predicted time and memory of each phase of a run under a layout."""
    costs = phase_costs(resolved, layout.layout)
    table = plan_table("", "phase", "steps", "tokens a step", "sequence", "step s", "GiB", "P(OOM)", "hours")
    for cost in costs:
        training = cost.phase.run.training
        sizes = f"{cost.phase.steps:,}", f"{training.tokens_per_step:,}", f"{training.seq_len:,}"
        memory = f"{cost.layout.memory_bytes / GIB:.1f}", format_percent(cost.layout.p_oom)
        step = f"{cost.layout.step_seconds:.3f}"
        table.add_row("", cost.phase.name, *sizes, step, *memory, f"{cost.seconds / 3600:.3g}")
    print_line(console, f"phases with {layout.candidate}:")
    console.print(table)
    seconds = sum(cost.seconds for cost in costs)
    print_line(console, f"{format_duration(seconds)} in all; the first table is for the phase with the most tokens")


def describe_shown_phase(run: RunSpec) -> str | None:
    """Return which phase of a run has the figures of a layout; None for a run without phases."""
    return f"figures of {phase_with_most_tokens(run).name}, which has the most tokens" if run.phase else None


def print_explanation(resolved: ResolvedRun, plan: Plan, index: int) -> None:
    """Print the parts of a layout's time and memory, why others are slower, and what would improve it.

    `index` is that of the layout in `plan.layouts`.
    """
    note = describe_shown_phase(resolved.run)
    resolved = largest_phase(resolved)
    run = resolved.run
    console = plan_console()
    layout = plan.layouts[index]
    _print_plan_summary(console, resolved, plan)
    if note is not None:
        print_line(console, note)
    console.print(f"{index + 1}. {layout.candidate}", style="bold", highlight=False)
    print_line(
        console,
        f"step {layout.step_seconds:.3f} s, 80 % between {layout.low_seconds:.3f} and {layout.high_seconds:.3f}; "
        f"MFU {layout.mfu:.1%}, HFU {layout.hfu:.1%} (including recomputation)",
    )
    for note in slow_link_warnings(run, layout.candidate):
        console.print(note, style="yellow", highlight=False)
    console.print()
    table = plan_table("time", "seconds", "share", "")
    for part, seconds in layout.parts.items():
        share = seconds / layout.step_seconds
        table.add_row(PART_DESCRIPTIONS[part], f"{seconds:.3f}", f"{share:.1%}", "█" * round(40 * share))
    console.print(table)
    # The simulation assigns a core to each rank.
    if layout.candidate.pp > 1 and run.cluster.ranks_per_core <= 1:
        seconds = float(simulate_candidate(resolved, layout.candidate).makespan)
        compared = f"{layout.schedule_seconds:.3f} s in the table above"
        print_line(console, f"simulated schedule: {seconds:.3f} s of compute, transfers and bubble; {compared}", "dim")
        command = show_command(resolved, layout.candidate)
        print_line(console, f"draw it, with all ranks as slow as the slowest: {command}", "dim")
    console.print()
    _print_memory_parts(console, run.cluster, layout)
    if host_need := describe_host_need(run.cluster, layout.host_bytes, offloads=layout.candidate.offloads):
        print_line(console, host_need)
    console.print(f"P(OOM) {layout.p_oom:.1%}", highlight=False)
    print_line(console, describe_memory_limit(run.cluster), "dim")
    others = [other for other in plan.layouts[: index + 6] if other is not layout]
    if others:
        console.print("\nother layouts, compared with this one", style="bold")
        for other in others:
            print_line(console, f"  {other.candidate}\n    {explain_slowdown(run, other, layout)}")
    console.print("\nwhat if, compared with the fastest layout", style="bold")
    for idea in evaluate_what_ifs(resolved, plan.fastest or layout):
        outcome = f"{idea.speedup - 1:+.1%} tokens/s with {idea.best.candidate}" if idea.best else "no layout fits"
        print_line(console, f"  {idea.change}: {outcome}")
    console.print()
    print_assumptions(console, resolved, [layout, *others])


def _print_memory_parts(console: Terminal, cluster: ClusterSpec, layout: EvaluatedLayout) -> None:
    """Print the estimated parts of the first and last stage, and what the tensor count adds to their sum."""
    table = plan_table("memory, GiB", *layout.stages, "")
    stages = layout.stages.items()
    totals = layout.stage_bytes.values()
    rows = {part: [parts[part] for _, parts in stages] for part in layout.stages["last"]}
    rows["count - estimate"] = [layout.stage_bytes[name] - sum(parts.values()) for name, parts in stages]
    for part, sizes in rows.items():
        bar = "█" * round(40 * max(sizes) / layout.memory_bytes)
        table.add_row(part, *(f"{size / GIB:.2f}" for size in sizes), bar)
    table.add_row("total", *(f"{total / GIB:.2f}" for total in totals), "", style="bold")
    console.print(table)
    note = "parts: a formula's estimate; total: the exact count, as in `phalanx memory`"
    if cluster.calibration:
        note += ", with the rest of the process as measured"
    if layout.memory_bytes > max(totals):
        note += f"; the fullest rank is in another stage: {format_gib(layout.memory_bytes)}"
    print_line(console, note, "dim")


def print_comparison(
    resolved: ResolvedRun,
    first: EvaluatedLayout,
    second: EvaluatedLayout,
    names: tuple[str, str],
    notes: Sequence[str] = (),
) -> None:
    """Print two layouts side by side under their names, and why one is slower.

    `notes` are lines on layouts that are not evaluated as they were written.
    """
    phase_note = describe_shown_phase(resolved.run)
    resolved = largest_phase(resolved)
    console = plan_console()
    print_line(console, f"{PREDICTED_TRAINER}: {describe_setup(resolved)}")
    if phase_note is not None:
        print_line(console, phase_note)
    named = list(zip(names, (first, second), strict=True))
    for name, layout in named:
        console.print(f"{name}: {layout.candidate}", style="bold", highlight=False)
    for note in notes:
        print_line(console, note, "yellow")
    console.print()
    (slow, slower), (fast, faster) = sorted(named, key=lambda pair: -pair[1].step_seconds)
    sign = 1 if slower is first else -1
    table = plan_table("", *names, f"{slow} - {fast}")
    for part, label in PART_DESCRIPTIONS.items():
        table.add_row(*_format_comparison_row(label, first.parts[part], second.parts[part], sign, unit="s"))
    table.add_row(*_format_comparison_row("step", first.step_seconds, second.step_seconds, sign, unit="s"))
    table.add_row(
        *_format_comparison_row("memory", first.memory_bytes / GIB, second.memory_bytes / GIB, sign, unit="GiB")
    )
    first_host, second_host = (
        node_host_bytes(resolved.run.cluster, layout.host_bytes) / GIB for layout in (first, second)
    )
    if first_host or second_host:
        table.add_row(*_format_comparison_row("CPU memory of a node", first_host, second_host, sign, unit="GiB"))
    table.add_row("P(OOM)", f"{first.p_oom:.1%}", f"{second.p_oom:.1%}", "")
    console.print(table)
    print_assumptions(console, resolved, [first, second])
    console.print()
    for name, layout in named:
        if layout.p_oom >= MAX_OOM_PROBABILITY:
            console.print(f"{name} is not likely to fit", style="yellow", highlight=False)
    conclusion = f"{slow} and {fast} are equally fast"
    if not equally_fast(slower, faster):
        longer = slower.step_seconds / faster.step_seconds - 1
        conclusion = f"{slow} takes {longer:.1%} longer than {fast}, {explain_slowdown(resolved.run, slower, faster)}"
    print_line(console, conclusion)


def _format_comparison_row(label: str, first: float, second: float, sign: int, unit: str) -> list[str]:
    """Return the cells of a row; `sign` is 1 if the first layout is the slower one, else -1."""
    digits = 3 if unit == "s" else 1
    difference = f"{sign * (first - second):+.{digits}f} {unit}"
    return [label, f"{first:.{digits}f} {unit}", f"{second:.{digits}f} {unit}", difference]


def print_predictions(predictions: Sequence[Prediction | PredictionFailure]) -> None:
    """Print a table of predictions."""
    console = plan_console()
    print_line(console, BATCH_TRAINERS)
    table = plan_table("row", "trainer", "step s", "80 %", "TFLOP/s", "MFU", "GiB", "P(OOM)", "assumed")
    for row in predictions:
        if isinstance(row, PredictionFailure):
            table.add_row(row.id, "", "-", "", "", "", "", "", row.reason)
            continue
        table.add_row(
            row.id,
            row.trainer,
            f"{row.step_time_s:.4g}",
            f"{row.step_time_low_s:.4g} to {row.step_time_high_s:.4g}",
            f"{row.tflops_per_gpu:.0f}",
            f"{row.mfu:.1f} %",
            f"{row.memory_gib:.1f}",
            f"{row.p_oom:.2f}",
            ", ".join(row.assumed),
        )
    console.print(table)


def _print_plan_summary(console: Terminal, resolved: ResolvedRun, plan: Plan) -> None:
    print_line(
        console,
        f"{PREDICTED_TRAINER}: {describe_setup(resolved)}; {plan.searched:,} layouts, {plan.fitting:,} likely to fit",
    )
    print_line(console, calibration_note(resolved.run.cluster), "dim")
    console.print()


def calibration_note(cluster: ClusterSpec) -> str:
    """Return which of a machine's numbers were measured, and which are assumed."""
    measured = cluster.calibration
    if measured is None:
        return "no run on this machine was measured (`phalanx calibrate`): its constants are those of published runs"
    decided = ", ".join(measured.identified_constants) or "none alone"
    return f"measured by {measured.runs} runs on this machine: {decided}; assumed: every other constant"


def format_figures(cluster: ClusterSpec, layout: EvaluatedLayout) -> list[str]:
    """Return the cells of a layout's predicted time and memory."""
    host_bytes = node_host_bytes(cluster, layout.host_bytes)
    return [
        f"{layout.step_seconds:.3f}",
        f"{layout.low_seconds:.3g} to {layout.high_seconds:.3g}",
        f"{layout.tokens_per_second:,.0f}",
        f"{layout.mfu:.1%}",
        f"{layout.memory_bytes / GIB:.1f}" + (f" + {host_bytes / GIB:.0f}" if host_bytes else ""),
        f"{layout.p_oom:.1%}",
        f"{layout.exposed / layout.step_seconds:.1%}",
        f"{max(0.0, layout.parts['bubble']) / layout.step_seconds:.1%}",
    ]


def plan_table(*headers: str) -> Table:
    """Return a table whose first two columns are text; only the second is broken into lines."""
    first, second, *numbers = headers
    columns = [Column(header, justify="right", no_wrap=True) for header in numbers]
    return text_table(Column(first, no_wrap=True), second, *columns)


def plan_console() -> Terminal:
    """Return a console of the width of the terminal, or of rows on one line each for grep and other programs."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Terminal(width=UNBROKEN_WIDTH)
    return console if console.width >= WIDTH else Terminal(width=WIDTH)
