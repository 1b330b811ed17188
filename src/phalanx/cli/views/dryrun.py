"""Output of `phalanx dryrun`: a line per rank, all details of the first, and all differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from phalanx.cli.common.text import text_table
from phalanx.spec.formatting import format_si
from phalanx.spec.parallel_dims import AXES, ParallelDims, parallel_dims
from phalanx.spec.run import RunSpec
from phalanx.spec.terminal import Terminal
from phalanx.verify.dry_run_report import DryRunReport
from phalanx.verify.plan_comparison import PlanCheck

NOTES = (
    "bytes: sent by a rank (with ring algorithms for reductions and gathers); memory: tensors, total at the peak",
    "experts are balanced; ranks are traced as on a CPU, where a reduce-scatter is an all-to-all followed by a sum",
)
UNITS = {"collective": "B", "memory": "B", "flops": "FLOP"}


def dry_run_to_json(run: RunSpec, report: DryRunReport) -> dict[str, Any]:
    """Return the full report as JSON."""
    sizes = parallel_dims(run.layout, report.world_size)
    return {
        "world_size": report.world_size,
        "layout": run.layout.model_dump(mode="json", exclude_none=True),
        "agrees": report.ok,
        "notes": NOTES,
        "ranks": [
            {
                "rank": traced["rank"],
                "place": _mesh_coordinates(sizes, traced["rank"]),
                "agrees": all(check.agrees for check in checks),
                "lines": [asdict(check) for check in checks],
                "peak_bytes": traced["peak_bytes"],
                "tracing": traced["tracing"],
            }
            for traced, checks in report.results
        ],
    }


def print_dry_run(run: RunSpec, report: DryRunReport) -> None:
    """Print the report."""
    results = report.results
    console = Terminal(width=max(Terminal().width, 110), highlight=False)
    console.print(_build_overview_table(run, report), soft_wrap=True)
    first_rank, first_checks = results[0]
    console.print(f"\nrank {first_rank['rank']}", style="bold")
    console.print(_build_detail_table(first_checks), soft_wrap=True)
    for traced, checks in results[1:]:
        wrong = [check for check in checks if not check.agrees]
        if wrong:
            console.print(f"\nrank {traced['rank']}: differences", style="bold")
            console.print(_build_detail_table(wrong), soft_wrap=True)
    console.print()
    notes = [*NOTES]
    tracing = [traced["tracing"] for traced, _ in results]
    if not all(rank["full"] for rank in tracing):
        least = min(
            tracing, key=lambda rank: rank["traced_micro_batches"] * rank["traced_blocks"] / max(rank["blocks"], 1)
        )
        counts = [
            f"{least[f'traced_{work}']} of {least[work]} {work.replace('_', '-')}"
            for work in ("micro_batches", "blocks")
            if least[f"traced_{work}"] < least[work]
        ]
        notes.append(f"equal work ran once: {', '.join([*counts, 'few chunks of rows'])} (--full runs all)")
    # Reasons why quantities agree that differ by more than the tolerance
    explained_ranks = defaultdict[str, set[int]](set)
    for rank, checks in report.rank_checks.items():
        for check in checks:
            if check.explanation:
                explained_ranks[check.explanation].add(rank)
    notes += [
        f"ranks {', '.join(map(str, sorted(ranks)))}: {explanation}" for explanation, ranks in explained_ranks.items()
    ]
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)
    wrong_ranks = [traced["rank"] for traced, checks in results if not all(check.agrees for check in checks)]
    if not report.ok:
        console.print(f"plan and program disagree on ranks {', '.join(map(str, wrong_ranks))}", style="bold red")
    else:
        traced_ranks = f"{len(results)} traced ranks of {report.world_size:,}"
        console.print(f"plan and program agree on all {traced_ranks}", style="bold green")


def _build_overview_table(run: RunSpec, report: DryRunReport) -> Table:
    columns = ("rank", "collectives", "sent", "peak memory", "planned", "", "FLOPs", "planned", "", "traced in")
    table = text_table(numbers=columns)
    dims = parallel_dims(run.layout, report.world_size)
    for traced, checks in report.results:
        collectives = [check for check in checks if check.kind == "collective"]
        total = next(check for check in checks if check.quantity == "total")
        flops = next(check for check in checks if check.kind == "flops")
        calls = sum(check.traced_calls for check in collectives)
        all_agree = all(check.agrees for check in collectives)
        coordinates = _mesh_coordinates(dims, traced["rank"]).items()
        coordinate_text = "".join(f" {axis} {coordinate}" for axis, coordinate in coordinates)
        table.add_row(
            Text(f"{traced['rank']}") + Text(coordinate_text, "dim"),
            f"{calls:,} {'as planned' if all_agree else 'not as planned'}",
            f"{format_si(sum(check.traced for check in collectives))}B",
            f"{format_si(total.traced)}B",
            f"{format_si(total.planned)}B",
            _format_deviation(total),
            format_si(flops.traced),
            format_si(flops.planned),
            _format_deviation(flops),
            f"{traced['tracing']['seconds']:.1f} s",
            style="" if all(check.agrees for check in checks) else "red",
        )
    return table


def _build_detail_table(checks: list[PlanCheck]) -> Table:
    table = text_table("", "among", numbers=("ranks", "calls", "traced", "planned", ""))
    table.add_column("")
    for check in checks:
        calls = f"{check.traced_calls:,}" if check.traced_calls == check.planned_calls else ""
        calls = calls or f"{check.traced_calls:,} (planned {check.planned_calls:,})"
        is_collective = check.kind == "collective"
        table.add_row(
            check.quantity,
            check.among,
            f"{check.ranks:,}" if is_collective else "",
            calls if is_collective else "",
            f"{format_si(check.traced)}{UNITS[check.kind]}",
            f"{format_si(check.planned)}{UNITS[check.kind]}",
            _format_deviation(check),
            check.explanation,
            style="" if check.agrees else "red",
        )
    return table


def _format_deviation(check: PlanCheck) -> str:
    """Format the deviation of the program from the plan."""
    if check.traced == check.planned:
        return "="
    if not check.planned:
        return "not planned"
    difference = check.traced - check.planned
    sign = "+" if difference > 0 else "-"
    return f"{100 * difference / check.planned:+.1f}%, {sign}{format_si(abs(difference))}{UNITS[check.kind]}"


def _mesh_coordinates(sizes: ParallelDims, rank: int) -> dict[str, int]:
    """Return a rank's coordinates on axes of more than one rank; none for a server."""
    if rank < sizes.servers:
        return {}
    coordinates = sizes.coordinates(rank)
    return {axis: coordinates[axis] for axis in AXES if getattr(sizes, axis) > 1}
