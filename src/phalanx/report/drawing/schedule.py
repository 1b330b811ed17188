"""Timelines of pipeline schedules: text for terminals, pictures, and traces for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from phalanx.schedule.action_spans import ActionSpan, spans_of_step
from phalanx.schedule.schedule import actions
from phalanx.schedule.simulate import Time, Timeline
from phalanx.spec.extras import missing_package
from phalanx.spec.formatting import WRITTEN_BY

COLORS = {
    "F": ("#4c78c8", "#86a8e0"),
    "B": ("#2f9e8f", "#7cc8bd"),
    "I": ("#3f9b4f", "#88c893"),
    "W": ("#d98a2b", "#ecbc7f"),
}
"""Colors of each kind of action: of a rank's first stage, and of its other stages."""
LEGEND = {"F": "forward", "B": "backward", "I": "backward, input half", "W": "backward, weight half"}


def executed_spans(timeline: Timeline) -> Iterator[tuple[int, ActionSpan]]:
    """Yield the computations of each rank."""
    for rank, spans in enumerate(timeline.spans):
        for step, start, end in spans:
            for span in spans_of_step(step, start, end):
                yield rank, span


def kinds(timeline: Timeline) -> list[str]:
    """Return the kinds of actions in a timeline, in the legend's order."""
    used_kinds = {span.action.kind for _, span in executed_spans(timeline)}
    return [kind for kind in LEGEND if kind in used_kinds]


def shades(timeline: Timeline) -> dict[int, int]:
    """Return the shade of each stage: 0 for the first stage of a rank, 1 for its others."""
    first_stages = [min(action.stage for span in spans for action in actions(span.step)) for spans in timeline.spans]
    stages = ((rank, span.action.stage) for rank, span in executed_spans(timeline))
    return {stage: int(stage != first_stages[rank]) for rank, stage in stages}


def lines(timeline: Timeline, width: int) -> list[Text]:
    """Return a line per rank of at most `width` characters, colored by kind.

    An action is shown as letter and micro-batch if there is space, else as letter.
    """
    scale = min(4.0, (width - 1) / float(timeline.makespan))
    shade = shades(timeline)
    rows = [[(" ", "")] * (round(float(timeline.makespan) * scale)) for _ in timeline.spans]
    for rank, span in executed_spans(timeline):
        action = span.action
        start_column = round(span.start * scale)
        end_column = round(span.end * scale)
        columns = end_column - start_column
        label = f"{action.kind}{action.micro}"
        cell_text = (label if len(label) <= columns else action.kind)[:columns].ljust(columns)
        style = f"black on {COLORS[action.kind][shade[action.stage]]}"
        rows[rank][start_column:end_column] = [(character, style) for character in cell_text]
    return [Text.assemble(*row, no_wrap=True) for row in rows]


def chrome_trace(timeline: Timeline, microseconds: Time = 1000) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format of chrome://tracing and ui.perfetto.dev.

    `microseconds` is the length of its time unit.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(len(timeline.spans))
    ]
    unit = float(microseconds)
    for rank, span in executed_spans(timeline):
        action = span.action
        event = {"ph": "X", "name": str(action), "cat": LEGEND[action.kind], "pid": rank, "tid": action.stage}
        args = {"stage": action.stage, "micro_batch": action.micro}
        events.append({**event, "ts": span.start * unit, "dur": span.seconds * unit, "args": args})
    return {"comment": WRITTEN_BY, "traceEvents": events, "displayTimeUnit": "ms"}


def draw(timeline: Timeline, title: str, file: Path) -> None:
    """Write a picture in the format of the file's suffix: .svg or .png.

    Raises UserError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise missing_package("--out", str(file), "matplotlib", instead="use .json for Perfetto") from None
    makespan = float(timeline.makespan)
    ranks = len(timeline.spans)
    shade = shades(timeline)
    figure = Figure(figsize=(min(24.0, 2 + makespan * 0.28), 1.2 + 0.45 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, span in executed_spans(timeline):
        action = span.action
        color = COLORS[action.kind][shade[action.stage]]
        axes.barh(rank, span.seconds, left=span.start, height=0.86, color=color, edgecolor="white", linewidth=0.6)
        middle = (span.start + span.end) / 2
        axes.text(middle, rank, str(action.micro), ha="center", va="center", fontsize=7, color="white")
    axes.set(title=title, xlabel="time", xlim=(0, makespan), ylim=(ranks - 0.5, -0.5), yticks=range(ranks))
    axes.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=COLORS[kind][0], label=LEGEND[kind]) for kind in kinds(timeline)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(file, dpi=150, metadata={"Creator" if file.suffix == ".svg" else "Software": WRITTEN_BY})
