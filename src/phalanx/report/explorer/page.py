"""The explorer's page: one file that needs no network, with all layouts of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from phalanx.cost.exact.flops import mfu, training_flops_per_token
from phalanx.plan.placement.findings import LINK_KINDS
from phalanx.plan.search.explain import PART_DESCRIPTIONS
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, SAFE_OOM_PROBABILITY
from phalanx.plan.search.result import TIE_TOLERANCE, EvaluatedLayout
from phalanx.plan.search.search import ProgressCallback
from phalanx.report import html
from phalanx.report.drawing import heatmap, schedule, step_breakdown
from phalanx.report.explorer.columns import pack_columns, pack_json
from phalanx.report.explorer.details import layout_details
from phalanx.report.explorer.exploration import Exploration
from phalanx.report.html.figures import MEMORY_COLORS, RUN_COLORS
from phalanx.spec.formatting import WRITTEN_BY, plural
from phalanx.spec.layout import Layout

SCRIPTS = ("data.js", "scatter.js", "figures.js", "cards.js", "explorer.js")
SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
)
"""Content security policy: the page loads only itself and answers of its own server."""
CHOICE_COLUMNS = (
    "data_parallel",
    "dp",
    "dp_shard",
    "tp",
    "pp",
    "cp",
    "cp_method",
    "ep",
    "micro_batch_size",
    "micro_batches",
    "activation_checkpointing",
    "schedule",
    "virtual_stages",
    "rank_order",
    "offload",
    "offload_directory",
)
"""Fields of a candidate layout."""
COLOR_BY = {
    "fit": "fit in memory",
    "data_parallel": "data parallelism",
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "schedule": "pipeline schedule",
    "micro_batch_size": "micro-batch",
    "activation_checkpointing": "recomputation",
    "offload": "offload",
}
AXES = {"tp": "tensor", "cp": "context", "ep": "experts", "pp": "stages", "dp": "data"}
"""Kinds of parallelism, as rows of a table."""
MEMORY_PARTS = {
    "parameters": ("parameters", MEMORY_COLORS["parameters"]),
    "gradients": ("gradients", MEMORY_COLORS["gradients"]),
    "optimizer": ("optimizer state", MEMORY_COLORS["optimizer"]),
    "teacher": ("teacher", MEMORY_COLORS["teacher"]),
    "offloaded": ("offloaded", MEMORY_COLORS["offloaded"]),
    "activations": ("activations", MEMORY_COLORS["activations"]),
    "communication": ("communication buffers", MEMORY_COLORS["communication"]),
    "unused": ("reserved, unused", "#bbbbbb"),
    "nccl": ("NCCL", "#aa4499"),
    "process": ("driver and libraries", "#777777"),
}
"""Meaning and color of each part of a rank's memory."""
LINK_COLORS = {"fast": "#009e73", "node": "#56b4e9", "rail": "#e69f00", "spine": "#d55e00"}


@dataclass(frozen=True)
class PageContext:
    """How a page was made."""

    commands: Mapping[str, str]
    """Command lines for this run, machine and overrides. "compare" and "train" still need a layout; "explore" serves
    this page; "train" is "" where no run file can be trained."""
    notes: Sequence[str]
    """Assumptions, and what was measured."""


def page_facts(exploration: Exploration, context: PageContext) -> dict[str, Any]:
    """Return the data of a page but for details of layouts: the setup, and all layouts in columns."""
    return {
        "setup": _describe_setup(exploration, context),
        "columns": _pack_layout_columns(exploration),
        "ranked": list(exploration.ranked),
        "front": list(exploration.front),
        "counted": {index: _counted_figures(evaluated) for index, evaluated in exploration.counted.items()},
        "palettes": {"numbers": heatmap.COLORS, "names": RUN_COLORS},
    }


def packed_details(exploration: Exploration, report: ProgressCallback = lambda *_: None) -> dict[int, str]:
    """Return packed details of the first choices and of the Pareto front, by index."""
    indices = list(dict.fromkeys((*exploration.ranked, *exploration.front)))
    details = {}
    for done, index in enumerate(indices):
        report("describing layouts", done, len(indices))
        details[index] = pack_json(json.dumps(details_of(exploration, index), separators=(",", ":")))
    return details


def details_of(exploration: Exploration, index: int) -> dict[str, Any]:
    """Return the details of a layout by its index."""
    return layout_details(exploration.resolved, exploration.layouts[index])


def page(facts: Mapping[str, Any], form: str = "") -> str:
    """Return the page as HTML; `form` is that of new choices, where a planner answers them."""
    base = Path(html.__file__).parent / "page.css"
    folder = Path(__file__).parent
    css = base.read_text(encoding="utf-8") + (folder / "explorer.css").read_text(encoding="utf-8")
    scripts = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    body = (folder / "explorer.html").read_text(encoding="utf-8")
    options = "".join(
        f'<option value="{name}">{label}</option>'
        for name, label in COLOR_BY.items()
        if name == "fit" or len(facts["columns"]["choices"][name]) > 1
    )
    data = json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><!-- {WRITTEN_BY} plan --><meta charset="utf-8">\n'
        '<link rel="icon" href="data:,">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{SECURITY_POLICY}">\n'
        f"<title>{escape(facts['setup']['title'])} - Phalanx</title>\n<style>\n{css}</style></head>\n"
        f"<body>\n{body.replace('{color_by}', options).replace('{form}', form)}\n"
        f'<script type="application/json" id="facts">{data}</script>\n<script>\n{scripts}</script></body></html>\n'
    )


def _describe_setup(exploration: Exploration, context: PageContext) -> dict[str, Any]:
    """Return what all layouts share, and meanings and colors of what is shown."""
    run = exploration.resolved.run
    training = run.training
    cluster = run.cluster
    model = run.model_name
    machine = cluster.preset or "the cluster"
    flops = training_flops_per_token(run.model, training.seq_len)
    peak = exploration.predictions.peak_flops
    return {
        "title": f"{model} on {exploration.resolved.world_size:,} x {machine}",
        "summary": [
            "predicted for Phalanx's own trainer",
            f"{plural(cluster.nodes, 'node')} of {cluster.nproc_per_node} {machine}",
            f"{training.tokens_per_step:,} tokens a step",
            f"sequences of {training.seq_len:,}",
            f"{len(exploration.layouts):,} layouts, {exploration.plan.fitting:,} likely to fit",
        ],
        "notes": list(context.notes),
        "ranks": exploration.resolved.world_size,
        "tokens_per_step": training.tokens_per_step,
        "memory_bytes": cluster.rank_memory_bytes,
        "mfu_per_token_rate": mfu(1.0, flops, peak, ranks=exploration.resolved.world_size),
        "safe_oom_probability": SAFE_OOM_PROBABILITY,
        "max_oom_probability": MAX_OOM_PROBABILITY,
        "tie_tolerance": TIE_TOLERANCE,
        "commands": dict(context.commands),
        "layout_defaults": {
            name: field.default for name, field in Layout.model_fields.items() if name in CHOICE_COLUMNS
        },
        "parts": {
            part: {"meaning": meaning, "color": step_breakdown.COLORS[part]}
            for part, meaning in PART_DESCRIPTIONS.items()
        },
        "memory_parts": {part: {"meaning": meaning, "color": color} for part, (meaning, color) in MEMORY_PARTS.items()},
        "links": {link: {"name": name, "color": LINK_COLORS[link]} for link, name in LINK_KINDS.items()},
        "axes": AXES,
        "passes": {kind: {"name": name, "colors": schedule.COLORS[kind]} for kind, name in schedule.LEGEND.items()},
    }


def _pack_layout_columns(exploration: Exploration) -> dict[str, Any]:
    """Pack the choices and the predictions of all layouts."""
    layouts = exploration.layouts
    predictions = exploration.predictions
    numbers = {part: getattr(predictions.time, part) for part in PART_DESCRIPTIONS}
    memory = exploration.column(predictions.memory.allocated_bytes).copy()
    # Counted memory, so that the axis has the number of the list and the details
    for index, evaluated in exploration.counted.items():
        memory[index] = evaluated.memory_bytes
    numbers |= {
        "memory": memory,
        "host": predictions.memory.host_bytes,
        "p_oom": predictions.p_oom,
        "interval_factor": predictions.interval_factor,
    }
    return pack_columns(
        {name: [getattr(layout, name) for layout in layouts] for name in CHOICE_COLUMNS},
        {name: exploration.column(column) for name, column in numbers.items()},
    )


def _counted_figures(evaluated: EvaluatedLayout) -> dict[str, float]:
    """Return the figures of a layout whose memory was counted."""
    return {name: getattr(evaluated, name) for name in ("step_seconds", "memory_bytes", "p_oom", "mfu")}
