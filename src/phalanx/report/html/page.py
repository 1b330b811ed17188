"""A page of runs that needs nothing but itself: facts in words, tables and figures, side by side for several runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from phalanx.report import formatting
from phalanx.report.html import figures, timeline_figures
from phalanx.report.html.figures import Figure
from phalanx.report.profiled_steps import Facts
from phalanx.spec.formatting import WRITTEN_BY, format_bytes, format_ratio, format_seconds

TILES = {"step": "step", "tokens_per_second": "tokens per second", "mfu": "MFU", "goodput": "goodput"}
PLOTLY = "plotly-cartesian.min.js"
"""plotly.js 4.1.1 without maps and 3-D: npm's plotly.js-cartesian-dist-min, MIT license."""
PROFILE_HINT = "train with --profile-steps FIRST:LAST"
FIGURE_SECTIONS: dict[str, tuple[str, Callable[[Facts], Figure | None], str]] = {
    "ranks": ("Where each rank's step went", figures.ranks, "Too few steps were noted to say where their time goes."),
    "timeline": ("The passes of a step", timeline_figures.passes, f"No step was looked at closely: {PROFILE_HINT}."),
    "rounds": ("The rounds of the swarm", figures.rounds, ""),
    "memory": ("What memory held over a step", figures.memory, f"No step was metered: {PROFILE_HINT}."),
    "traffic": ("Who sends how much to whom", figures.traffic, ""),
    "experts": ("How much each expert is chosen", figures.experts, ""),
}
"""Sections of a figure for each run: title, figure, and what is said where there is none; without words it is left
out."""


def page(report: Facts, every_seconds: float | None = None) -> str:
    """HTML of one or several runs (`compare.report_data`); with `every_seconds` a live one, which asks for `main.html`
    where it came from so often."""
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
    """The page without what draws it: all that changes while a run goes on."""
    runs = report["runs"]
    comparison = report["comparison"]
    names = comparison["names"] if comparison else [runs[0]["run"]["name"]]
    figures_by_id: dict[str, Figure] = {}
    parts = [_header(facts, name) for facts, name in zip(runs, names, strict=True)]
    parts = [_run_columns(parts)]
    if comparison:
        parts.append(_comparison(comparison))
    parts.append(_section("", names, [_verdict(facts) for facts in runs]))
    parts.append(_section("Predicted beside measured", names, [_table(facts) for facts in runs]))
    parts += [_figure_section(section, runs, names, figures_by_id=figures_by_id) for section in ("ranks", "timeline")]
    curves = figures.curves(runs, names)
    if curves:
        figures_by_id["curves"] = curves
        held_out = '<p class="quiet">Diamonds are held-out text.</p>' if comparison else ""
        parts.append(f"<section><h2>Loss and speed</h2>{held_out}{_figure_slot('curves', curves)}</section>")
    parts += [
        _figure_section(section, runs, names, figures_by_id=figures_by_id)
        for section in ("rounds", "memory", "traffic", "experts")
    ]
    css_class = ' class="several"' if comparison else ""
    scripts = f"{_json_script('facts', report)}\n{_json_script('figures', figures_by_id)}"
    return f"<main{css_class}>\n{''.join(parts)}\n{scripts}\n</main>"


def _json_script(name: str, value: Any) -> str:
    """Data in the page; no text in it can end its element."""
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _figure_slot(name: str, figure: Figure) -> str:
    """Where a figure is drawn, below its legend."""
    colours = "".join(
        f'<li><span style="background:{colour}"></span>{label}</li>' for label, colour in figures.legend(figure).items()
    )  # their names are escaped already, for plotly
    legend_list = f'<ul class="legend">{colours}</ul>' if colours else ""
    max_width = f";max-width:{figure['widest']}px" if "widest" in figure else ""
    return (
        f'{legend_list}<div class="figure" id="{name}" style="height:{figure["layout"]["height"]}px{max_width}"></div>'
    )


def _run_columns(cells: Sequence[str]) -> str:
    return f'<div class="runs">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'


def _section(title: str, names: Sequence[str], cells: Sequence[str]) -> str:
    """The same of every run; with its name where there are several."""
    if len(cells) > 1:
        cells = [f"<h3>{escape(name)}</h3>{cell}" for name, cell in zip(names, cells, strict=True)]
    heading = f"<h2>{title}</h2>" if title else ""
    return f"<section>{heading}{_run_columns(cells)}</section>\n"


def _figure_section(section: str, runs: Sequence[Facts], names: Sequence[str], figures_by_id: dict[str, Figure]) -> str:
    """A section of a figure for each run; they are put in `drawn` by the places that they have in the page."""
    title, make_figure, placeholder = FIGURE_SECTIONS[section]
    run_figures = [make_figure(facts) for facts in runs]
    if not any(run_figures) and (
        not placeholder or all("swarm" in facts for facts in runs)
    ):  # which look at no step closely
        return ""
    cells = []
    for index, (facts, run_figure) in enumerate(zip(runs, run_figures, strict=True)):
        if run_figure is None:
            cells.append(f'<p class="quiet">{placeholder or "Nothing of this is known."}</p>')
            continue
        figures_by_id[f"{section}-{index}"] = run_figure
        note = escape(_figure_note(section, facts))
        cells.append(f'<p class="quiet">{note}</p>{_figure_slot(f"{section}-{index}", run_figure)}')
    return _section(title, names, cells)


def _figure_note(section: str, facts: Facts) -> str:
    """What a reader needs to know of a figure."""
    match section:
        case "ranks":
            return f"Medians of {facts['measures']['steps']} steps."
        case "timeline":
            error = facts["run"]["clock_error_seconds"]
            clocks = f" Clocks of ranks are within {format_seconds(error)} of each other." if error else ""
            simulated = facts["timeline"].get("simulated")
            simulated_note = (
                " Simulated is without sends: what is measured beyond it is sending and waiting." if simulated else ""
            )
            metered_note = ", which took longer for its memory was metered" if facts["timeline"]["metered"] else ""
            return f"Step {facts['timeline']['step']}{metered_note}; numbers are micro-batches.{simulated_note}{clocks}"
        case "memory":
            return (
                f"Step {facts['memory']['step']} on rank {facts['memory']['rank']}, which held most; tensors by part."
            )
        case "traffic":
            bytes_per_axis = [f"{axis} {format_bytes(value)}" for axis, value in facts["traffic"]["axes"].items()]
            return f"Bytes of a step as planned, on a logarithmic scale. By axis: {', '.join(bytes_per_axis)}."
        case "rounds":
            return formatting.ROUND_TABLE_NOTE if facts["swarm"]["rounds"] else "Bytes that nodes told, by node."
        case _:
            return f"Step {facts['experts']['step']}: tokens as a multiple of an even share."


def _header(facts: Facts, name: str) -> str:
    summary = "".join(f"<li>{escape(line)}</li>" for line in formatting.run_summary(facts["run"]))
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in facts["problems"])
    problem_list = f'<ul class="problems">{problems}</ul>' if problems else ""
    return (
        f'<h1>{escape(name)}</h1><ul class="facts">{summary}</ul>{problem_list}<dl class="tiles">{_tiles(facts)}</dl>'
    )


def _tiles(facts: Facts) -> str:
    """The numbers that are looked for first."""
    tiles = []
    for name, title in TILES.items():
        row = formatting.measured_row(facts, name)
        if row and row["measured"] is not None:
            detail = (
                f"predicted {formatting.format_number(row['predicted'], row['unit'])}"
                if row["predicted"] is not None
                else ""
            )
            tiles.append((title, formatting.format_number(row["measured"], row["unit"]), detail))
    loss = formatting.last_value(facts["curves"].get("loss"))
    held_out = facts["curves"]["held_out"]
    if loss is not None:
        tiles.append(("loss", f"{loss:.3f}", f"held out {held_out[-1][1]:.3f}" if held_out and held_out[-1][1] else ""))
    tiles += formatting.round_totals(facts)
    return "".join(
        f"<div><dt>{title}</dt><dd>{value}<small>{detail}</small></dd></div>" for title, value, detail in tiles
    )


def _verdict(facts: Facts) -> str:
    """What costs most, why, and what to change first; then the rest."""
    verdict = facts["verdict"]
    other_findings = facts["findings"][1:]
    if verdict is None and "swarm" in facts:
        return ""
    if verdict is None:
        return '<p class="quiet">There is no verdict: too few steps were noted.</p>'
    items = "".join(f"<li>{_format_finding(finding)}</li>" for finding in other_findings)
    details = (
        f'<details><summary>{len(other_findings)} more</summary><ul class="findings">{items}</ul></details>'
        if other_findings
        else ""
    )
    return (
        f'<div class="verdict"><h2>{escape(formatting.bottleneck_headline(verdict))}</h2>'
        f"<p>{escape(formatting.as_sentence(verdict['evidence']))}</p>"
        f"<p><b>Change first:</b> {escape(verdict['suggestion'])}.</p>{details}</div>"
    )


def _format_finding(finding: Facts) -> str:
    evidence = escape(formatting.as_sentence(finding["evidence"]))
    return (
        f"<b>{escape(formatting.bottleneck_headline(finding))}.</b> {evidence} "
        f"<span class='quiet'>{escape(finding['suggestion'])}.</span>"
    )


def _table(facts: Facts) -> str:
    """A table for each group of rows."""
    if not facts["comparison"]:
        message = "A coordinator trains nothing." if facts["run"].get("leads") else "Nothing was measured yet."
        return f'<p class="quiet">{message}</p>'
    columns = "<th>predicted</th><th>measured</th><th>ratio</th>"
    tables = "".join(
        f"<table><thead><tr><th>{escape(title)}</th>{columns}</tr></thead>"
        f"<tbody>{''.join(map(_row, rows))}</tbody></table>"
        for title, rows in formatting.group_rows(facts["comparison"])
    )
    return f'<div class="comparison">{tables}</div>'


def _row(row: Mapping[str, Any]) -> str:
    predicted, measured = (formatting.format_number(row[name], row["unit"]) for name in ("predicted", "measured"))
    low = row.get("low")
    high = row.get("high")
    band = (
        f"<small>{formatting.format_number(low, row['unit'])} to {formatting.format_number(high, row['unit'])}</small>"
        if low
        else ""
    )
    css_class = ' class="off"' if formatting.is_off(row["ratio"]) else ""
    return (
        f"<tr><td>{escape(formatting.row_label(row))}</td><td>{predicted}{band}</td><td>{measured}</td>"
        f"<td{css_class}>{format_ratio(row['ratio'])}</td></tr>"
    )


def _comparison(comparison: Facts) -> str:
    """What differs, in sentences, and the measures of all runs, with ratios to the first."""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in formatting.format_comparison(comparison))
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison["names"])
    body = "".join(
        f"<tr><td>{escape(formatting.DISPLAY_NAMES.get(row['what'], row['what']))}</td>{_measures(row)}</tr>"
        for row in comparison["rows"]
    )
    table = f'<table class="compared"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f"<section><h2>Side by side</h2>{sentences}{table}</section>\n"


def _measures(row: Facts) -> str:
    cells = [formatting.format_number(value, row["unit"]) for value in row["measured"]]
    ratios = ["", *(f" <small>{format_ratio(ratio)}</small>" for ratio in row["ratio"][1:])]
    return "".join(f"<td>{value}{ratio}</td>" for value, ratio in zip(cells, ratios, strict=True))
