"""Text for the numbers and names of a run's facts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.report.swarm_rounds import ALL_ROUNDS, PER_ROUND
from phalanx.spec.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_digits,
    format_percent,
    format_ratio,
    format_seconds,
    plural,
)

DISPLAY_NAMES = {
    "tokens_per_second": "tokens per second",
    "targets_per_second": "targets per second",
    "mfu": "MFU",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all (planned for balanced experts)",
    "pipeline": "waits in the pipeline",
    "communication": "exposed communication",
    "optimizer": "update",
    "step": "whole step",
    "held-out loss": "validation loss",
}
"""Names in text that differ from those of facts."""
RANK_OF_STEP_PART = {"compute": "slowest rank", "exposed communication": "rank that waits least"}
"""The rank to which a step's row refers."""
STATE = (
    "parameters",
    "gradients",
    "optimizer",
    "teacher",
    "offloaded",
    "activations",
    "communication",
    "working",
    "total",
)
"""Rows of memory. In them, `optimizer` and `communication` are allocated bytes, not durations."""
BOTTLENECK_NAMES = {
    "compute": "computing",
    "memory": "saving memory",
    "communication": "communication",
    "input": "waiting for tokens",
    "straggler": "a slow rank",
    "bubble": "the pipeline's bubble",
    "stage": "a slow stage",
    "expert": "a hot expert",
}
"""Names of bottlenecks, as causes of a share of a step."""
RESULTS = (
    "last step",
    "loss",
    "held-out loss",
    "perplexity",
    "tokens_per_second",
    "targets_per_second",
    "peak memory of a rank",
)
"""Measures at the beginning of a table of runs, before the settings that differ."""
MINOR_SETTINGS = (
    "optimizer.warmup_steps",
    "evaluation.prompt",
    "evaluation.samples",
    "checkpoint.",
    "recovery.",
    "metrics.",
)
"""Beginnings of the names of settings that rarely explain a difference of results, at the end of a table of runs."""
MAX_SETTING_WIDTH = 32
"""Characters of a setting's value; more only if values would otherwise look equal."""
STATE_DESCRIPTIONS = {
    True: "the run is still active",
    False: "the run has stopped",
    None: "the run is still active, or has stopped",
}
"""State of a run before its last step, by whether it is active."""


MAX_SCORE_STEPS = 6
"""Steps with scores in a table."""


def format_tokens(count: int | None) -> str:
    """Return a number of tokens, such as "4,096 tokens"; it is None in records of early versions."""
    return "an unknown number of tokens" if count is None else f"{count:,} tokens"


def format_times(count: int) -> str:
    """Return "once", or a number of times."""
    return "once" if count == 1 else f"{count} times"


def format_number(value: float | None, unit: str) -> str:
    """Return a number with three digits and its unit, or a dash if it is None.

    Units are "s" (seconds), "B" (bytes), "tokens/s", "steps", "loss", "perplexity", and "" (a share).
    """
    if value is None:
        return UNKNOWN
    if unit == "perplexity":
        return format_digits(value)
    if unit == "loss":
        return f"{value:.3f}"
    if unit == "B":
        return format_bytes(value, trailing_zeros=True)
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.0f}" if unit in ("tokens/s", "steps") else format_percent(value)


def row_label(row: Mapping[str, Any], num_ranks: int) -> str:
    """Return the label of a row of `comparison`."""
    name = str(row["quantity"])
    if not row["role"] and name in RANK_OF_STEP_PART and num_ranks > 1:
        return f"{name}, {RANK_OF_STEP_PART[name]}"
    return name if row["role"] and name in STATE else DISPLAY_NAMES.get(name, name)


TITLES = {"": "of a step", PER_ROUND: "of a round of the swarm", ALL_ROUNDS: "of all rounds"}
"""Titles of rows without a role of ranks."""


def group_rows(comparison: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield the rows of `comparison` under titles, without rows that are 0 throughout.

    The groups are a step, memory and bytes of each role of ranks, and rounds.
    """
    nonzero_rows = [row for row in comparison if row["predicted"] or row["measured"]]
    for role in dict.fromkeys(row["role"] for row in nonzero_rows):
        role_rows = [row for row in nonzero_rows if row["role"] == role]
        if role in TITLES:
            yield TITLES[role], role_rows
            continue
        subject = "a rank" if role == "rank" else role
        memory_rows = [row for row in role_rows if row["quantity"] in STATE]
        traffic_rows = [row for row in role_rows if row["quantity"] not in STATE]
        if memory_rows:
            yield f"memory of {subject}", memory_rows
        if traffic_rows:
            yield f"sent by {subject} in a step", traffic_rows


TABLE_NOTE = (
    "Rows of a step are medians over steps for the slowest rank; exposed communication is for the rank that waits "
    "least. Rows of a rank are medians of this rank. Rows do not add up exactly, because they are medians."
)
"""Explanation of the numbers in the table."""
ROUND_TABLE_NOTE = (
    "Rows of a round are means over rounds. Bytes are predicted by the formulas of the method, without names and "
    "checksums. Time and utilization are predicted from the measured step time and link speed, without coding and "
    "waiting. If a node continues training after it has sent its update (swarm.delay), sending and coding overlap with "
    "training."
)
"""Explanation of the numbers in a swarm's table."""


def format_layout(values: Mapping[str, Any] | None) -> str:
    """Return the settings of a layout that differ from the defaults, such as data_parallel=zero2, pp=2."""
    if values is None:
        return "an unknown layout"
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "plain data parallelism"


def run_summary(run: Mapping[str, Any]) -> list[str]:
    """Return a short line each on the ranks, the layout, the model and the steps of a run."""
    if run.get("leads"):
        return ["coordinator of a swarm; the directories of its nodes are nodes/NAME", format_progress(run)]
    ranks = run["ranks"]
    hosts = run["hosts"]
    hosts_text = ""
    if hosts:
        hosts_text = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    device = f" ({run['device']})" if run["device"] else ""
    lines = [f"{plural(ranks, 'rank')}{hosts_text}{device}" if ranks else "an unknown number of ranks"]
    if "layout" in run:
        implementation = run["settings"].get("model.implementation.class")
        source = f" as [model] describes {implementation}" if implementation else ""
        lines += [
            format_layout(run["layout"]),
            f"{format_count(run['parameters'])} parameters{source} in {run['precision']}",
            f"{run['tokens_per_step']:,} tokens a step in sequences of {run['sequence']:,}",
        ]
    return [*lines, format_progress(run)]


def format_progress(run: Mapping[str, Any]) -> str:
    """Return the progress of a run, such as "step 12 of 40"."""
    progress = f"step {run['step']:,} of {run['steps']:,}" if "steps" in run else f"step {run['step']:,}"
    return f"{progress}, ended early: {reason}" if (reason := run.get("finish_reason")) else progress


def bottleneck_headline(finding: Mapping[str, Any]) -> str:
    """Return a headline for a bottleneck, such as "Communication: 27 % of a step"."""
    kind = BOTTLENECK_NAMES.get(finding["kind"], finding["kind"])
    return f"{kind[0].upper()}{kind[1:]}: {100 * finding['share']:.0f} % of a step"


def as_sentence(text: str) -> str:
    """Return a text with a capital letter and a period."""
    return f"{text[0].upper()}{text[1:]}."


def is_off(ratio: float | None) -> bool:
    """Return whether a measurement is far from its prediction."""
    return ratio is not None and not 0.8 <= ratio <= 1.25


def format_comparison(comparison: Mapping[str, Any]) -> list[str]:
    """Return the comparison of runs as sentences."""
    loss_difference = comparison["loss_apart"]
    if loss_difference is None:
        return list(comparison["differences"])
    largest = f"{100 * loss_difference['largest_relative']:.2g} %"
    return [
        *comparison["differences"],
        f"Over the {loss_difference['steps']} steps of all runs, losses differ by at most {largest}.",
    ]


def comparison_rows(comparison: Mapping[str, Any]) -> list[tuple[str, list[tuple[Any, str, str]]]]:
    """Return the rows of a comparison: label and a cell per run, with the value, its text and its ratio to the first.

    The order is: results, differing settings, other measures, minor settings. Measures that no run has, or that are 0
    in all of them, are left out.
    """
    numbered_rows = []  # with the number of their group in this order
    for name, values in comparison["settings"].items():
        cells = [(value, text, "") for value, text in zip(values, setting_texts(values), strict=True)]
        numbered_rows.append((3 if name.startswith(MINOR_SETTINGS) else 1, (name, cells)))
    for row in comparison["rows"]:
        if any(row["measured"]):
            texts = [format_number(value, row["unit"]) for value in row["measured"]]
            ratios = ["", *("" if ratio is None else format_ratio(ratio) for ratio in row["ratio"][1:])]
            measure = measure_of_all_text(row["quantity"])
            label = DISPLAY_NAMES.get(measure, measure) + row["quantity"].removeprefix(measure)
            cells = list(zip(row["measured"], texts, ratios, strict=True))
            numbered_rows.append((0 if measure in RESULTS else 2, (label, cells)))
    return [row for _, row in sorted(numbered_rows, key=lambda numbered_row: numbered_row[0])]


def measure_of_all_text(quantity: str) -> str:
    """Return the measure of all text for that of a source, such as "loss" for "loss of code"."""
    return next((measure for measure in ("loss", "held-out loss") if quantity.startswith(f"{measure} of ")), quantity)


def setting_texts(values: Sequence[Any], unset: str = UNKNOWN) -> list[str]:
    """Return the values of a setting in several runs as short texts that differ where the values do.

    An absolute path is shortened to its file name, and to as many directories as tell the values apart. Long texts
    begin shortly before the first difference.
    """
    num_distinct = len(set(map(repr, values)))
    for path_parts in range(1, 2 + max(str(value).count("/") for value in values)):
        texts = [unset if value is None else _setting_text(value, path_parts) for value in values]
        if len(set(texts)) == num_distinct:
            break
    if max(map(len, texts)) <= MAX_SETTING_WIDTH:
        return texts
    differing_columns = (index for index, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1)
    first_difference = next(differing_columns, min(map(len, texts)))
    begin = max(0, first_difference - 8)
    width = MAX_SETTING_WIDTH
    while True:
        end = begin + width
        cut_texts = [f"{'…' * (begin > 0)}{text[begin:end]}{'…' * (len(text) > end)}" for text in texts]
        if len(set(cut_texts)) == len(set(texts)):
            return cut_texts
        width *= 2


def _setting_text(value: Any, path_parts: int) -> str:
    """Return a value in one line; of an absolute path, only the last parts."""
    if isinstance(value, list) and value:
        return ", ".join(_setting_text(item, path_parts) for item in value)
    if not isinstance(value, str) or not value:
        return json.dumps(value)
    text = "/".join(value.rstrip("/").split("/")[-path_parts:]) if value.startswith("/") else value
    return text.translate({ord("\n"): r"\n", ord("\r"): r"\r", ord("\t"): r"\t"})


def seconds_left(facts: Mapping[str, Any]) -> float | None:
    """Return the remaining seconds at the speed of the latest steps, or None if it is unknown."""
    newest = sorted((facts["curves"].get("step_seconds") or [])[-20:])
    if not newest or "steps" not in facts["run"]:
        return None
    return float(newest[len(newest) // 2] * (facts["run"]["steps"] - facts["run"]["step"]))


def last_value(curve: list[float | None] | None) -> float | None:
    """Return the last number of a curve that is not None."""
    return next((value for value in reversed(curve or []) if value is not None), None)


def measured_row(facts: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the row of a step's measure, or None."""
    return next((row for row in facts["comparison"] if row["quantity"] == name and not row["role"]), None)


def score_rows(scores: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of scores, with the last steps at which there are some."""
    steps = sorted({step for score in scores for step in score["values"]}, key=lambda step: int(step or 0))
    shown = steps[-MAX_SCORE_STEPS:]
    rows = [
        [
            score["task"],
            score["metric"],
            *(f"{score['values'][step]:.4g}" if step in score["values"] else UNKNOWN for step in shown),
        ]
        for score in scores
    ]
    return ["task", "metric", *(f"step {int(step):,}" if step else "now" for step in shown)], rows


def round_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a line for each finished round of a swarm: a node's work, or the updates to a coordinator."""
    swarm = facts.get("swarm")
    if swarm is None:
        return []
    rounds = swarm["rounds"]
    if rounds:
        lines = []
        for index, number in enumerate(rounds["round"]):
            sent, received = (format_number(rounds["bytes"][key][index], "B") for key in ("sent", "received"))
            seconds = rounds["total_seconds"][index]
            training_share = format_percent(rounds["seconds"]["training"][index] / (seconds or 1.0))
            refused = rounds["refused"][index]
            lines.append(
                f"round {number}: {rounds['steps'][index]} steps, {sent} sent, {received} received, "
                f"{training_share} of {format_seconds(seconds)} training{f'; refused: {refused}' if refused else ''}"
            )
        return lines
    return [
        f"round {row['round']}: {len(row['bytes'])} of {row['nodes']} nodes sent "
        f"{format_number(sum(row['bytes'].values()), 'B')} of {sum(row['tokens'].values()):,} tokens in "
        f"{format_seconds(row['seconds'])}"
        f"{''.join(f'; refused {count} x: {node}' for node, count in row['refused'].items())}"
        for row in swarm["updates"]
        if row["seconds"] is not None
    ]


def round_totals(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the totals of a swarm's rounds so far: name, number, and unit."""
    swarm = facts.get("swarm")
    if swarm is None:
        return []
    of_planned = f"of {swarm['planned']:,}" if swarm["planned"] else ""
    rounds = swarm["rounds"]
    if rounds:
        return [
            ("rounds", f"{rounds['round'][-1] + 1:,}", of_planned),
            ("sent", format_number(rounds["sent_bytes"], "B"), ""),
            ("received", format_number(rounds["received_bytes"], "B"), ""),
            ("training", format_number(rounds["utilization"], ""), "of the time"),
        ]
    updates = swarm["updates"] or ()
    rounds_done = sum(row["seconds"] is not None for row in updates)
    totals = {key: sum(sum(row[key].values()) for row in updates) for key in ("bytes", "tokens", "refused")}
    return [
        ("rounds", f"{rounds_done:,}", of_planned),
        ("sent by nodes", format_number(totals["bytes"], "B"), ""),
        ("tokens", f"{totals['tokens']:,}", ""),
        ("refused", f"{totals['refused']:,}", "times"),
    ]
