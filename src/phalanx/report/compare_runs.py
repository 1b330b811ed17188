"""Several runs beside one another, as facts: what differs between them, and what they measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.report import formatting
from phalanx.report.profiled_steps import Facts

SETTINGS = {
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
"""Of a run's facts those that may explain a difference, in the plural."""


def report_data(found: Sequence[Facts]) -> Facts:
    """The facts of runs, and of several their comparison: what `--json` prints and a page embeds."""
    return {"runs": list(found), "comparison": compare_runs(found) if len(found) > 1 else None}


def compare_runs(found: Sequence[Facts]) -> Facts:
    """What is said of runs side by side: names, whether they are of one model (None where that is not known), what
    differs in words, measures with ratios to the first run, and how far losses of the same steps are apart."""
    names = run_labels([facts["run"] for facts in found])
    models = [facts["run"].get("model") for facts in found]
    same = None if None in models else all(model == models[0] for model in models)
    return {
        "names": names,
        "same_model": same,
        "said": [*_said_of_models(names, models, same), *_said_of_settings(names, [facts["run"] for facts in found])],
        "rows": list(_rows(found)),
        "loss_apart": _loss_apart(found) if same else None,
    }


def run_labels(runs: Sequence[Facts]) -> list[str]:
    """A name for each run: its own, with its directory or number where others have the same."""
    names = [str(run["name"]) for run in runs]
    placed = [f"{run['name']} in {Path(run['directory']).parent}" for run in runs]
    numbered = [f"{run['name']} ({at})" for at, run in enumerate(runs, 1)]
    for longer in (placed, numbered):
        often = Counter(names)
        names = [other if often[name] > 1 else name for name, other in zip(names, longer, strict=True)]
    return names


def _said_of_models(names: Sequence[str], models: Sequence[Facts | None], same: bool | None) -> Iterator[str]:
    unknown = [name for name, model in zip(names, models, strict=True) if model is None]
    if unknown:
        yield f"Whether these are runs of one model is not known: {', '.join(unknown)} has no usable run.toml."
    elif not same:
        known = [model for model in models if model is not None]
        fields = [field for field in dict.fromkeys(name for model in known for name in model) if _differ(known, field)]
        told = "; ".join(f"{field} {_listed([model.get(field) for model in known])}" for field in fields[:6])
        yield f"These are different models ({told}): their losses, times and bytes are not of the same work."


def _differ(models: Sequence[Facts], field: str) -> bool:
    return any(model.get(field) != models[0].get(field) for model in models)


def _said_of_settings(names: Sequence[str], runs: Sequence[Facts]) -> Iterator[str]:
    for setting, plural in SETTINGS.items():
        values = [run.get(setting) for run in runs]
        if None in values or all(value == values[0] for value in values):
            continue
        shown = [formatting.format_layout(value) if setting == "layout" else _told(value) for value in values]
        pairs = "; ".join(f"{name} {value}" for name, value in zip(names, shown, strict=True))
        yield f"They have different {plural}: {pairs}."
    peaks = [run["peak_flops"] for run in runs if run.get("peak_flops")]
    if len(peaks) == len(runs) and any(peak != peaks[0] for peak in peaks):
        pairs = "; ".join(f"{name} {peak / 1e9:,.4g} G" for name, peak in zip(names, peaks, strict=True))
        yield f"Their MFU is of different peaks, found anew at each start (FLOP/s of a rank): {pairs}."


def _listed(values: Sequence[Any]) -> str:
    return " and ".join(map(_told, values))


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(part)}" for name, part in value.items())
    return "the default" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _rows(found: Sequence[Facts]) -> Iterator[Facts]:
    """Measures of each run in turn, None where it has none."""
    for what, unit in dict.fromkeys(
        (row["what"], row["unit"]) for facts in found for row in facts["comparison"] if not row["role"]
    ):
        rows = [formatting.measured_row(facts, what) for facts in found]
        found_row = _row(what, unit, [row["measured"] if row else None for row in rows])
        if what == "mfu" and _differ([facts["run"] for facts in found], "peak_flops"):
            found_row["ratio"] = [None] * len(found)  # shares of different peaks
        yield found_row
    yield _row("loss", "loss", [formatting.last_value(facts["curves"].get("loss")) for facts in found])
    held_out = [[loss for _, loss in facts["curves"]["held_out"]] for facts in found]
    yield _row("held-out loss", "loss", [formatting.last_value(losses) for losses in held_out])
    peaks = [[rank["peak_memory_bytes"] for rank in facts["ranks"]] for facts in found]
    yield _row("peak memory of a rank", "B", [max(each, default=None) for each in peaks])


def _row(what: str, unit: str, values: list[float | None]) -> Facts:
    first = values[0]
    ratios = [value / first if first and value is not None else None for value in values]
    return {"what": what, "unit": unit, "measured": values, "ratio": ratios}


def _loss_apart(found: Sequence[Facts]) -> Facts | None:
    """Over the steps that all runs did: how many these are, and the most that a run's loss differs from the first's,
    relative to it."""
    curves = [_losses(facts["curves"]) for facts in found]
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        return None
    apart = max(abs(curve[step] / curves[0][step] - 1) for curve in curves[1:] for step in steps)
    return {"steps": len(steps), "largest_relative": apart}


def _losses(curves: Facts) -> dict[int, float]:
    """By step."""
    steps = curves["step"] if "loss" in curves else []
    return {step: loss for step, loss in zip(steps, curves.get("loss", []), strict=True) if loss is not None}
