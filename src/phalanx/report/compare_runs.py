"""Facts of several runs side by side: differences in settings and in measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.report import formatting
from phalanx.report.profiled_steps import Facts
from phalanx.runs.metrics import have_same_held_out_text
from phalanx.spec.formatting import perplexity

MAX_SIDE_BY_SIDE = 3
"""Maximum number of runs whose reports stand side by side; the reports of more runs follow each other."""
MAX_TITLE_SETTINGS = 3
"""Maximum number of differing settings in the title of a run."""
MEASURE_ORDER = (*formatting.RESULTS, "step", "mfu", "goodput")
"""Measures that come before the others."""
TOKEN_SETTINGS = (
    "data.train",
    "data.source",
    "data.dataset",
    "data.tokenizer",
    "data.text_key",
    "data.mask_documents",
    "training.seq_len",
    "training.loss",
)
"""Beginnings of the names of settings that must be equal for training losses to be comparable."""


def report_data(runs: Sequence[Facts]) -> Facts:
    """Return the facts of runs and their comparison, which `--json` prints and a page embeds."""
    return {"runs": list(runs), "comparison": compare_runs(runs) if len(runs) > 1 else None}


def compare_runs(runs: Sequence[Facts]) -> Facts:
    """Return the comparison of runs.

    It has names, titles that say what differs, the differing settings with the value of each run, whether the runs have
    one model (None if unknown), differences as text, measures with ratios to the first run, and the maximum difference
    of losses of the same steps.
    """
    run_facts = [facts["run"] for facts in runs]
    names = run_labels(run_facts)
    settings = _find_differing_settings(run_facts)
    token_settings = {name: values for name, values in settings.items() if name.startswith(TOKEN_SETTINGS)}
    unknown = [name for name, run in zip(names, run_facts, strict=True) if "settings" not in run]
    same_model = None if unknown else not any(name.startswith("model.") for name in settings)
    rows = sorted(
        _compare_measures(runs, token_settings),
        key=lambda row: (*MEASURE_ORDER, row["quantity"]).index(formatting.measure_of_all_text(row["quantity"])),
    )
    return {
        "names": names,
        "titles": _make_titles(names, settings),
        "settings": settings,
        "same_model": same_model,
        "differences": [
            *_describe_models(unknown, same_model),
            *_describe_peaks(run_facts),
            *_describe_token_settings(token_settings),
            *_describe_held_out([_last_held_out_curve(facts) for facts in runs]),
        ],
        "rows": rows,
        "loss_apart": _max_loss_difference(runs) if same_model and not token_settings else None,
    }


def _find_differing_settings(runs: Sequence[Facts]) -> dict[str, list[Any]]:
    """Return the value of each run, or None, for each setting that is not equal in all runs with known ones.

    Minor settings come last.
    """
    settings = [
        {"ranks": run["ranks"], "device": run["device"], **run["settings"]} if "settings" in run else None
        for run in runs
    ]
    known = [fields for fields in settings if fields is not None]
    names = dict.fromkeys(name for fields in known for name in fields)
    return {
        name: [fields.get(name) if fields else None for fields in settings]
        for name in sorted(names, key=lambda name: name.startswith(formatting.MINOR_SETTINGS))
        if any(fields.get(name) != known[0].get(name) for fields in known)
    }


def _make_titles(names: Sequence[str], settings: dict[str, list[Any]]) -> list[str]:
    """Return the name of each run with the first of its settings that differ, such as "a: ranks=2, layout.pp=2"."""
    texts = {field: formatting.setting_texts(values) for field, values in settings.items()}
    titles = []
    for index, name in enumerate(names):
        own = [f"{field}={texts[field][index]}" for field, values in settings.items() if values[index] is not None]
        more = [f"and {len(own) - MAX_TITLE_SETTINGS} more"] if len(own) > MAX_TITLE_SETTINGS else []
        titles.append(f"{name}: {', '.join([*own[:MAX_TITLE_SETTINGS], *more])}" if own else name)
    return titles


def run_labels(runs: Sequence[Facts]) -> list[str]:
    """Return a unique name for each run: its own, with its directory or number where several are equal."""
    names = [str(run["name"]) for run in runs]
    with_directory = [f"{run['name']} in {Path(run['directory']).parent}" for run in runs]
    with_number = [f"{run['name']} ({index})" for index, run in enumerate(runs, 1)]
    for longer_names in (with_directory, with_number):
        counts = Counter(names)
        names = [longer if counts[name] > 1 else name for name, longer in zip(names, longer_names, strict=True)]
    return names


def _describe_models(unknown: Sequence[str], same_model: bool | None) -> Iterator[str]:
    if unknown:
        yield f"These runs may have different models: no usable run.toml in {', '.join(unknown)}."
    elif not same_model:
        yield "These are different models: their losses, times and bytes differ for this reason too."


def _describe_peaks(runs: Sequence[Facts]) -> Iterator[str]:
    peaks = [run["peak_flops"] for run in runs if run.get("peak_flops")]
    if len(peaks) == len(runs) and min(peaks) != max(peaks):
        yield (
            f"MFU and predictions refer to different peaks: {min(peaks) / 1e9:,.4g} to {max(peaks) / 1e9:,.4g} GFLOP/s "
            "of a rank. Each start measures the peak; other load on the machine lowers it."
        )


def _describe_token_settings(token_settings: dict[str, list[Any]]) -> Iterator[str]:
    if token_settings:
        yield f"Training losses are not comparable, because the runs differ in {', '.join(token_settings)}."


def _compare_measures(runs: Sequence[Facts], token_settings: dict[str, list[Any]]) -> Iterator[Facts]:
    """Yield a row for each measure, with the value of each run or None.

    Losses have a ratio if the run trained on the tokens of the first one, and held-out losses if it evaluated them.
    """
    for name, unit in dict.fromkeys(
        (row["quantity"], row["unit"]) for facts in runs for row in facts["comparison"] if not row["role"]
    ):
        rows = [formatting.measured_row(facts, name) for facts in runs]
        measure_row = _build_comparison_row(name, unit, [row["measured"] if row else None for row in rows])
        if name == "mfu" and len({facts["run"].get("peak_flops") for facts in runs}) > 1:
            measure_row["ratio"] = [None] * len(runs)  # shares of different peaks
        yield measure_row
    last_steps = [facts["run"]["step"] for facts in runs]
    if len(set(last_steps)) > 1:
        yield _build_comparison_row("last step", "steps", last_steps) | {"ratio": [None] * len(runs)}
    losses = [formatting.last_value(facts["curves"].get("loss")) for facts in runs]
    loss_row = _build_comparison_row("loss", "loss", losses)
    loss_row["ratio"] = [
        ratio if all(values[index] == values[0] for values in token_settings.values()) else None
        for index, ratio in enumerate(loss_row["ratio"])
    ]
    yield loss_row
    curves = [_last_held_out_curve(facts) for facts in runs]
    losses = [formatting.last_value([loss for _, loss in curve["loss"]]) for curve in curves]
    held_out_row = _build_comparison_row("held-out loss", "loss", losses)
    perplexity_row = _build_comparison_row("perplexity", "perplexity", [perplexity(loss) for loss in losses])
    for row in (held_out_row, perplexity_row):
        row["ratio"] = [
            ratio if have_same_held_out_text(curves[0], curve) else None
            for ratio, curve in zip(row["ratio"], curves, strict=True)
        ]
        yield row
    sources = [facts["curves"].get("sources", {}) for facts in runs]
    for name in dict.fromkeys(name for run_sources in sources for name in run_sources):
        for field, row_of_all in (("loss", loss_row), ("held_out_loss", held_out_row)):
            curves_of_source = [run_sources.get(name, {}).get(field) for run_sources in sources]
            losses = [curve[-1][1] if curve else None for curve in curves_of_source]
            source_row = _build_comparison_row(f"{row_of_all['quantity']} of {name}", "loss", losses)
            are_comparable = [ratio is not None for ratio in row_of_all["ratio"]]
            source_row["ratio"] = [
                ratio if is_comparable else None
                for ratio, is_comparable in zip(source_row["ratio"], are_comparable, strict=True)
            ]
            yield source_row
    peaks = [[rank["peak_memory_bytes"] for rank in facts["ranks"]] for facts in runs]
    yield _build_comparison_row("peak memory of a rank", "B", [max(run_peaks, default=None) for run_peaks in peaks])


def _last_held_out_curve(facts: Facts) -> Facts:
    """Return the losses on the text of a run's last evaluation."""
    curves = facts["curves"]["held_out"]
    return dict(curves[-1]) if curves else {"loss": []}


def _describe_held_out(curves: Sequence[Facts]) -> Iterator[str]:
    evaluated = [curve for curve in curves if curve["loss"]]
    if not all(have_same_held_out_text(evaluated[0], curve) for curve in evaluated):
        counts = dict.fromkeys(formatting.format_tokens(curve["held_out_tokens"]) for curve in evaluated)
        yield (
            "The runs were last evaluated on different held-out text, so that validation losses are not comparable: "
            f"{' and '.join(counts)}."
        )


def _build_comparison_row(name: str, unit: str, values: list[float | None]) -> Facts:
    first_value = values[0]
    ratios = [value / first_value if first_value and value is not None else None for value in values]
    return {"quantity": name, "unit": unit, "measured": values, "ratio": ratios}


def _max_loss_difference(runs: Sequence[Facts]) -> Facts | None:
    """Return the maximum relative difference of a run's loss from the first run's, or None.

    The comparison covers the steps that all runs have; their number is part of the result.
    """
    curves = [
        {
            step: loss
            for step, loss in zip(facts["curves"]["step"], facts["curves"].get("loss", ()), strict=False)
            if loss is not None
        }
        for facts in runs
    ]
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        return None
    largest_difference = max(abs(curve[step] / curves[0][step] - 1) for curve in curves[1:] for step in steps)
    return {"steps": len(steps), "largest_relative": largest_difference}
