"""Figures of plotly as plain data, without a dependency on plotly.

Colors of text, grid and background are the page's own (`page.js` adds them, for light and dark).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import log10
from typing import Any

from phalanx.report import formatting
from phalanx.report.drawing import heatmap, step_breakdown
from phalanx.report.profiled_steps import Facts
from phalanx.spec.formatting import format_bytes, format_perplexity, format_seconds

Figure = dict[str, Any]
HELD_OUT_SYMBOLS = ("diamond", "square", "triangle-up", "cross")
"""Markers of losses on different held-out texts."""
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Colors of runs that are compared (Okabe and Ito)."""
CURVES: tuple[tuple[str, str, str, Figure], ...] = (
    ("loss", "loss", ".4f", {}),
    ("sources", "loss by source", ".4f", {}),
    ("pair_accuracy", "accuracy", ".1%", {"range": [0, 1], "tickformat": ".0%"}),
    ("reward_margin", "margin", ".3g", {}),
    ("learning_rate", "learning rate", ".3g", {"exponentformat": "e", "rangemode": "tozero"}),
    ("grad_norm", "gradient norm", ".3g", {"rangemode": "tozero"}),
    ("gradient_noise_scale", "noise scale", ",.0f", {"rangemode": "tozero"}),
    ("tokens_per_second", "tokens/s", ",.0f", {"rangemode": "tozero"}),
)
"""Plots over steps, from top to bottom: metric, title, format of a value, and fields of the axis."""
LOSSES = ("loss", "sources")
"""The tall plots."""
SOURCE_DASHES = ("solid", "dot", "dash", "longdash", "dashdot")
"""Lines of sources where colors are those of runs."""
LOSS_HEIGHT = 220
CURVE_HEIGHT = 110
"""Pixels of a plot of losses, and of each other one."""
MARK_COLORS = {"restart": "#d62728", "rollback": "#e69f00", "resume": "#7f8c8d", "change": "#8e5bd0"}
"""Colors of the marks of starts (`marks.run_marks`)."""
STEP_PART_COLORS = {
    "compute": "compute",
    "communication": "data_parallel",
    "pipeline": "bubble",
    "data": "waiting",
    "optimizer": "update",
    "unattributed": "send",
}
"""Parts of a rank's step, in the colors of `step_breakdown`."""
MEMORY_COLORS = {
    "parameters": "#4477aa",
    "gradients": "#88ccee",
    "optimizer": "#999933",
    "teacher": "#cc6677",
    "offloaded": "#ddcc77",
    "activations": step_breakdown.COLORS["activations"],
    "communication": step_breakdown.COLORS["buffers"],
}
COLOR_SCALE = [[at / (len(heatmap.COLORS) - 1), color] for at, color in enumerate(heatmap.COLORS)]
ROUND_PART_COLORS = {
    "training": "compute",
    "coding": "update",
    "sending": "send",
    "waiting": "waiting",
    "receiving": "exchange",
}
"""Parts of a round of a swarm, in the same colors."""
SI_BYTES = {"tickformat": ".3~s", "ticksuffix": "B"}
ROW_HEIGHT = 26
AXIS_HEIGHT = 60
"""Pixels of a row of bars, and of the axis below the rows."""
TITLE_ROWS = 1.3
"""Number of rows that the title of a timeline takes."""


def make_figure(data: list[Figure], height: int, **layout: Any) -> Figure:
    """Return a figure of traces; `height` is in pixels, and `layout` has further fields of plotly's layout."""
    shape = {"height": height, "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "hovermode": "closest", "showlegend": False}
    return {"data": data, "layout": shape | layout}


def legend(figure: Figure) -> dict[str, str]:
    """Return the color of each name in a figure, in its order; the page's legend wraps like text."""
    colors = {}
    for trace in figure["data"]:
        if "name" in trace and trace.get("showlegend", True):
            color = trace["marker"]["color"] if "marker" in trace else trace["line"]["color"]
            colors[trace["name"]] = str(color[0] if isinstance(color, list) else color)
    return colors


def make_axis(title: str = "", **more: Any) -> Figure:
    """Return an axis with a title and further fields of plotly."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "fixedrange": True, "zeroline": False} | more


def run_color(index: int, num_runs: int) -> str:
    """Return the color of a run: one of `RUN_COLORS`, or a hue in the order of the runs if there are more."""
    if num_runs <= len(RUN_COLORS):
        return RUN_COLORS[index]
    return f"hsl({round(230 - 280 * index / (num_runs - 1)) % 360},65%,47%)"


def curves(runs: Sequence[Facts], names: Sequence[str]) -> Figure | None:
    """Return plots over the steps of all runs: the loss with held-out losses, and below it further metrics.

    Runs with different tokens per step are drawn over tokens. A single run has marks at its starts. None without a
    step.
    """
    plots = [plot for plot in CURVES if any(plot[0] in facts["curves"] for facts in runs)]
    if not plots:
        return None
    is_single = len(runs) == 1
    tokens_per_step = {facts["run"].get("tokens_per_step") for facts in runs}
    is_over_tokens = len(tokens_per_step) > 1 and all("tokens" in facts["curves"] for facts in runs)
    data: list[Figure] = []
    layout: Figure = {"shapes": []}
    heights = [LOSS_HEIGHT if metric in LOSSES else CURVE_HEIGHT for metric, *_ in plots]
    bottom = sum(heights)
    for number, (metric, title, number_format, axis) in enumerate(plots, 1):
        suffix = str(number) if number > 1 else ""
        top, bottom = bottom, bottom - heights[number - 1]
        layout[f"yaxis{suffix}"] = make_axis(title, domain=[bottom / sum(heights), (top - 18) / sum(heights)], **axis)
        for index, facts in enumerate(runs):
            color = run_color(index, len(runs))
            name = _escape_plotly(names[index])
            traces: list[Figure] = []
            if metric == "sources":
                traces += _build_source_traces(facts, name, is_single, color, f"y{suffix}")
            elif metric in facts["curves"]:
                template = f"step %{{x}}: %{{y:{number_format}}}<extra>{name}</extra>"
                traces.append(
                    _build_line_trace(facts["curves"]["step"], facts["curves"][metric], template)
                    | {"mode": "lines", "line": {"color": color, "width": 2}, "yaxis": f"y{suffix}"}
                    | {"connectgaps": metric == "gradient_noise_scale"}
                    | {"name": "training text" if is_single else name, "showlegend": number == 1}
                )
            if metric == "loss":
                traces += _build_held_out_traces(facts, name, is_single, color)
            data += [_over_tokens(trace, facts["curves"]) for trace in traces] if is_over_tokens else traces
    for mark in runs[0]["curves"]["marks"] if is_single else ():
        place = {"x0": mark["step"] + 0.5, "x1": mark["step"] + 0.5, "y0": 0, "y1": 1, "yref": "paper"}
        line = {"color": MARK_COLORS[mark["kind"]], "width": 1.5, "dash": "dot"}
        layout["shapes"].append({"type": "line", **place, "line": line})
    title = "tokens" if is_over_tokens else "step"
    steps = make_axis(title, anchor=f"y{suffix}", fixedrange=False)
    return make_figure(data, sum(heights) + AXIS_HEIGHT, xaxis=steps, **layout)


def _over_tokens(trace: Figure, curves_of_run: Facts) -> Figure:
    """Return a trace with the tokens of a run until each step in place of the step."""
    steps = curves_of_run["step"]
    tokens = [0, *curves_of_run["tokens"]]
    template = trace["hovertemplate"].replace("step %{x}", "%{x:,} tokens")
    return trace | {"x": [tokens[bisect_right(steps, step)] for step in trace["x"]], "hovertemplate": template}


def _build_held_out_traces(facts: Facts, name: str, is_single: bool, run_color: str) -> Iterator[Figure]:
    """Yield the losses on each held-out text as markers."""
    for number, held_out in enumerate(facts["curves"]["held_out"], 1):
        steps, losses = map(list, zip(*held_out["loss"], strict=True))
        text = "held-out text (validation)"
        if len(facts["curves"]["held_out"]) > 1:
            text = f"held-out text {number} ({formatting.format_tokens(held_out['held_out_tokens'])})"
        template = f"step %{{x}}: %{{y:.4f}}, perplexity %{{customdata}}<extra>{name}, {text}</extra>"
        symbol = HELD_OUT_SYMBOLS[(number - 1) % len(HELD_OUT_SYMBOLS)]
        color = RUN_COLORS[number % len(RUN_COLORS)] if is_single else run_color
        yield _build_line_trace(steps, losses, template) | {
            "mode": "markers",
            "marker": {"color": color, "size": 8, "symbol": symbol},
            "customdata": [format_perplexity(loss) for loss in losses],
            "name": text,
            "showlegend": is_single,
        }


def _build_source_traces(
    facts: Facts, run_name: str, is_single: bool, color_of_run: str, axis: str
) -> Iterator[Figure]:
    """Yield the losses of each source of a mixture: lines in training, markers on held-out text."""
    sources = facts["curves"].get("sources", {})
    for number, (source, curves_of_source) in enumerate(sources.items()):
        name = _escape_plotly(source)
        # The first two colors are those of all text.
        color = run_color(number + 2, len(sources) + 2) if is_single else color_of_run
        for field, text in (("loss", "training"), ("held_out_loss", "held out")):
            if not curves_of_source[field]:
                continue
            steps, losses = map(list, zip(*curves_of_source[field], strict=True))
            template = f"step %{{x}}: %{{y:.4f}}<extra>{'' if is_single else f'{run_name}, '}{name}, {text}</extra>"
            dash = "solid" if is_single else SOURCE_DASHES[number % len(SOURCE_DASHES)]
            marker = {"color": color, "size": 7, "symbol": HELD_OUT_SYMBOLS[number % len(HELD_OUT_SYMBOLS)]}
            style = {"mode": "markers", "marker": marker}
            if field == "loss":
                style = {"mode": "lines", "line": {"color": color, "width": 1.5, "dash": dash}}
            yield _build_line_trace(steps, losses, template) | {
                **style,
                "yaxis": axis,
                "name": name,
                "showlegend": is_single,
            }


def _build_line_trace(x: list[Any], y: list[Any], template: str) -> Figure:
    return {"type": "scatter", "x": x, "y": y, "hovertemplate": template}


def ranks(facts: Facts) -> Figure | None:
    """Return the time of each rank's step, a bar each in seconds."""
    rank_facts = facts["ranks"]
    if not rank_facts:
        return None
    names = [f"rank {rank['rank']}" for rank in rank_facts] if len(rank_facts) > 1 else [""]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [rank[part] for rank in rank_facts],
            "name": formatting.DISPLAY_NAMES.get(part, part),
            "marker": {"color": step_breakdown.COLORS[color]},
            "customdata": [format_seconds(max(0.0, rank[part])) for rank in rank_facts],
            "hovertemplate": "%{y}: %{customdata}",
        }
        for part, color in STEP_PART_COLORS.items()
        if any(rank[part] > 0 for rank in rank_facts)
    ]
    return make_figure(
        data,
        AXIS_HEIGHT + ROW_HEIGHT * max(2, len(names)),
        barmode="stack",
        bargap=0.25,
        xaxis=make_axis("seconds", rangemode="tozero"),
        yaxis=make_axis(autorange="reversed"),
    )


def rounds(facts: Facts) -> Figure | None:
    """Return the rounds of a swarm.

    For a node: the seconds of each round by part, above its bytes. For a coordinator: the received bytes by node.
    """
    swarm = facts.get("swarm")
    if swarm is None or not (swarm["rounds"] or swarm["updates"]):
        return None
    node_rounds = swarm["rounds"]
    updates = swarm["updates"]
    if updates:
        names = sorted({name for row in updates for name in row["bytes"]})
        sent = {_escape_plotly(name): [row["bytes"].get(name, 0) for row in updates] for name in names}
        data = list(_build_stacked_bars([row["round"] for row in updates], sent, {}, unit="B"))
        return make_figure(
            data, 260, barmode="stack", bargap=0.25, xaxis=make_axis("round"), yaxis=make_axis("bytes", **SI_BYTES)
        )
    data = list(_build_stacked_bars(node_rounds["round"], node_rounds["seconds"], ROUND_PART_COLORS, unit="s"))
    for direction, kind in (("sent", "sending"), ("received", "receiving")):
        values = node_rounds["bytes"][direction]
        template = f"round %{{x}}: %{{customdata}}<extra>{direction}</extra>"
        style = {
            "mode": "lines",
            "line": {"color": step_breakdown.COLORS[ROUND_PART_COLORS[kind]], "width": 2},
            "showlegend": False,
            "customdata": [format_bytes(value) for value in values],
            "yaxis": "y2",
            "name": direction,
        }
        data.append(_build_line_trace(node_rounds["round"], values, template) | style)
    return make_figure(
        data,
        420,
        barmode="stack",
        bargap=0.25,
        xaxis=make_axis("round", anchor="y2"),
        yaxis=make_axis("seconds", domain=[0.45, 1]),
        yaxis2=make_axis("bytes", domain=[0, 0.38], rangemode="tozero", **SI_BYTES),
    )


def _build_stacked_bars(x: list[int], parts: Facts, colors: dict[str, str], unit: str) -> Iterator[Figure]:
    """Yield a bar for each round with its parts, without parts that are zero in every round."""
    nonzero_parts = {name: values for name, values in parts.items() if any(values)}
    for index, (name, values) in enumerate(nonzero_parts.items()):
        color = step_breakdown.COLORS[colors[name]] if colors else RUN_COLORS[index % len(RUN_COLORS)]
        yield {
            "type": "bar",
            "x": x,
            "y": values,
            "name": name,
            "marker": {"color": color},
            "customdata": [formatting.format_number(value, unit) for value in values],
            "hovertemplate": "round %{x}: %{customdata}",
        }


def memory(facts: Facts) -> Figure | None:
    """Return the memory of a rank over a step with memory samples, by part."""
    samples = facts["memory"]
    if not samples:
        return None
    default_color = step_breakdown.COLORS["waiting"]
    data = [
        _build_line_trace(samples["seconds"], part_bytes, f"%{{customdata}}<extra>{_escape_plotly(part)}</extra>")
        | {
            "name": _escape_plotly(part),
            "stackgroup": "held",
            "mode": "lines",
            "line": {"width": 0.5, "shape": "hv"},
            "fillcolor": MEMORY_COLORS.get(part, default_color),
            "marker": {"color": MEMORY_COLORS.get(part, default_color)},
            "customdata": [format_bytes(value) for value in part_bytes],
        }
        for part, part_bytes in samples["bytes"].items()
        if any(part_bytes)
    ]
    return make_figure(data, 320, xaxis=make_axis("seconds"), yaxis=make_axis("bytes", rangemode="tozero", **SI_BYTES))


def traffic(facts: Facts) -> Figure | None:
    """Return the bytes of a step from each rank to each."""
    matrix = facts["traffic"]
    if not matrix or not any(map(any, matrix["bytes"])):
        return None
    sent = [value for row in matrix["bytes"] for value in row if value]
    low = log10(min(sent))
    high = log10(max(sent))
    steps = [low + (high - low) * index / 4 for index in range(5)] if high > low else [high]
    bar = {"tickmode": "array", "tickvals": steps, "ticktext": [format_bytes(10**step) for step in steps]}
    log_bytes = [[log10(value) if value else None for value in row] for row in matrix["bytes"]]
    texts = [[format_bytes(value) for value in row] for row in matrix["bytes"]]
    cells = _build_heatmap_trace(log_bytes, texts, "rank %{y} to rank %{x}: %{customdata}") | {
        "colorbar": _make_color_bar() | bar
    }
    if high == low:
        cells |= {"zmin": low - 1, "zmax": low}
    count = len(log_bytes)
    side = max(140, min(480, 48 * count))
    return {"widest": side + 170} | make_figure(
        [cells],
        side + 60,
        xaxis=make_axis("to rank", **_make_integer_ticks(count)),
        yaxis=make_axis("from rank", autorange="reversed", **_make_integer_ticks(count)),
    )


def experts(facts: Facts) -> Figure | None:
    """Return the load of each expert as a multiple of its fair share of a layer's tokens."""
    loads = facts["experts"]
    if not loads or not loads["tokens"]:
        return None
    tokens = loads["tokens"]
    shares = [[value * len(layer) / (sum(layer) or 1) for value in layer] for layer in tokens]
    cells = _build_heatmap_trace(shares, tokens, "layer %{y}, expert %{x}: %{customdata:,} tokens, %{z:.2f}x its share")
    cells |= {
        "colorbar": _make_color_bar() | {"ticksuffix": "x"},
        "y": [str(layer) for layer in loads["layers"]],
        "zmin": 0,
    }
    if len(tokens[0]) <= 16 and len(tokens) <= 32:
        cells |= {"texttemplate": "%{z:.2f}"}
    return make_figure(
        [cells],
        AXIS_HEIGHT + max(90, ROW_HEIGHT * len(tokens)),
        xaxis=make_axis("expert", **_make_integer_ticks(len(tokens[0]))),
        yaxis=make_axis("layer", autorange="reversed", type="category"),
    )


def _build_heatmap_trace(values: list[list[Any]], labels: list[list[Any]], hover_template: str) -> Figure:
    return {
        "type": "heatmap",
        "z": values,
        "customdata": labels,
        "colorscale": COLOR_SCALE,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": f"{hover_template}<extra></extra>",
    }


def _make_color_bar() -> Figure:
    return {"thickness": 12, "outlinewidth": 0, "len": 1}


def _make_integer_ticks(count: int) -> Figure:
    """Return ticks at integers."""
    return {"tickmode": "array", "tickvals": list(heatmap.axis_ticks(count, 0)), "showgrid": False}


def _escape_plotly(text: str) -> str:
    """Return text without plotly's markup: some tags, and %{...} in templates."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")
