"""A page of runs that needs nothing but itself: facts in words, tables and figures, side by side for several runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from phalanx.report import formatting
from phalanx.report.html import figures
from phalanx.report.html.figures import Figure
from phalanx.report.profiled_steps import Facts
from phalanx.spec.formatting import format_bytes, format_seconds

TILES = {"step": "step", "tokens_per_second": "tokens per second", "mfu": "MFU", "goodput": "goodput"}
TRACE = "train with --profile-steps FIRST:LAST"
DRAWN: dict[str, tuple[str, Callable[[Facts], Figure | None], str]] = {
    "ranks": ("Where each rank's step went", figures.ranks, "Too few steps were noted to say where their time goes."),
    "timeline": ("The passes of a step", figures.passes, f"No step was looked at closely: {TRACE}."),
    "rounds": ("The rounds of the swarm", figures.rounds, ""),
    "memory": ("What memory held over a step", figures.memory, f"No step was metered: {TRACE}."),
    "traffic": ("Who sends how much to whom", figures.traffic, ""),
    "experts": ("How much each expert is chosen", figures.experts, ""),
}
"""Sections of a figure for each run: title, figure, and what is said where there is none; without words it is left
out."""


def page(whole: Facts, every_seconds: float | None = None) -> str:
    """HTML of one or several runs (`compare.report_data`); with `every_seconds` a live one, which asks for `main.html`
    where it came from so often."""
    from plotly.offline import get_plotlyjs

    here = Path(__file__).parent
    names = ", ".join(facts["run"]["name"] for facts in whole["runs"])
    live = f' data-every="{every_seconds:g}"' if every_seconds else ""
    state = '<p class="quiet" id="state">live</p>\n' if every_seconds else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(names)} - Phalanx</title>\n<style>\n{(here / 'page.css').read_text()}</style></head>\n"
        f"<body{live}>\n{state}{main(whole)}\n<script>{get_plotlyjs()}</script>\n"
        f"<script>\n{(here / 'page.js').read_text()}</script></body></html>\n"
    )


def main(whole: Facts) -> str:
    """The page without what draws it: all that changes while a run goes on."""
    runs, comparison = whole["runs"], whole["comparison"]
    names = comparison["names"] if comparison else [runs[0]["run"]["name"]]
    drawn: dict[str, Figure] = {}
    parts = [_header(facts, name) for facts, name in zip(runs, names, strict=True)]
    parts = [_beside_one_another(parts)]
    if comparison:
        parts.append(_comparison(comparison))
    parts.append(_section("", names, [_verdict(facts) for facts in runs]))
    parts.append(_section("Predicted beside measured", names, [_table(facts) for facts in runs]))
    parts += [_figures(place, runs, names, drawn) for place in ("ranks", "timeline")]
    curves = figures.curves(runs, names)
    if curves:
        drawn["curves"] = curves
        held_out = '<p class="quiet">Diamonds are held-out text.</p>' if comparison else ""
        parts.append(f"<section><h2>Loss and speed</h2>{held_out}{_place('curves', curves)}</section>")
    parts += [_figures(place, runs, names, drawn) for place in ("rounds", "memory", "traffic", "experts")]
    several = ' class="several"' if comparison else ""
    return f"<main{several}>\n{''.join(parts)}\n{_json('facts', whole)}\n{_json('figures', drawn)}\n</main>"


def _json(name: str, value: Any) -> str:
    """Data in the page; no text in it can end its element."""
    said = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{said}</script>'


def _place(name: str, figure: Figure) -> str:
    """Where a figure is drawn, below its legend."""
    colours = "".join(
        f'<li><span style="background:{colour}"></span>{said}</li>' for said, colour in figures.legend(figure).items()
    )  # their names are escaped already, for plotly
    listed = f'<ul class="legend">{colours}</ul>' if colours else ""
    widest = f";max-width:{figure['widest']}px" if "widest" in figure else ""
    return f'{listed}<div class="figure" id="{name}" style="height:{figure["layout"]["height"]}px{widest}"></div>'


def _beside_one_another(cells: Sequence[str]) -> str:
    return f'<div class="runs">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'


def _section(title: str, names: Sequence[str], cells: Sequence[str]) -> str:
    """The same of every run; with its name where there are several."""
    if len(cells) > 1:
        cells = [f"<h3>{escape(name)}</h3>{said}" for name, said in zip(names, cells, strict=True)]
    heading = f"<h2>{title}</h2>" if title else ""
    return f"<section>{heading}{_beside_one_another(cells)}</section>\n"


def _figures(section: str, runs: Sequence[Facts], names: Sequence[str], drawn: dict[str, Figure]) -> str:
    """A section of a figure for each run; they are put in `drawn` by the places that they have in the page."""
    title, figure, absent = DRAWN[section]
    found = [figure(facts) for facts in runs]
    if not any(found) and (not absent or all("swarm" in facts for facts in runs)):  # which look at no step closely
        return ""
    cells = []
    for at, (facts, own) in enumerate(zip(runs, found, strict=True)):
        if own is None:
            cells.append(f'<p class="quiet">{absent or "Nothing of this is known."}</p>')
            continue
        drawn[f"{section}-{at}"] = own
        cells.append(f'<p class="quiet">{escape(_note(section, facts))}</p>{_place(f"{section}-{at}", own)}')
    return _section(title, names, cells)


def _note(section: str, facts: Facts) -> str:
    """What a reader needs to know of a figure."""
    match section:
        case "ranks":
            return f"Medians of {facts['measures']['steps']} steps."
        case "timeline":
            error = facts["run"]["clock_error_seconds"]
            clocks = f" Clocks of ranks are within {format_seconds(error)} of each other." if error else ""
            simulated = facts["timeline"].get("simulated")
            said = (
                " Simulated is without sends: what is measured beyond it is sending and waiting." if simulated else ""
            )
            slower = ", which took longer for its memory was metered" if facts["timeline"]["metered"] else ""
            return f"Step {facts['timeline']['step']}{slower}; numbers are micro-batches.{said}{clocks}"
        case "memory":
            return (
                f"Step {facts['memory']['step']} on rank {facts['memory']['rank']}, which held most; tensors by part."
            )
        case "traffic":
            each = [f"{axis} {format_bytes(value)}" for axis, value in facts["traffic"]["axes"].items()]
            return f"Bytes of a step as planned, on a logarithmic scale. By axis: {', '.join(each)}."
        case "rounds":
            return formatting.ROUND_TABLE_NOTE if facts["swarm"]["rounds"] else "Bytes that nodes told, by node."
        case _:
            return f"Step {facts['experts']['step']}: tokens as a multiple of an even share."


def _header(facts: Facts, name: str) -> str:
    about = "".join(f"<li>{escape(said)}</li>" for said in formatting.run_summary(facts["run"]))
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in facts["problems"])
    listed = f'<ul class="problems">{problems}</ul>' if problems else ""
    return f'<h1>{escape(name)}</h1><ul class="facts">{about}</ul>{listed}<dl class="tiles">{_tiles(facts)}</dl>'


def _tiles(facts: Facts) -> str:
    """The numbers that are looked for first."""
    found = []
    for what, title in TILES.items():
        row = formatting.measured_row(facts, what)
        if row and row["measured"] is not None:
            beside = (
                f"predicted {formatting.format_number(row['predicted'], row['unit'])}"
                if row["predicted"] is not None
                else ""
            )
            found.append((title, formatting.format_number(row["measured"], row["unit"]), beside))
    loss, held_out = formatting.last_value(facts["curves"].get("loss")), facts["curves"]["held_out"]
    if loss is not None:
        found.append(("loss", f"{loss:.3f}", f"held out {held_out[-1][1]:.3f}" if held_out and held_out[-1][1] else ""))
    found += formatting.round_totals(facts)
    return "".join(
        f"<div><dt>{title}</dt><dd>{value}<small>{beside}</small></dd></div>" for title, value, beside in found
    )


def _verdict(facts: Facts) -> str:
    """What costs most, why, and what to change first; then the rest."""
    verdict, rest = facts["verdict"], facts["findings"][1:]
    if verdict is None and "swarm" in facts:
        return ""
    if verdict is None:
        return '<p class="quiet">There is no verdict: too few steps were noted.</p>'
    others = "".join(f"<li>{_finding(finding)}</li>" for finding in rest)
    more = f'<details><summary>{len(rest)} more</summary><ul class="findings">{others}</ul></details>' if rest else ""
    return (
        f'<div class="verdict"><h2>{escape(formatting.bottleneck_headline(verdict))}</h2>'
        f"<p>{escape(formatting.as_sentence(verdict['evidence']))}</p>"
        f"<p><b>Change first:</b> {escape(verdict['suggestion'])}.</p>{more}</div>"
    )


def _finding(finding: Facts) -> str:
    evidence = escape(formatting.as_sentence(finding["evidence"]))
    return (
        f"<b>{escape(formatting.bottleneck_headline(finding))}.</b> {evidence} "
        f"<span class='quiet'>{escape(finding['suggestion'])}.</span>"
    )


def _table(facts: Facts) -> str:
    """A table for each group of rows."""
    if not facts["comparison"]:
        said = "A coordinator trains nothing." if facts["run"].get("leads") else "Nothing was measured yet."
        return f'<p class="quiet">{said}</p>'
    columns = "<th>predicted</th><th>measured</th><th>ratio</th>"
    tables = "".join(
        f"<table><thead><tr><th>{escape(title)}</th>{columns}</tr></thead>"
        f"<tbody>{''.join(map(_row, rows))}</tbody></table>"
        for title, rows in formatting.group_rows(facts["comparison"])
    )
    return f'<div class="comparison">{tables}</div>'


def _row(row: Mapping[str, Any]) -> str:
    predicted, measured = (formatting.format_number(row[name], row["unit"]) for name in ("predicted", "measured"))
    low, high = row.get("low"), row.get("high")
    band = (
        f"<small>{formatting.format_number(low, row['unit'])} to {formatting.format_number(high, row['unit'])}</small>"
        if low
        else ""
    )
    off = ' class="off"' if formatting.is_off(row["ratio"]) else ""
    return (
        f"<tr><td>{escape(formatting.row_label(row))}</td><td>{predicted}{band}</td><td>{measured}</td>"
        f"<td{off}>{formatting.format_ratio(row['ratio'])}</td></tr>"
    )


def _comparison(comparison: Facts) -> str:
    """What differs, in sentences, and the measures of all runs, with ratios to the first."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in formatting.format_comparison(comparison))
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison["names"])
    body = "".join(
        f"<tr><td>{escape(formatting.NAMES.get(row['what'], row['what']))}</td>{_measures(row)}</tr>"
        for row in comparison["rows"]
    )
    table = f'<table class="compared"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f"<section><h2>Side by side</h2>{said}{table}</section>\n"


def _measures(row: Facts) -> str:
    cells = [formatting.format_number(value, row["unit"]) for value in row["measured"]]
    ratios = ["", *(f" <small>{formatting.format_ratio(ratio)}</small>" for ratio in row["ratio"][1:])]
    return "".join(f"<td>{value}{ratio}</td>" for value, ratio in zip(cells, ratios, strict=True))
