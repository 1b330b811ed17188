"""What `phalanx dryrun` shows: a line of each rank, all of the first one, and whatever disagrees."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.spec.formatting import format_si
from phalanx.spec.parallel_dims import AXES, parallel_dims
from phalanx.spec.run import RunSpec
from phalanx.verify.plan_comparison import PlanCheck

Found = list[tuple[dict[str, Any], list[PlanCheck]]]
"""What was traced of each rank, and how it compares."""
NOTES = (
    "bytes are those that a rank sends (around a ring, where operations go around one); memory is what tensors hold, "
    "its total the peak",
    "experts are balanced; ranks are traced as on a CPU, where a reduce-scatter is an all-to-all and a sum",
)
UNITS = {"collective": "B", "memory": "B", "flops": "FLOP"}


def dry_run_to_json(run: RunSpec, world_size: int, found: Found) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "world_size": world_size,
        "layout": run.layout.model_dump(mode="json", exclude_none=True),
        "agrees": all(line.agrees for _, lines in found for line in lines),
        "notes": NOTES,
        "ranks": [
            {
                "rank": traced["rank"],
                "place": _place(run, world_size, traced["rank"]),
                "agrees": all(line.agrees for line in lines),
                "lines": [asdict(line) for line in lines],
                "peak_bytes": traced["peak_bytes"],
                "tracing": traced["tracing"],
            }
            for traced, lines in found
        ],
    }


def print_dry_run(run: RunSpec, world_size: int, found: Found) -> None:
    """The same, for people."""
    console = Console(width=max(Console().width, 110), highlight=False)
    console.print(_overview(run, world_size, found), soft_wrap=True)
    first, lines = found[0]
    console.print(f"\nrank {first['rank']}", style="bold")
    console.print(_detail(lines), soft_wrap=True)
    for traced, of_rank in found[1:]:
        wrong = [line for line in of_rank if not line.agrees]
        if wrong:
            console.print(f"\nrank {traced['rank']}: what disagrees", style="bold")
            console.print(_detail(wrong), soft_wrap=True)
    console.print()
    for note in NOTES:
        console.print(note, style="dim", soft_wrap=True)
    wrong_ranks = [traced["rank"] for traced, of_rank in found if not all(line.agrees for line in of_rank)]
    if wrong_ranks:
        console.print(f"plan and program disagree on ranks {', '.join(map(str, wrong_ranks))}", style="bold red")
    else:
        console.print(
            f"plan and program agree on every rank traced, {len(found)} of {world_size:,}", style="bold green"
        )


def _overview(run: RunSpec, world_size: int, found: Found) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("rank", "collectives", "sent", "peak memory", "planned", "", "FLOPs", "planned", "", "traced in"):
        table.add_column(column, justify="right")
    for traced, lines in found:
        collectives = [line for line in lines if line.kind == "collective"]
        total = next(line for line in lines if line.what == "total")
        flops = next(line for line in lines if line.kind == "flops")
        calls, same = sum(line.traced_calls for line in collectives), all(line.agrees for line in collectives)
        table.add_row(
            Text(f"{traced['rank']}") + Text(_where(run, world_size, traced["rank"]), "dim"),
            f"{calls:,} {'as planned' if same else 'not as planned'}",
            f"{format_si(sum(line.traced for line in collectives))}B",
            f"{format_si(total.traced)}B",
            f"{format_si(total.planned)}B",
            _off(total),
            format_si(flops.traced),
            format_si(flops.planned),
            _off(flops),
            f"{traced['tracing']['seconds']:.1f} s",
            style="" if all(line.agrees for line in lines) else "red",
        )
    return table


def _detail(lines: list[PlanCheck]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column, justify in (("", "left"), ("among", "left"), ("ranks", "right"), ("calls", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("traced", "planned", ""):
        table.add_column(column, justify="right")
    table.add_column("")
    for line in lines:
        calls = f"{line.traced_calls:,}" if line.traced_calls == line.planned_calls else ""
        calls = calls or f"{line.traced_calls:,} (planned {line.planned_calls:,})"
        of_collective = line.kind == "collective"
        table.add_row(
            line.what,
            line.among,
            f"{line.ranks:,}" if of_collective else "",
            calls if of_collective else "",
            f"{format_si(line.traced)}{UNITS[line.kind]}",
            f"{format_si(line.planned)}{UNITS[line.kind]}",
            _off(line),
            line.why,
            style="" if line.agrees else "red",
        )
    return table


def _off(line: PlanCheck) -> str:
    """How far the program is from the plan."""
    if line.traced == line.planned:
        return "="
    return f"{100 * (line.traced / line.planned - 1):+.1f}%" if line.planned else "not planned"


def _where(run: RunSpec, world_size: int, rank: int) -> str:
    place = _place(run, world_size, rank)
    return " " + " ".join(f"{axis} {at}" for axis, at in place.items()) if place else ""


def _place(run: RunSpec, world_size: int, rank: int) -> dict[str, int]:
    """On the axes of more than one rank; of a server nothing."""
    sizes = parallel_dims(run.layout, world_size)
    if rank < sizes.servers:
        return {}
    place = sizes.coordinates(rank)
    return {axis: place[axis] for axis in AXES if getattr(sizes, axis) > 1}
