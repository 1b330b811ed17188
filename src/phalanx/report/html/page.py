"""Self-contained HTML page on runs: text, tables and figures, side by side for several runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from phalanx.report import formatting, gpu_samples
from phalanx.report.compare_runs import MAX_SIDE_BY_SIDE
from phalanx.report.gpu_profile import facts as gpu_profile
from phalanx.report.html import figures, timeline_figures
from phalanx.report.html.figures import Figure
from phalanx.report.profiled_steps import Facts
from phalanx.spec.formatting import WRITTEN_BY, format_bytes, format_perplexity, format_ratio, format_seconds, plural

TILES = {
    "step": "step",
    "tokens_per_second": "tokens per second",
    "targets_per_second": "targets per second",
    "mfu": "MFU",
    "goodput": "goodput",
}
PLOTLY = "plotly-cartesian.min.js"
"""plotly.js 4.1.1 without maps and 3-D: npm's plotly.js-cartesian-dist-min, MIT license."""
PROFILE_HINT = "For the passes of a step and the memory over it, train with <code>--profile-steps FIRST:LAST</code>."
MAX_OPEN_MARKS = 5
"""Maximum number of marks in the curves whose lines are visible at first."""
Column = tuple[str, Facts, str]
"""A run of a section: its number in ids of elements, its facts, and its name."""
FIGURE_SECTIONS: dict[str, tuple[str, Callable[[Facts], Figure | None]]] = {
    "ranks": ("Time of each rank's step", figures.ranks),
    "timeline": ("Passes of a step", timeline_figures.passes),
    "rounds": ("Rounds of the swarm", figures.rounds),
    "memory": ("Memory over a step", figures.memory),
    "traffic": ("Traffic between ranks", figures.traffic),
    "experts": ("Load of the experts", figures.experts),
}
"""Sections with a figure for each run: title and figure. A section without figures is omitted."""


def page(report: Facts, every_seconds: float | None = None) -> str:
    """Return the HTML page of one or several runs, whose facts are `report` (`compare_runs.report_data`).

    `every_seconds` is the interval at which a live page requests `main.html` from its server; None for a static
    page.
    """
    folder = Path(__file__).parent
    css, plotly, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", PLOTLY, "page.js"))
    runs = report["runs"]
    few_names = ", ".join(facts["run"]["name"] for facts in runs)
    title = few_names if len(runs) <= MAX_SIDE_BY_SIDE else f"{len(runs)} runs"
    live = f' data-every="{every_seconds:g}"' if every_seconds else ""
    state = '<p class="quiet" id="state">live</p>\n' if every_seconds else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><!-- {WRITTEN_BY} --><meta charset="utf-8">\n'
        '<link rel="icon" href="data:,">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - Phalanx</title>\n<style>\n{css}</style></head>\n"
        f"<body{live}>\n{state}{main(report)}\n<script>{plotly}</script>\n"
        f"<script>\n{script}</script></body></html>\n"
    )


def main(report: Facts) -> str:
    """Return the part of the page that changes while a run is active, without scripts that draw it."""
    runs = report["runs"]
    comparison = report["comparison"]
    figures_by_id: dict[str, Figure] = {}
    names = comparison["names"] if comparison else [runs[0]["run"]["name"]]
    titles = comparison["titles"] if comparison else names
    parts = []
    if comparison:
        parts.append(_render_run_comparison(comparison))
        parts.append(_render_curves("curves", runs, names, figures_by_id))
    columns = [(str(index), facts, name) for index, (facts, name) in enumerate(zip(runs, names, strict=True))]
    if len(runs) <= MAX_SIDE_BY_SIDE:
        parts += _render_runs(columns, titles, figures_by_id)
    else:
        parts += [
            f"<details><summary>{escape(title)}</summary>"
            f"{''.join(_render_runs([column], [column[2]], figures_by_id))}</details>"
            for column, title in zip(columns, titles, strict=True)
        ]
    css_class = ' class="several"' if comparison else ""
    scripts = f"{_render_json_script('facts', report)}\n{_render_json_script('figures', figures_by_id)}"
    return f"<main{css_class}>\n{''.join(parts)}\n{scripts}\n</main>"


def _render_runs(columns: Sequence[Column], titles: Sequence[str], figures_by_id: dict[str, Figure]) -> Iterator[str]:
    """Yield the sections of a run, or of a few runs side by side; figures get the id of their element.

    The first section has the titles of the runs, and the others their names.
    """
    runs = [facts for _, facts, _ in columns]
    headers = [_render_header(index, facts, title) for (index, facts, _), title in zip(columns, titles, strict=True)]
    yield f"<section>{_render_columns(headers)}</section>"
    yield _render_section("", columns, [_render_verdict(facts) for facts in runs])
    yield _render_section("Predicted and measured", columns, [_render_comparison_tables(facts) for facts in runs])
    yield from (_render_figure_section(section, columns, figures_by_id) for section in ("ranks", "timeline"))
    yield _render_section("Scores", columns, [_render_scores(facts["scores"]) for facts in runs])
    yield _render_section("Step on the GPU", columns, [_render_gpu_step(facts["gpu"]) for facts in runs])
    yield _render_section("GPUs during the run", columns, [_render_gpu_samples(facts["gpu_samples"]) for facts in runs])
    if len(columns) == 1:
        (index, facts, name) = columns[0]
        yield _render_curves(f"curves-{index}", [facts], [name], figures_by_id)
    sections = ("rounds", "memory", "traffic", "experts")
    yield from (_render_figure_section(section, columns, figures_by_id) for section in sections)
    if all(facts["timeline"] is None and facts["memory"] is None and "swarm" not in facts for facts in runs):
        yield f'<p class="quiet hint">{PROFILE_HINT}</p>'


def _render_scores(scores: Sequence[Facts]) -> str:
    """Return a table of the scores of tasks."""
    if not scores:
        return ""
    header, rows = formatting.score_rows(scores)
    return _render_table([header, *rows])


def _render_curves(name: str, runs: Sequence[Facts], names: Sequence[str], figures_by_id: dict[str, Figure]) -> str:
    """Return the section of the curves, with a line on each mark of a single run."""
    figure = figures.curves(runs, names)
    if figure is None:
        return ""
    figures_by_id[name] = figure
    note = '<p class="quiet">Markers are validation losses, on held-out text.</p>' if len(runs) > 1 else ""
    slot = _render_figure_slot(name, figure, has_legend=len(runs) <= MAX_SIDE_BY_SIDE)
    marks = runs[0]["curves"]["marks"] if len(runs) == 1 else ()
    lines = "".join(
        f'<li><span style="background:{figures.MARK_COLORS[mark["kind"]]}"></span>{escape(mark["text"])}</li>'
        for mark in marks
    )
    is_open = " open" if len(marks) <= MAX_OPEN_MARKS else ""
    summary = f"<summary>{plural(len(marks), 'later start')}</summary>"
    mark_list = f'<details{is_open}>{summary}<ul class="marks">{lines}</ul></details>' if lines else ""
    return f"<section><h2>Loss and speed</h2>{note}{slot}{mark_list}</section>\n"


def _render_json_script(name: str, value: Any) -> str:
    """Return data as a script element of the page; no text in the data can end the element."""
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _render_figure_slot(name: str, figure: Figure, has_legend: bool = True) -> str:
    """Return the element for a figure, below its legend."""
    # The names are already escaped for plotly.
    colors = figures.legend(figure) if has_legend else {}
    items = "".join(f'<li><span style="background:{color}"></span>{label}</li>' for label, color in colors.items())
    legend_list = f'<ul class="legend">{items}</ul>' if items else ""
    max_width = f";max-width:{figure['widest']}px" if "widest" in figure else ""
    return (
        f'{legend_list}<div class="figure" id="{name}" style="height:{figure["layout"]["height"]}px{max_width}"></div>'
    )


def _render_columns(cells: Sequence[str]) -> str:
    return f'<div class="runs">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'


def _render_section(title: str, columns: Sequence[Column], cells: Sequence[str]) -> str:
    """Return a section with a cell for each run, with names if there are several runs; "" if no cell has content."""
    if not any(cells):
        return ""
    if len(cells) > 1:
        cells = [
            f"<h3>{escape(name)}</h3>{cell or '<p class=quiet>No data.</p>'}"
            for (_, _, name), cell in zip(columns, cells, strict=True)
        ]
    heading = f"<h2>{title}</h2>" if title else ""
    return f"<section>{heading}{_render_columns(cells)}</section>\n"


def _render_figure_section(section: str, columns: Sequence[Column], figures_by_id: dict[str, Figure]) -> str:
    """Return a section with a figure for each run."""
    title, make_figure = FIGURE_SECTIONS[section]
    if section == "ranks" and all(len(facts["ranks"]) <= 1 for _, facts, _ in columns):
        title = "Time of a step"
    cells = []
    for index, facts, _ in columns:
        figure = make_figure(facts)
        if figure is None:
            cells.append("")
            continue
        figures_by_id[f"{section}-{index}"] = figure
        note = escape(_describe_figure(section, facts))
        cells.append(f'<p class="quiet">{note}</p>{_render_figure_slot(f"{section}-{index}", figure)}')
    return _render_section(title, columns, cells)


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


def _render_header(index: str, facts: Facts, title: str) -> str:
    summary = "".join(f"<li>{escape(line)}</li>" for line in formatting.run_summary(facts["run"]))
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in facts["problems"])
    problem_list = f'<ul class="problems">{problems}</ul>' if problems else ""
    tiles = f'<dl class="tiles">{_render_tiles(facts)}</dl>'
    return f'<h1 id="run-{index}">{escape(title)}</h1><ul class="facts">{summary}</ul>{problem_list}{tiles}'


def _render_tiles(facts: Facts) -> str:
    """Return the most important numbers; the validation loss has its tokens if the run evaluated several texts."""
    tiles = []
    for name, title in TILES.items():
        row = formatting.measured_row(facts, name)
        if row and row["measured"] is not None:
            predicted = formatting.format_number(row["predicted"], row["unit"])
            detail = f"predicted {predicted}" if row["predicted"] is not None else ""
            tiles.append((title, formatting.format_number(row["measured"], row["unit"]), detail))
    if facts["ranks"]:
        peak = max(rank["peak_memory_bytes"] for rank in facts["ranks"])
        tiles.append(("peak memory", format_bytes(peak), "of a rank" if len(facts["ranks"]) > 1 else ""))
    loss = formatting.last_value(facts["curves"].get("loss"))
    if loss is not None:
        tiles.append(("training loss", f"{loss:.3f}", ""))
    held_out = facts["curves"]["held_out"]
    if held_out and held_out[-1]["loss"][-1][1] is not None:
        loss = held_out[-1]["loss"][-1][1]
        text = f" over {formatting.format_tokens(held_out[-1]['held_out_tokens'])}" if len(held_out) > 1 else ""
        tiles.append(("validation loss", f"{loss:.3f}", f"perplexity {format_perplexity(loss)}{text}"))
    tiles += formatting.round_totals(facts)
    return "".join(
        f"<div><dt>{title}</dt><dd>{value}<small>{detail}</small></dd></div>" for title, value, detail in tiles
    )


def _render_verdict(facts: Facts) -> str:
    """Return the main bottleneck with its reason and the first change to try, then the others."""
    verdict = facts["verdict"]
    if verdict is None:
        return ""
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
        return ""
    columns = "<th>predicted</th><th>measured</th><th>ratio</th>"
    tables = "".join(
        f"<table><thead><tr><th>{escape(title)}</th>{columns}</tr></thead>"
        f"<tbody>{''.join(_render_comparison_row(row, facts['run']['ranks']) for row in rows)}</tbody></table>"
        for title, rows in formatting.group_rows(facts["comparison"])
    )
    return f'<div class="comparison">{tables}</div>'


def _render_comparison_row(row: Mapping[str, Any], num_ranks: int) -> str:
    predicted, measured, low, high = (
        formatting.format_number(row.get(name), row["unit"]) for name in ("predicted", "measured", "low", "high")
    )
    band = f"<small>{low} to {high}</small>" if row.get("low") else ""
    css_class = ' class="off"' if formatting.is_off(row["ratio"]) else ""
    return (
        f"<tr><td>{escape(formatting.row_label(row, num_ranks))}</td><td>{predicted}{band}</td><td>{measured}</td>"
        f"<td{css_class}>{format_ratio(row['ratio'])}</td></tr>"
    )


def _render_gpu_step(gpu: Facts | None) -> str:
    """Return the table of the GPUs' times in a profiled step."""
    if gpu is None:
        return ""
    note = escape(f"{formatting.as_sentence(gpu_profile.table_title(gpu))} {gpu_profile.TABLE_NOTE}")
    return f'<p class="quiet">{note}</p>{_render_table(gpu_profile.table_rows(gpu))}'


def _render_gpu_samples(samples: Facts | None) -> str:
    """Return what the sensors of the GPUs showed during the run."""
    if samples is None:
        return ""
    lines = "".join(f"<p>{escape(formatting.as_sentence(line))}</p>" for line in gpu_samples.summary_lines(samples))
    title = escape(formatting.as_sentence(gpu_samples.table_title(samples)))
    return f'{lines}<p class="quiet">{title}</p>{_render_table(gpu_samples.table_rows(samples))}'


def _render_table(rows: Sequence[Sequence[str]]) -> str:
    header, *rows = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="comparison"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _render_run_comparison(comparison: Facts) -> str:
    """Return the differences between runs in sentences, and a table of measures and differing settings.

    A few runs are columns, with ratios to the first one. More runs are rows, which a click on a column's title sorts.
    """
    names = comparison["names"]
    rows = formatting.comparison_rows(comparison)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in formatting.format_comparison(comparison))
    if len(names) <= MAX_SIDE_BY_SIDE:
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr><td>{escape(label)}</td>"
            f"{''.join(f'<td>{escape(text)} <small>{ratio}</small></td>' for _, text, ratio in cells)}</tr>"
            for label, cells in rows
        )
        table = f'<table class="compared"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f"<section><h1>{len(names)} runs</h1>{table}{sentences}</section>\n"
    labels = ("run", *(label for label, _ in rows))
    head = "".join(
        f'<th scope="col"><button type="button">{escape(label).replace(".", ".<wbr>")}</button></th>'
        for label in labels
    )
    body = ""
    for index, name in enumerate(names):
        swatch = f'<span style="background:{figures.run_color(index, len(names))}"></span>'
        cells = "".join(
            f'<td data-value="{escape(json.dumps(value))}">{escape(text)}</td>'
            for value, text, _ in (row_cells[index] for _, row_cells in rows)
        )
        link = f'<a href="#run-{index}">{escape(name)}</a>'
        body += f'<tr><td data-value="{escape(json.dumps(name))}">{swatch}{link}</td>{cells}</tr>'
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<section><h1>{len(names)} runs</h1><div class="scroll">{table}</div>{sentences}</section>\n'
