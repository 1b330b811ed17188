"""Output of `phalanx report`, and of `phalanx watch` for a running run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from phalanx.cli.common.text import text_table
from phalanx.cli.views.scores import scores_table
from phalanx.report import formatting, gpu_samples
from phalanx.report.compare_runs import MAX_SIDE_BY_SIDE
from phalanx.report.gpu_profile import facts as gpu_profile
from phalanx.spec.formatting import format_ratio, format_seconds, plural
from phalanx.spec.terminal import Terminal

Facts = dict[str, Any]
PARTS = ("compute", "communication", "pipeline", "data", "optimizer", "unattributed")
"""Parts of a rank's step in display order."""
STEP_FORMATS = {
    "loss": ("loss {}", "loss"),
    "tokens_per_second": ("{} tokens/s", "tokens/s"),
    "targets_per_second": ("{} targets/s", "tokens/s"),
    "mfu": ("MFU {}", ""),
    "step_seconds": ("{} a step", "s"),
}
"""Format of each value of a step in a line, and its unit."""
SPARKLINE_CHARACTERS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 60
"""Characters in a bar and in a curve."""
MAX_ROUNDS_SHOWN = 8
"""Maximum number of a swarm's rounds that are listed."""
MAX_SOURCES_SHOWN = 8
"""Maximum number of a mixture's sources whose curves are shown."""
MAX_RANKS_SHOWN = 16
"""Maximum number of ranks that are listed: those with the longest compute time."""


def print_report(report: Facts, file: Path) -> None:
    """Print the full report: each run, the differences between runs, and the location of the page."""
    console = Terminal(width=max(Terminal().width, 80), highlight=False)
    comparison = report["comparison"]
    is_overview = len(report["runs"]) > MAX_SIDE_BY_SIDE
    for part in () if comparison is None else (*_render_run_table(comparison, file, as_rows=is_overview), Text()):
        console.print(part, soft_wrap=isinstance(part, Text))
    for line in () if comparison is None else _render_loss_curves(report["runs"], comparison["names"]):
        console.print(line, soft_wrap=True)
    for facts in () if is_overview else report["runs"]:
        for part in _render_report(facts):
            console.print(part, soft_wrap=isinstance(part, Text))
            console.print()
    console.print(f"page: {file}", soft_wrap=True, markup=False)


def _render_loss_curves(runs: Sequence[Facts], names: Sequence[str]) -> Iterator[Text]:
    """Yield the training losses of runs, below each other on one scale of steps and of losses."""
    losses = [facts["curves"].get("loss", []) for facts in runs]
    known = [loss for curve in losses for loss in curve if loss is not None]
    if not known:
        return
    most_steps = max(map(len, losses))
    yield Text(f"loss, on one scale from {min(known):.3f} to {max(known):.3f}", "bold")
    for name, curve in zip(names, losses, strict=True):
        width = max(1, round(BAR_WIDTH * len(curve) / most_steps))
        yield Text(f"{sparkline(curve, width, (min(known), max(known))):<{BAR_WIDTH}}  {name}")
    yield Text()


def render_live(facts: Facts) -> Group:
    """Return the essentials of a running run."""
    run = facts["run"]
    curves = facts["curves"]
    parts: list[RenderableType] = [
        Text.assemble((run["name"], "bold"), f"  {'  '.join(formatting.run_summary(run)[:2])}"),
        _render_progress_bar(run["step"] / run.get("steps", run["step"] or 1)),
        Text(format_latest_step(facts)),
    ]
    if not run.get("leads"):
        parts.append(Text(f"{sparkline(curves.get('loss', []), BAR_WIDTH)}  loss"))
        for name, losses in list(curves.get("sources", {}).items())[:MAX_SOURCES_SHOWN]:
            field = "loss" if losses["loss"] else "held_out_loss"
            label = "loss" if losses["loss"] else "held-out loss"
            values = [loss for _, loss in losses[field]]
            parts.append(Text(f"{sparkline(values, BAR_WIDTH)}  {label} of {name}"))
        parts += [Text(line) for _, line in evaluation_lines(facts)[-1:]]
    if "swarm" in facts:
        parts += [Text(), format_round_totals(facts), *map(Text, formatting.round_lines(facts)[-MAX_ROUNDS_SHOWN:])]
    if facts["ranks"]:
        parts += [Text(), rank_time_table(facts["ranks"])]
    if facts["verdict"]:
        parts += [Text(), format_bottleneck(facts["verdict"])]
    return Group(*parts, *(Text(f"! {problem}", "dim") for problem in facts["problems"]))


def _render_progress_bar(share: float) -> Text:
    done = round(share * BAR_WIDTH)
    return Text.assemble(("━" * done, "green"), ("━" * (BAR_WIDTH - done), "dim"))


def format_latest_step(facts: Facts, index: int = -1) -> str:
    """Format a step, by default the latest, as a line: loss, speed, time, and remaining time."""
    curves = facts["curves"]
    run = facts["run"]
    if not curves["step"]:
        return formatting.format_progress(run) if "swarm" in facts else "no step is complete yet"
    steps = f"/{run['steps']}" if "steps" in run else ""
    step = curves["step"][index]
    parts = [f"step {step}{steps}"]
    parts += [
        template.format(formatting.format_number(curves[metric][index], unit))
        for metric, (template, unit) in STEP_FORMATS.items()
        if metric in curves
    ]
    parts[2:2] = [f"{name} {loss:.3f}" for name, loss in _losses_of_sources(facts, "loss", step)]
    remaining_seconds = formatting.seconds_left(facts)
    if remaining_seconds and index == -1:
        parts.append(f"{format_seconds(remaining_seconds)} left")
    return "  ".join(parts)


def evaluation_lines(facts: Facts) -> list[tuple[int, str]]:
    """Return the step and a line for each evaluation, in order: the held-out loss, and that of each source."""
    evaluations = [point for curve in facts["curves"]["held_out"] for point in curve["loss"]]
    return [
        (
            step,
            "  ".join(
                [
                    f"step {step}",
                    f"held-out loss {formatting.format_number(loss, 'loss')}",
                    *(f"{name} {value:.3f}" for name, value in _losses_of_sources(facts, "held_out_loss", step)),
                ]
            ),
        )
        for step, loss in sorted(evaluations, key=itemgetter(0))
    ]


def _losses_of_sources(facts: Facts, field: str, step: int) -> Iterator[tuple[str, float]]:
    """Yield the name and the loss of each source of a mixture that has one in a step."""
    for name, losses in facts["curves"].get("sources", {}).items():
        index = bisect_left(losses[field], step, key=itemgetter(0))
        if index < len(losses[field]) and losses[field][index][0] == step:
            yield name, losses[field][index][1]


def _render_report(facts: Facts) -> Iterator[RenderableType]:
    run = facts["run"]
    ranks, *details = formatting.run_summary(run)
    problems = "".join(f"\n! {problem}" for problem in facts["problems"])
    yield Text.assemble((run["name"], "bold"), f"  {ranks}\n", "  ".join(details), (problems, "yellow"))
    results = list(run.get("phases", ()))
    if facts["curves"]["step"] and not run.get("leads"):
        results += [format_latest_step(facts), *(line for _, line in evaluation_lines(facts)[-1:])]
    if results:
        yield Text("\n".join(results))
    if facts["verdict"]:
        yield format_bottleneck(facts["verdict"])
    if facts["findings"][1:]:
        yield Text("\n").join(
            Text.assemble(
                (formatting.bottleneck_headline(finding), "bold"),
                f". {formatting.as_sentence(finding['evidence'])}",
                style="dim",
            )
            for finding in facts["findings"][1:]
        )
    if facts["scores"]:
        yield scores_table(facts["scores"])
    if facts["comparison"]:
        yield _build_prediction_table(facts["comparison"], run["ranks"])
    if facts["ranks"]:
        yield rank_time_table(facts["ranks"])
        if len(facts["ranks"]) > 1:
            yield Text(formatting.TABLE_NOTE, "dim")
    if facts["gpu"]:
        yield gpu_table(gpu_profile.table_title(facts["gpu"]), gpu_profile.table_rows(facts["gpu"]))
        yield Text(gpu_profile.TABLE_NOTE, "dim")
    if facts["gpu_samples"]:
        yield gpu_table(gpu_samples.table_title(facts["gpu_samples"]), gpu_samples.table_rows(facts["gpu_samples"]))
        yield Text("\n".join(gpu_samples.summary_lines(facts["gpu_samples"])))
    if "swarm" in facts:
        yield Group(format_round_totals(facts), *map(Text, formatting.round_lines(facts)[-MAX_ROUNDS_SHOWN:]))
        if facts["swarm"]["rounds"]:
            yield Text(formatting.ROUND_TABLE_NOTE, "dim")


def format_round_totals(facts: Facts) -> Text:
    """Format the totals of a swarm's rounds as a line."""
    return Text("  ".join(" ".join(filter(None, parts)) for parts in formatting.round_totals(facts)), "bold")


def format_bottleneck(finding: Facts) -> Text:
    """Format the largest cost, its reason, and the first change to make."""
    return Text.assemble(
        (f"{formatting.bottleneck_headline(finding)}. ", "bold"),
        formatting.as_sentence(finding["evidence"]),
        ("\nchange first: ", "bold"),
        finding["suggestion"],
    )


def _build_prediction_table(rows: Sequence[Facts], num_ranks: int) -> Table:
    table = _make_table("", "predicted", "measured", "ratio")
    for title, section_rows in formatting.group_rows(rows):
        if table.rows:
            table.add_section()
        table.add_row(Text(title, "bold"))
        for row in section_rows:
            values = [formatting.format_number(row[name], row["unit"]) for name in ("predicted", "measured")]
            off = "yellow" if formatting.is_off(row["ratio"]) else ""
            table.add_row(f"  {formatting.row_label(row, num_ranks)}", *values, Text(format_ratio(row["ratio"]), off))
    return table


def rank_time_table(ranks: Sequence[Facts]) -> Group:
    """Return a table of each rank's step time by part; parts that no rank has are omitted."""
    listed_ranks = sorted(
        sorted(ranks, key=lambda rank: -rank["compute"])[:MAX_RANKS_SHOWN], key=lambda rank: rank["rank"]
    )
    parts = [part for part in PARTS if any(rank[part] > 0 for rank in ranks)]
    table = _make_table("rank", *(formatting.DISPLAY_NAMES.get(part, part) for part in parts))
    for rank in listed_ranks:
        table.add_row(f"{rank['rank']} on {rank['host']}", *(format_seconds(max(0.0, rank[part])) for part in parts))
    selection_note = (
        f", the {MAX_RANKS_SHOWN} of {len(ranks)} ranks that compute longest" if len(ranks) > MAX_RANKS_SHOWN else ""
    )
    return Group(Text(f"where each rank's step went{selection_note}", "bold"), table)


def gpu_table(title: str, rows: Sequence[Sequence[str]]) -> Group:
    """Return a table with a column per GPU; the first row is the header."""
    table = _make_table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    return Group(Text(title, "bold"), table)


def _render_run_table(comparison: Facts, file: Path, as_rows: bool) -> Iterator[RenderableType]:
    """Yield the measures and the differing settings of runs; each run is a column with ratios, or a row without.

    Columns that do not fit are counted; the page (`file`) has them.
    """
    rows = formatting.comparison_rows(comparison)
    if as_rows:
        total_width = max(Terminal().width, 80)
        name_width = min(total_width // 3, max(map(len, comparison["names"])))
        free_width = total_width - name_width
        table = text_table(Column("run", width=name_width, overflow="fold"))
        shown = []
        for label, cells in rows:
            title = label.replace(".", ".\n")
            width = max(map(len, [*title.split(), *(text for _, text, _ in cells)]))
            if width + 2 <= free_width:
                free_width -= width + 2
                table.add_column(Text(title), justify="right", width=width, overflow="fold")
                shown.append(cells)
        for index, name in enumerate(comparison["names"]):
            table.add_row(Text(name), *(Text(cells[index][1]) for cells in shown))
        yield table
        if len(shown) < len(rows):
            yield Text(f"{plural(len(rows) - len(shown), 'column')} left out; see {file} or --json", "dim")
    else:
        table = _make_table("", *comparison["names"])
        for label, cells in rows:
            table.add_row(label, *(Text(f"{text}  {ratio:>8}" if ratio else text) for _, text, ratio in cells))
        for column in table.columns:
            column.overflow = "fold"
        yield table
    yield from map(Text, formatting.format_comparison(comparison))


def _make_table(*columns: str) -> Table:
    table = text_table()
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left")
    return table


def sparkline(values: Sequence[float | None], width: int, scale: tuple[float, float] | None = None) -> str:
    """Return a curve as a line of characters: means of intervals, scaled from minimum to maximum, or to `scale`."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    count = min(width, len(numbers))
    boundaries = [len(numbers) * index // count for index in range(count + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in pairwise(boundaries)]
    minimum, maximum = scale or (min(means), max(means))
    span = (maximum - minimum) or 1.0
    return "".join(
        SPARKLINE_CHARACTERS[round((value - minimum) / span * (len(SPARKLINE_CHARACTERS) - 1))] for value in means
    )
