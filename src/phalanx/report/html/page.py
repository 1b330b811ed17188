"""Self-contained HTML page on runs: text, tables and figures, side by side for several runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from phalanx.report import formatting, gpu_samples
from phalanx.report.gpu_profile import facts as gpu_profile
from phalanx.report.html import figures, timeline_figures
from phalanx.report.html.figures import Figure
from phalanx.report.profiled_steps import Facts
from phalanx.spec.formatting import WRITTEN_BY, format_bytes, format_ratio, format_seconds

TILES = {
    "step": "step",
    "tokens_per_second": "tokens per second",
    "targets_per_second": "targets per second",
    "mfu": "MFU",
    "goodput": "goodput",
}
PLOTLY = "plotly-cartesian.min.js"
"""plotly.js 4.1.1 without maps and 3-D: npm's plotly.js-cartesian-dist-min, MIT license."""
PROFILE_HINT = "train with --profile-steps FIRST:LAST"
FIGURE_SECTIONS: dict[str, tuple[str, Callable[[Facts], Figure | None], str]] = {
    "ranks": ("Time of each rank's step", figures.ranks, "Too few steps were recorded for a time breakdown."),
    "timeline": ("Passes of a step", timeline_figures.passes, f"No step was profiled: {PROFILE_HINT}."),
    "rounds": ("Rounds of the swarm", figures.rounds, ""),
    "memory": ("Memory over a step", figures.memory, f"No step has memory samples: {PROFILE_HINT}."),
    "traffic": ("Traffic between ranks", figures.traffic, ""),
    "experts": ("Load of the experts", figures.experts, ""),
}
"""Sections with a figure for each run: title, figure, and a placeholder without a figure.

A section without figures and placeholder is omitted.
"""


def page(report: Facts, every_seconds: float | None = None) -> str:
    """Return the HTML page of one or several runs, whose facts are `report` (`compare_runs.report_data`).

    `every_seconds` is the interval at which a live page requests `main.html` from its server; None for a static
    page.
    """
    folder = Path(__file__).parent
    css, plotly, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", PLOTLY, "page.js"))
    names = ", ".join(facts["run"]["name"] for facts in report["runs"])
    live = f' data-every="{every_seconds:g}"' if every_seconds else ""
    state = '<p class="quiet" id="state">live</p>\n' if every_seconds else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><!-- {WRITTEN_BY} --><meta charset="utf-8">\n'
        '<link rel="icon" href="data:,">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(names)} - Phalanx</title>\n<style>\n{css}</style></head>\n"
        f"<body{live}>\n{state}{main(report)}\n<script>{plotly}</script>\n"
        f"<script>\n{script}</script></body></html>\n"
    )


def main(report: Facts) -> str:
    """Return the part of the page that changes while a run is active, without scripts that draw it."""
    runs = report["runs"]
    comparison = report["comparison"]
    names = comparison["names"] if comparison else [runs[0]["run"]["name"]]
    figures_by_id: dict[str, Figure] = {}
    parts = [_render_run_columns([_render_header(facts, name) for facts, name in zip(runs, names, strict=True)])]
    if comparison:
        parts.append(_render_run_comparison(comparison))
    parts.append(_render_section("", names, [_render_verdict(facts) for facts in runs]))
    parts.append(_render_section("Predicted and measured", names, [_render_comparison_tables(facts) for facts in runs]))
    parts += [_render_figure_section(section, runs, names, figures_by_id) for section in ("ranks", "timeline")]
    if any(facts["gpu"] for facts in runs):
        parts.append(_render_section("Step on the GPU", names, [_render_gpu_step(facts["gpu"]) for facts in runs]))
    if any(facts["gpu_samples"] for facts in runs):
        parts.append(
            _render_section("GPUs during the run", names, [_render_gpu_samples(facts["gpu_samples"]) for facts in runs])
        )
    curves = figures.curves(runs, names)
    if curves:
        figures_by_id["curves"] = curves
        held_out = '<p class="quiet">Markers are held-out text.</p>' if comparison else ""
        parts.append(f"<section><h2>Loss and speed</h2>{held_out}{_render_figure_slot('curves', curves)}</section>")
    parts += [
        _render_figure_section(section, runs, names, figures_by_id)
        for section in ("rounds", "memory", "traffic", "experts")
    ]
    css_class = ' class="several"' if comparison else ""
    scripts = f"{_render_json_script('facts', report)}\n{_render_json_script('figures', figures_by_id)}"
    return f"<main{css_class}>\n{''.join(parts)}\n{scripts}\n</main>"


def _render_json_script(name: str, value: Any) -> str:
    """Return data as a script element of the page; no text in the data can end the element."""
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _render_figure_slot(name: str, figure: Figure) -> str:
    """Return the element for a figure, below its legend."""
    # The names are already escaped for plotly.
    colors = "".join(
        f'<li><span style="background:{color}"></span>{label}</li>' for label, color in figures.legend(figure).items()
    )
    legend_list = f'<ul class="legend">{colors}</ul>' if colors else ""
    max_width = f";max-width:{figure['widest']}px" if "widest" in figure else ""
    return (
        f'{legend_list}<div class="figure" id="{name}" style="height:{figure["layout"]["height"]}px{max_width}"></div>'
    )


def _render_run_columns(cells: Sequence[str]) -> str:
    return f'<div class="runs">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'


def _render_section(title: str, names: Sequence[str], cells: Sequence[str]) -> str:
    """Return a section with a cell for each run, with the runs' names if there are several."""
    if len(cells) > 1:
        cells = [f"<h3>{escape(name)}</h3>{cell}" for name, cell in zip(names, cells, strict=True)]
    heading = f"<h2>{title}</h2>" if title else ""
    return f"<section>{heading}{_render_run_columns(cells)}</section>\n"


def _render_figure_section(
    section: str, runs: Sequence[Facts], names: Sequence[str], figures_by_id: dict[str, Figure]
) -> str:
    """Return a section with a figure for each run; figures are added to `figures_by_id` by element id."""
    title, make_figure, placeholder = FIGURE_SECTIONS[section]
    run_figures = [make_figure(facts) for facts in runs]
    if not any(run_figures) and (not placeholder or all("swarm" in facts for facts in runs)):  # swarms profile no steps
        return ""
    cells = []
    for index, (facts, run_figure) in enumerate(zip(runs, run_figures, strict=True)):
        if run_figure is None:
            cells.append(f'<p class="quiet">{placeholder or "No data."}</p>')
            continue
        figures_by_id[f"{section}-{index}"] = run_figure
        note = escape(_describe_figure(section, facts))
        cells.append(f'<p class="quiet">{note}</p>{_render_figure_slot(f"{section}-{index}", run_figure)}')
    return _render_section(title, names, cells)


def _describe_figure(section: str, facts: Facts) -> str:
    """Return the explanation of a figure."""
    match section:
        case "ranks":
            return f"Medians of {facts['measures']['steps']} steps."
        case "timeline":
            error = facts["run"]["clock_error_seconds"]
            clocks = f" Clocks of ranks are within {format_seconds(error)} of each other." if error else ""
            simulated_note = ""
            if facts["timeline"].get("simulated"):
                simulated_note = (
                    " The simulation excludes sends, so the measured step also contains sends and waits for them."
                )
            metered_note = ", which took longer because of its memory samples" if facts["timeline"]["metered"] else ""
            return f"Step {facts['timeline']['step']}{metered_note}; numbers are micro-batches.{simulated_note}{clocks}"
        case "memory":
            return (
                f"Step {facts['memory']['step']} on rank {facts['memory']['rank']}, which had the highest peak; "
                "tensors by part."
            )
        case "traffic":
            bytes_per_axis = [f"{axis} {format_bytes(value)}" for axis, value in facts["traffic"]["axes"].items()]
            return f"Planned bytes of a step, on a logarithmic scale. By axis: {', '.join(bytes_per_axis)}."
        case "rounds":
            return formatting.ROUND_TABLE_NOTE if facts["swarm"]["rounds"] else "Bytes that nodes sent, by node."
        case _:
            return f"Step {facts['experts']['step']}: tokens of each expert as a multiple of an even share."


def _render_header(facts: Facts, name: str) -> str:
    summary = "".join(f"<li>{escape(line)}</li>" for line in formatting.run_summary(facts["run"]))
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in facts["problems"])
    problem_list = f'<ul class="problems">{problems}</ul>' if problems else ""
    tiles = f'<dl class="tiles">{_render_tiles(facts)}</dl>'
    return f'<h1>{escape(name)}</h1><ul class="facts">{summary}</ul>{problem_list}{tiles}'


def _render_tiles(facts: Facts) -> str:
    """Return the most important numbers; the held-out loss has its tokens if the run evaluated several texts."""
    tiles = []
    for name, title in TILES.items():
        row = formatting.measured_row(facts, name)
        if row and row["measured"] is not None:
            predicted = formatting.format_number(row["predicted"], row["unit"])
            detail = f"predicted {predicted}" if row["predicted"] is not None else ""
            tiles.append((title, formatting.format_number(row["measured"], row["unit"]), detail))
    loss = formatting.last_value(facts["curves"].get("loss"))
    if loss is not None:
        held_out = facts["curves"]["held_out"]
        held_out_loss = held_out[-1]["loss"][-1][1] if held_out else None
        text = f" over {formatting.format_tokens(held_out[-1]['held_out_tokens'])}" if len(held_out) > 1 else ""
        detail = "" if held_out_loss is None else f"held out {held_out_loss:.3f}{text}"
        tiles.append(("loss", f"{loss:.3f}", detail))
    tiles += formatting.round_totals(facts)
    return "".join(
        f"<div><dt>{title}</dt><dd>{value}<small>{detail}</small></dd></div>" for title, value, detail in tiles
    )


def _render_verdict(facts: Facts) -> str:
    """Return the main bottleneck with its reason and the first change to try, then the others."""
    verdict = facts["verdict"]
    if verdict is None and "swarm" in facts:
        return ""
    if verdict is None:
        return '<p class="quiet">No verdict is possible: too few steps were recorded.</p>'
    items = [
        f"<li><b>{escape(formatting.bottleneck_headline(finding))}.</b> "
        f"{escape(formatting.as_sentence(finding['evidence']))} "
        f"<span class='quiet'>{escape(finding['suggestion'])}.</span></li>"
        for finding in facts["findings"][1:]
    ]
    details = ""
    if items:
        details = f'<details><summary>{len(items)} more</summary><ul class="findings">{"".join(items)}</ul></details>'
    return (
        f'<div class="verdict"><h2>{escape(formatting.bottleneck_headline(verdict))}</h2>'
        f"<p>{escape(formatting.as_sentence(verdict['evidence']))}</p>"
        f"<p><b>First change to try:</b> {escape(verdict['suggestion'])}.</p>{details}</div>"
    )


def _render_comparison_tables(facts: Facts) -> str:
    """Return a table for each group of rows."""
    if not facts["comparison"]:
        message = "A coordinator does not train." if facts["run"].get("leads") else "Nothing was measured yet."
        return f'<p class="quiet">{message}</p>'
    columns = "<th>predicted</th><th>measured</th><th>ratio</th>"
    tables = "".join(
        f"<table><thead><tr><th>{escape(title)}</th>{columns}</tr></thead>"
        f"<tbody>{''.join(map(_render_comparison_row, rows))}</tbody></table>"
        for title, rows in formatting.group_rows(facts["comparison"])
    )
    return f'<div class="comparison">{tables}</div>'


def _render_comparison_row(row: Mapping[str, Any]) -> str:
    predicted, measured, low, high = (
        formatting.format_number(row.get(name), row["unit"]) for name in ("predicted", "measured", "low", "high")
    )
    band = f"<small>{low} to {high}</small>" if row.get("low") else ""
    css_class = ' class="off"' if formatting.is_off(row["ratio"]) else ""
    return (
        f"<tr><td>{escape(formatting.row_label(row))}</td><td>{predicted}{band}</td><td>{measured}</td>"
        f"<td{css_class}>{format_ratio(row['ratio'])}</td></tr>"
    )


def _render_gpu_step(gpu: Facts | None) -> str:
    """Return the table of the GPUs' times in a profiled step."""
    if gpu is None:
        return f'<p class="quiet">No step was profiled on a GPU: {PROFILE_HINT}.</p>'
    note = escape(f"{formatting.as_sentence(gpu_profile.table_title(gpu))} {gpu_profile.TABLE_NOTE}")
    return f'<p class="quiet">{note}</p>{_render_gpu_table(gpu_profile.table_rows(gpu))}'


def _render_gpu_samples(samples: Facts | None) -> str:
    """Return what the sensors of the GPUs showed during the run."""
    if samples is None:
        return '<p class="quiet">No sensors were recorded.</p>'
    lines = "".join(f"<p>{escape(formatting.as_sentence(line))}</p>" for line in gpu_samples.summary_lines(samples))
    title = escape(formatting.as_sentence(gpu_samples.table_title(samples)))
    return f'{lines}<p class="quiet">{title}</p>{_render_gpu_table(gpu_samples.table_rows(samples))}'


def _render_gpu_table(rows: Sequence[Sequence[str]]) -> str:
    header, *rows = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="comparison"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _render_run_comparison(comparison: Facts) -> str:
    """Return the differences between runs in sentences, and the measures of all runs with ratios."""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in formatting.format_comparison(comparison))
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison["names"])
    labels = [formatting.DISPLAY_NAMES.get(row["quantity"], row["quantity"]) for row in comparison["rows"]]
    body = "".join(
        f"<tr><td>{escape(label)}</td>{_render_measures(row)}</tr>"
        for label, row in zip(labels, comparison["rows"], strict=True)
    )
    table = f'<table class="compared"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f"<section><h2>Side by side</h2>{sentences}{table}</section>\n"


def _render_measures(row: Facts) -> str:
    cells = [formatting.format_number(value, row["unit"]) for value in row["measured"]]
    ratios = ["", *(f" <small>{format_ratio(ratio)}</small>" for ratio in row["ratio"][1:])]
    return "".join(f"<td>{value}{ratio}</td>" for value, ratio in zip(cells, ratios, strict=True))
