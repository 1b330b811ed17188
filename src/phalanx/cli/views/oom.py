"""Output of `phalanx advise oom`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from phalanx.cli.common.text import print_line, text_table
from phalanx.plan.advice.oom import Diagnosis, RemedyEffect, RunFootprint, fits_after
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, SAFE_OOM_PROBABILITY, describe_fit, describe_memory_limit
from phalanx.spec.formatting import GIB, format_gib, format_optional
from phalanx.spec.run import RunSpec
from phalanx.spec.terminal import Terminal

WIDTH = 180
NOTES = (
    "GiB: memory of the fullest rank, as in `phalanx memory`",
    "step: predicted time; - if unknown (the machine has no speeds or is not calibrated in this precision, or the "
    "planner does not cover the change)",
    "each change alone: the smallest degree that makes the run fit, or the one that frees most",
    "parts: each at its own peak, so their sum exceeds the total; fits: P(OOM) below "
    f"{SAFE_OOM_PROBABILITY:.0%}, may not fit: below {MAX_OOM_PROBABILITY:.0%}",
)


def print_oom_advice(run: RunSpec, diagnosis: Diagnosis) -> None:
    """Print the run's memory, the effect of each remedy, the steps until it fits, and the required ones."""
    console = Terminal(width=max(Terminal().width, WIDTH))
    _print_memory_verdict(console, run, diagnosis)
    groups = "" if diagnosis.current_footprint.fits else "those that make it fit, then those that do not suffice; "
    console.print(f"\neach change alone: {groups}by step time, then those that cost more than time", style="bold")
    table = _make_table("change", "frees GiB", "most in", "GiB then", "step s", "", "--set", "costs")
    unhelpful: dict[str, list[str]] = {}
    for effect in diagnosis.single_remedies:
        if effect.helps:
            _add_effect_row(table, effect, diagnosis.current_footprint, _join_set_arguments(effect), effect.cost)
        else:
            unhelpful.setdefault(effect.problem or "frees nothing on the fullest rank", []).append(effect.remedy.name)
    console.print(table)
    for problem, names in unhelpful.items():
        print_line(console, f"no effect: {', '.join(names)}: {problem}", "dim")
    if diagnosis.current_footprint.fits:
        console.print("\nThe run fits without changes.", style="green")
    else:
        _print_steps(console, diagnosis)
    best = diagnosis.best
    if best is not None:
        figures = f"{best.step_seconds:.3g} s, {format_gib(best.memory_bytes)}"
        print_line(console, f"\nThe planner's best of all layouts on these devices: {best.candidate}: {figures}")
    console.print()
    for note in (describe_memory_limit(run.cluster), *NOTES):
        print_line(console, note, "dim")


def _print_memory_verdict(console: Terminal, run: RunSpec, diagnosis: Diagnosis) -> None:
    memory = diagnosis.current_footprint.memory
    cluster = run.cluster
    name = run.model_name
    machine = cluster.preset or "device"
    verdict = describe_fit(diagnosis.current_footprint.p_oom)
    print_line(
        console,
        f"{name} on {cluster.ranks:,} x {machine}: the fullest rank holds {format_gib(memory.device)} of the "
        f"{diagnosis.limit_bytes / GIB:.1f} GiB available: {verdict}",
        "bold green" if diagnosis.current_footprint.fits else "bold red",
    )
    parts = ("parameters", "gradients", "optimizer", "activations", "communication")
    sizes = ", ".join(f"{part} {getattr(memory, part) / GIB:.1f}" for part in parts)
    step = f"step {format_optional(diagnosis.current_footprint.step_seconds)} s"
    print_line(console, f"{sizes}; micro-batch {diagnosis.micro_batch}, {step}")


def _print_steps(console: Terminal, diagnosis: Diagnosis) -> None:
    console.print("\nin sequence, until it fits", style="bold")
    if diagnosis.steps:
        table = _make_table("change", "frees GiB", "most in", "GiB then", "step s", "")
        before = diagnosis.current_footprint
        for effect in diagnosis.steps:
            _add_effect_row(table, effect, before)
            before = effect.new_footprint or before
        console.print(table)
    if not fits_after(diagnosis.steps):
        console.print("These changes together do not make it fit.", style="red")
        return
    last_effect = diagnosis.needed[-1]
    if len(diagnosis.needed) < len(diagnosis.steps):
        names = "; ".join(effect.remedy.name for effect in diagnosis.needed)
        print_line(console, f"\nSufficient: {names}")
    print_line(console, f"\nIt fits with  --set {_join_set_arguments(last_effect)}", "green")
    if last_effect.new_footprint:
        footprint = last_effect.new_footprint
        result = f"{format_gib(footprint.memory.device)}, step {format_optional(footprint.step_seconds)} s"
        console.print(result, highlight=False)


def _join_set_arguments(effect: RemedyEffect) -> str:
    """Return the settings of a remedy as a command line takes them after its first `--set`."""
    return " --set ".join(effect.settings)


def _add_effect_row(table: Table, effect: RemedyEffect, before: RunFootprint, *more_cells: str) -> None:
    after = effect.new_footprint
    if after is None:
        return
    part, size = max(effect.freed.items(), key=lambda freed: freed[1])
    step = format_optional(after.step_seconds)
    if after.step_seconds and before.step_seconds:
        step += f" ({after.step_seconds / before.step_seconds - 1:+.0%})"
    table.add_row(
        effect.remedy.name,
        f"{effect.freed_bytes / GIB:.1f}",
        f"{part} {size / GIB:.1f}" if size > 0 else "",
        f"{after.memory.device / GIB:.1f}",
        step,
        describe_fit(after.p_oom) if after.p_oom < MAX_OOM_PROBABILITY else "",
        *more_cells,
        style="green" if after.fits else "",
    )


def _make_table(*headers: str) -> Table:
    left_aligned = ("change", "--set", "most in", "", "costs")
    columns = [
        Column(header, justify="left" if header in left_aligned else "right", no_wrap=header != "costs")
        for header in headers
    ]
    return text_table(*columns)


def oom_to_json(run: RunSpec, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the output of `phalanx advise oom --json`."""
    return {
        "model": run.model.source_name,
        "devices": run.cluster.ranks,
        "limit_bytes": diagnosis.limit_bytes,
        "micro_batch": diagnosis.micro_batch,
        "now": _footprint_to_json(diagnosis.current_footprint),
        "alone": [_effect_to_json(effect) for effect in diagnosis.single_remedies],
        "steps": [_effect_to_json(effect) for effect in diagnosis.steps],
        "needed": [_effect_to_json(effect) for effect in diagnosis.needed],
        "fits": diagnosis.current_footprint.fits or fits_after(diagnosis.steps),
        "planner": diagnosis.best and str(diagnosis.best.candidate),
    }


def _footprint_to_json(footprint: RunFootprint) -> dict[str, Any]:
    memory = {**asdict(footprint.memory), "total": footprint.memory.total}
    return {"memory": memory, "fits": footprint.fits, "p_oom": footprint.p_oom, "step_seconds": footprint.step_seconds}


def _effect_to_json(effect: RemedyEffect) -> dict[str, Any]:
    return {
        "remedy": effect.remedy.name,
        "source": effect.remedy.source,
        "costs": effect.cost,
        "settings": list(effect.settings),
        "freed": dict(effect.freed),
        "freed_bytes": effect.freed_bytes,
        "after": effect.new_footprint and _footprint_to_json(effect.new_footprint),
        "problem": effect.problem,
    }
