"""Figures of the passes of a step: planned, simulated and measured timelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.report.drawing import schedule
from phalanx.report.html.figures import AXIS_HEIGHT, ROW_HEIGHT, TITLE_ROWS, Figure, make_axis, make_figure
from phalanx.report.profiled_steps import Facts
from phalanx.spec.formatting import format_seconds

TIMELINES = {
    "planned": "planned, by pipeline rank",
    "simulated": "simulated with measured times, by pipeline rank",
    "measured": "measured, by rank",
}
MAX_LABELED_PASSES = 400
"""Maximum number of passes in a timeline that are labeled with their micro-batch."""


def passes(facts: Facts) -> Figure | None:
    """Return the passes of one step: planned, simulated with measured times, and measured."""
    timeline = facts["timeline"]
    if not timeline or not timeline["measured"]:
        return None
    timelines = {title: timeline[name] for name, title in TIMELINES.items() if timeline.get(name)}
    rows = {title: sorted({span[0] for span in spans}) for title, spans in timelines.items()}
    num_rows = sum(map(len, rows.values())) + TITLE_ROWS * len(rows)
    top = 1.0
    data: list[Figure] = []
    layout: Figure = {"annotations": []}
    for index, (title, spans) in enumerate(timelines.items(), 1):
        axis = str(index) if index > 1 else ""
        top -= TITLE_ROWS / num_rows
        position = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
        layout["annotations"].append({"text": title, **position, "showarrow": False})
        domain = [max(0.0, top - len(rows[title]) / num_rows), top]
        layout[f"yaxis{axis}"] = make_axis(domain=domain, autorange="reversed", tickmode="array", tickvals=rows[title])
        data += _build_pass_traces(spans, f"y{axis}")
        top = domain[0]
    seconds = make_axis("seconds", anchor=f"y{axis}", fixedrange=False, rangemode="tozero")
    return make_figure(
        data,
        AXIS_HEIGHT + round(ROW_HEIGHT * num_rows),
        xaxis=seconds,
        bargap=0.15,
        barmode="overlay",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 9},
        **layout,
    )


def _build_pass_traces(spans: Sequence[Sequence[Any]], axis: str) -> Iterator[Figure]:
    """Yield a trace for each kind of pass."""
    first_stage: dict[int, int] = {}
    for rank, _, stage, *_ in spans:
        first_stage[rank] = min(stage, first_stage.get(rank, stage))
    for kind, label in schedule.LEGEND.items():
        kind_spans = [span for span in spans if span[1] == kind]
        kind_spans.sort(key=lambda span: span[2] != first_stage[span[0]])
        if not kind_spans:
            continue
        colors = [schedule.COLORS[kind][int(stage != first_stage[rank])] for rank, _, stage, *_ in kind_spans]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "yaxis": axis,
            "y": [rank for rank, *_ in kind_spans],
            "base": [start for *_, start, _ in kind_spans],
            "x": [end - start for *_, start, end in kind_spans],
            "marker": {"color": colors},
            "text": [str(micro) for _, _, _, micro, *_ in kind_spans] if len(spans) <= MAX_LABELED_PASSES else None,
            "textposition": "inside",
            "textangle": 0,
            "insidetextanchor": "middle",
            "customdata": [[stage, micro, format_seconds(end - start)] for *_, stage, micro, start, end in kind_spans],
            "hovertemplate": f"{label}, stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}: "
            "%{customdata[2]}<extra></extra>",
        }
