"""Facts of several runs side by side: differences in settings and in measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.report import formatting
from phalanx.report.profiled_steps import Facts
from phalanx.runs.metrics import have_same_held_out_text

COMPARED_SETTINGS = {
    "layout": "layouts",
    "ranks": "numbers of ranks",
    "device": "devices",
    "precision": "precisions",
    "tokens_per_step": "batches (tokens per step)",
    "sequence": "lengths of sequences",
    "steps": "numbers of steps, over which learning rates change",
    "optimizer": "optimizers",
    "seed": "seeds",
}
"""Facts that may explain a difference between runs, with their names in the plural."""


def report_data(runs: Sequence[Facts]) -> Facts:
    """Return the facts of runs and their comparison, which `--json` prints and a page embeds."""
    return {"runs": list(runs), "comparison": compare_runs(runs) if len(runs) > 1 else None}


def compare_runs(runs: Sequence[Facts]) -> Facts:
    """Return the comparison of runs.

    It has names, whether the runs have one model (None if unknown), differences as text, measures with ratios to
    the first run, and the maximum difference of losses of the same steps.
    """
    names = run_labels([facts["run"] for facts in runs])
    models = [facts["run"].get("model") for facts in runs]
    same_model = None if None in models else all(model == models[0] for model in models)
    return {
        "names": names,
        "same_model": same_model,
        "differences": [
            *_describe_models(names, models, same_model),
            *_describe_settings(names, [facts["run"] for facts in runs]),
            *_describe_held_out(names, [_last_held_out_curve(facts) for facts in runs]),
        ],
        "rows": list(_compare_measures(runs)),
        "loss_apart": _max_loss_difference(runs) if same_model else None,
    }


def run_labels(runs: Sequence[Facts]) -> list[str]:
    """Return a unique name for each run: its own, with its directory or number where several are equal."""
    names = [str(run["name"]) for run in runs]
    with_directory = [f"{run['name']} in {Path(run['directory']).parent}" for run in runs]
    with_number = [f"{run['name']} ({index})" for index, run in enumerate(runs, 1)]
    for longer_names in (with_directory, with_number):
        counts = Counter(names)
        names = [longer if counts[name] > 1 else name for name, longer in zip(names, longer_names, strict=True)]
    return names


def _describe_models(names: Sequence[str], models: Sequence[Facts | None], same_model: bool | None) -> Iterator[str]:
    unknown = [name for name, model in zip(names, models, strict=True) if model is None]
    if unknown:
        yield f"These runs may have different models: no usable run.toml in {', '.join(unknown)}."
    elif not same_model:
        known_models = [model for model in models if model is not None]
        fields = [
            field
            for field in dict.fromkeys(name for model in known_models for name in model)
            if _models_differ(known_models, field)
        ]
        differences = "; ".join(
            f"{field} {' and '.join(_format_value(model.get(field)) for model in known_models)}" for field in fields[:6]
        )
        yield f"These are different models ({differences}): their losses, times and bytes are not comparable."


def _models_differ(models: Sequence[Facts], field: str) -> bool:
    return any(model.get(field) != models[0].get(field) for model in models)


def _describe_settings(names: Sequence[str], runs: Sequence[Facts]) -> Iterator[str]:
    for setting, plural in COMPARED_SETTINGS.items():
        values = [run.get(setting) for run in runs]
        if None in values or all(value == values[0] for value in values):
            continue
        value_texts = [
            formatting.format_layout(value) if setting == "layout" else _format_value(value) for value in values
        ]
        pairs = "; ".join(f"{name} {value}" for name, value in zip(names, value_texts, strict=True))
        yield f"The runs have different {plural}: {pairs}."
    peaks = [run["peak_flops"] for run in runs if run.get("peak_flops")]
    if len(peaks) == len(runs) and any(peak != peaks[0] for peak in peaks):
        pairs = "; ".join(f"{name} {peak / 1e9:,.4g} G" for name, peak in zip(names, peaks, strict=True))
        yield (
            f"MFU and predictions refer to different peaks (FLOP/s of a rank): {pairs}. Each start measures the peak; "
            "other load on the machine lowers it."
        )


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(part)}" for name, part in value.items())
    if value is None:
        return "the default"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _compare_measures(runs: Sequence[Facts]) -> Iterator[Facts]:
    """Yield a row for each measure, with the value of each run or None.

    Held-out losses have a ratio if the run evaluated the text of the first one.
    """
    for name, unit in dict.fromkeys(
        (row["quantity"], row["unit"]) for facts in runs for row in facts["comparison"] if not row["role"]
    ):
        rows = [formatting.measured_row(facts, name) for facts in runs]
        measure_row = _build_comparison_row(name, unit, [row["measured"] if row else None for row in rows])
        if name == "mfu" and _models_differ([facts["run"] for facts in runs], "peak_flops"):
            measure_row["ratio"] = [None] * len(runs)  # shares of different peaks
        yield measure_row
    yield _build_comparison_row("loss", "loss", [formatting.last_value(facts["curves"].get("loss")) for facts in runs])
    curves = [_last_held_out_curve(facts) for facts in runs]
    losses = [formatting.last_value([loss for _, loss in curve["loss"]]) for curve in curves]
    held_out_row = _build_comparison_row("held-out loss", "loss", losses)
    held_out_row["ratio"] = [
        ratio if have_same_held_out_text(curves[0], curve) else None
        for ratio, curve in zip(held_out_row["ratio"], curves, strict=True)
    ]
    yield held_out_row
    peaks = [[rank["peak_memory_bytes"] for rank in facts["ranks"]] for facts in runs]
    yield _build_comparison_row("peak memory of a rank", "B", [max(run_peaks, default=None) for run_peaks in peaks])


def _last_held_out_curve(facts: Facts) -> Facts:
    """Return the losses on the text of a run's last evaluation."""
    curves = facts["curves"]["held_out"]
    return dict(curves[-1]) if curves else {"loss": []}


def _describe_held_out(names: Sequence[str], curves: Sequence[Facts]) -> Iterator[str]:
    evaluated = [(name, curve) for name, curve in zip(names, curves, strict=True) if curve["loss"]]
    if all(have_same_held_out_text(evaluated[0][1], curve) for _, curve in evaluated):
        return
    pairs = "; ".join(f"{name} {formatting.format_tokens(curve['held_out_tokens'])}" for name, curve in evaluated)
    yield f"The runs were last evaluated on different held-out text, so that these losses are not comparable: {pairs}."


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
