"""The table of layouts: losses, gradient norms, and the held-out loss after training equal those of one process in fp64
to 1e-10 relative, over 20 steps (`make test-all`). `make test` has those of test_covering_set.py.

Rows for a new strategy prove that it is right."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.schedule.registry import load_schedule_csv
from phalanx.schedule.schedule import to_csv
from phalanx.schedule.search import search_schedule
from phalanx.schedule.simulate import ActionTimes
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, GPT2, MOE, TWO_EXPERTS, small_run, train_and_evaluate
from tests.parity.fuzz import draw_valid_layouts, max_relative_difference

MODELS = {"dense": DENSE, "moe": MOE}
MODELS |= {
    "deep": {**DENSE, "num_layers": 4},
    "deep-moe": {**MOE, "num_layers": 4},
    "deeper": {**DENSE, "num_layers": 8},
}
MODELS["deep-tied"] = {**MODELS["deep"], "tie_embeddings": True}
MODELS["deep-gpt2"] = {**MODELS["deep"], **GPT2}
MODELS |= {
    "gpt2": {**DENSE, **GPT2},
    "tied": {**DENSE, "tie_embeddings": True},
    "full-norm": {**DENSE, "qk_norm": "full"},
}
MODELS["six-experts"] = {**MOE, "moe": {**MOE["moe"], "num_experts": 6}}
MODELS["two-experts"] = TWO_EXPERTS
UNEVEN_TP_BATCH = {"layout.tp": 2, "training.tokens_per_step": 7 * 32, "layout.micro_batch_size": 1}
MODELS["capacity"] = {**MOE, "moe": {**MOE["moe"], "capacity_factor": 0.75}}
MODELS["three-heads"] = {**DENSE, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 36}
MODELS |= {"uneven": {**DENSE, "vocab_size": 263}, "wide": {**MOE, "num_heads": 8, "num_kv_heads": 4}}
DEEP_MODELS = ("deep", "deep-moe")


@dataclass(frozen=True)
class LayoutCase:
    """A layout: its ranks, what it changes in the run file, and the micro-batches of 8 sequences over all ranks."""

    name: str
    ranks: int
    changes: dict[str, Any] = field(default_factory=dict)
    gradient_accumulation_steps: int = 1
    models: tuple[str, ...] = ("dense", "moe")


LAYOUT_CASES = [
    LayoutCase("one", 1, gradient_accumulation_steps=4),
    LayoutCase("one-recompute-full", 1, {"layout.activation_checkpointing": "full"}),
    LayoutCase("one-recompute-selective", 1, {"layout.activation_checkpointing": "selective"}),
    LayoutCase(
        "one-recompute-full-in-one", 1, {"layout.activation_checkpointing": "full", "layout.recomputed_blocks": 1}
    ),
    LayoutCase("ddp", 2),
    LayoutCase("ddp", 2, gradient_accumulation_steps=2),
    LayoutCase("ddp", 4),
    LayoutCase("ddp", 4, gradient_accumulation_steps=2),
    LayoutCase(
        "ddp-small-buckets-static", 2, {"layout.bucket_mb": 0.01, "layout.ddp_static_graph": True}, models=("dense",)
    ),
    LayoutCase("zero3", 2, {"layout.data_parallel": "zero3"}),
    LayoutCase("zero3", 2, {"layout.data_parallel": "zero3"}, gradient_accumulation_steps=2),
    LayoutCase("zero3", 4, {"layout.data_parallel": "zero3"}),
    LayoutCase("zero3", 4, {"layout.data_parallel": "zero3"}, gradient_accumulation_steps=2),
    LayoutCase("zero3-recompute-full", 2, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full"}),
    LayoutCase(
        "zero3-whole",
        2,
        {"layout.data_parallel": "zero3", "layout.fsdp_unit": "model", "layout.reshard_after_forward": False},
    ),
    LayoutCase(
        "zero3-sublayer",
        2,
        {"layout.data_parallel": "zero3", "layout.fsdp_unit": "sublayer", "layout.fsdp_prefetch": 2},
    ),
    LayoutCase("zero1", 2, {"layout.data_parallel": "zero1"}),
    LayoutCase("zero1", 2, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}, gradient_accumulation_steps=2),
    LayoutCase("zero1", 4, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}),
    LayoutCase("zero2", 2, {"layout.data_parallel": "zero2"}),
    LayoutCase("zero2", 2, {"layout.data_parallel": "zero2", "layout.bucket_mb": 0.01}, gradient_accumulation_steps=2),
    LayoutCase("zero2", 4, {"layout.data_parallel": "zero2", "layout.bucket_mb": 0.01}),
    LayoutCase("zero2", 1, {"layout.data_parallel": "zero2"}, gradient_accumulation_steps=2),
    LayoutCase("ddp-uneven", 4, {"layout.micro_batch_size": 2, "training.tokens_per_step": 7 * 32}),
    LayoutCase(
        "zero1-uneven",
        4,
        {"layout.data_parallel": "zero1", "training.tokens_per_step": 7 * 32, "layout.micro_batch_size": 1},
    ),
    LayoutCase("server-uneven", 4, {"layout.data_parallel": "parameter_server", "layout.micro_batch_size": 2}),
    LayoutCase("server", 2, {"layout.data_parallel": "parameter_server"}),
    LayoutCase("server", 3, {"layout.data_parallel": "parameter_server"}, gradient_accumulation_steps=2),
    LayoutCase("servers-2", 4, {"layout.data_parallel": "parameter_server", "layout.num_servers": 2}),
    LayoutCase("server-async-0", 3, {"layout.data_parallel": "parameter_server", "layout.max_staleness": 0}),
    LayoutCase(
        "servers-2-async-0",
        4,
        {"layout.data_parallel": "parameter_server", "layout.num_servers": 2, "layout.max_staleness": 0},
    ),
    LayoutCase("hsdp-2x2", 4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    LayoutCase("hsdp-2x2", 4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}, gradient_accumulation_steps=2),
]


def pipeline_case(
    schedule: str, pp: int, world_size: int, models: tuple[str, ...] = DEEP_MODELS, **choices: Any
) -> LayoutCase:
    """Return a row of a pipeline whose ranks have micro-batches of one sequence."""
    name = "-".join([schedule, f"pp{pp}", *map(str, choices.values())])
    changes = {"layout.pp": pp, "layout.schedule": schedule, "layout.micro_batch_size": 1}
    changes |= {key.replace("__", "."): value for key, value in choices.items()}
    return LayoutCase(name, world_size, changes, 8 * pp // world_size, models)


SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
LAYOUT_CASES += [pipeline_case(schedule, 2, 2) for schedule in SCHEDULES]
LAYOUT_CASES += [pipeline_case(schedule, 4, 4) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
LAYOUT_CASES += [pipeline_case(schedule, 4, 4, ("deeper",)) for schedule in ("zb-v", "dualpipe-v")]
LAYOUT_CASES += [pipeline_case("interleaved", 2, 2, layout__virtual_stages=2)]
LAYOUT_CASES += [
    pipeline_case("interleaved", pp, pp, ("deeper",), layout__virtual_stages=v) for pp, v in ((2, 4), (4, 2))
]
LAYOUT_CASES += [pipeline_case(schedule, 2, 4) for schedule in ("1f1b", "zb-h1", "zb-v", "dualpipe-v")]
LAYOUT_CASES += [
    pipeline_case(schedule, 2, 4, layout__data_parallel=data)
    for schedule in ("gpipe", "zb-v")
    for data in ("zero1", "zero2")
]
LAYOUT_CASES += [
    pipeline_case(schedule, 2, 4, layout__data_parallel="zero3") for schedule in ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
]
LAYOUT_CASES += [
    pipeline_case("zb-v", 2, 4, ("deep-tied",), layout__data_parallel="zero3"),
    pipeline_case("zb-h1", 2, 4, layout__data_parallel="zero3", layout__activation_checkpointing="full"),
    pipeline_case("1f1b", 2, 8, layout__data_parallel="hsdp", layout__dp_shard=2),
    pipeline_case("zb-v", 2, 8, layout__data_parallel="zero1"),
    pipeline_case("1f1b", 4, 8, layout__data_parallel="zero3"),
]
LAYOUT_CASES += [
    pipeline_case(schedule, 2, 2, layout__activation_checkpointing="full", layout__recomputed_blocks=blocks)
    for schedule, blocks in (("1f1b", [1, 0]), ("zb-v", 1))
]
LAYOUT_CASES += [
    pipeline_case(schedule, 2, 2, layout__activation_checkpointing=recompute)
    for schedule in ("1f1b", "zb-v")
    for recompute in ("full", "selective")
]
LAYOUT_CASES += [
    pipeline_case("1f1b", 2, 2, ("deep-gpt2",)),
    pipeline_case("zb-h1", 2, 2, ("deep-gpt2",)),
    pipeline_case("zb-v", 2, 2, ("deep-tied",)),
    pipeline_case("1f1b", 2, 2, ("deep-tied",)),
    pipeline_case("zb-h1", 4, 4, ("deep-tied",)),
    pipeline_case("gpipe", 2, 4, ("deep-tied",)),
    pipeline_case("zb-h2", 2, 4, ("deep-tied",), layout__data_parallel="zero1"),
    pipeline_case("dualpipe-v", 2, 4, ("deep-tied",), layout__data_parallel="zero1"),
    pipeline_case("1f1b", 2, 2, layout__micro_batch_size=2),
    pipeline_case("zb-h1", 2, 4, layout__data_parallel="zero1", training__tokens_per_step=7 * 32),
]


def tensor_parallel_case(
    tp: int, world_size: int, models: tuple[str, ...] = ("dense", "moe"), **choices: Any
) -> LayoutCase:
    """Return a row of tensor parallelism, with micro-batches of two sequences (one in a pipeline)."""
    name = "-".join([f"tp{tp}", *(str(value) for value in choices.values())])
    changes = {key.replace("__", "."): value for key, value in choices.items()}
    pp = changes.get("layout.pp", 1)
    shared = pp * changes.get("layout.cp", 1) * changes.setdefault("layout.tp", tp)
    micro_batch = 2 if pp == 1 and world_size <= 4 * shared else 1
    changes["layout.micro_batch_size"] = micro_batch
    return LayoutCase(name, world_size, changes, 8 * shared // world_size // micro_batch, models)


WITHOUT_SEQUENCE_PARALLEL = {"layout__sequence_parallel": False}
LAYOUT_CASES += [
    tensor_parallel_case(tp, tp, **choices) for tp in (2, 4) for choices in ({}, WITHOUT_SEQUENCE_PARALLEL)
]
LAYOUT_CASES += [
    tensor_parallel_case(2, 2, ("gpt2", "tied", "full-norm"), **choices) for choices in ({}, WITHOUT_SEQUENCE_PARALLEL)
]
LAYOUT_CASES += [
    tensor_parallel_case(4, 4, ("uneven", "full-norm"), **choices) for choices in ({}, WITHOUT_SEQUENCE_PARALLEL)
]
LAYOUT_CASES += [tensor_parallel_case(2, 4, layout__data_parallel=data) for data in ("ddp", "zero1", "zero2", "zero3")]
LAYOUT_CASES += [
    tensor_parallel_case(2, 4, layout__data_parallel="zero3", **WITHOUT_SEQUENCE_PARALLEL),
    tensor_parallel_case(8, 8, ("wide",)),
]
LAYOUT_CASES += [
    tensor_parallel_case(2, 4, layout__data_parallel="zero3", layout__activation_checkpointing=recompute)
    for recompute in ("full", "selective")
]
LAYOUT_CASES += [tensor_parallel_case(2, 8, ("moe",), layout__data_parallel="hsdp", layout__dp_shard=2)]
RECOMPUTED_NORMS = {"layout__activation_checkpointing": "norms"}
LAYOUT_CASES += [
    LayoutCase("one-recompute-norms", 1, {"layout.activation_checkpointing": "norms"}),
    LayoutCase(
        "zero3-recompute-norms", 2, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "norms"}
    ),
    tensor_parallel_case(2, 2, **RECOMPUTED_NORMS),
    pipeline_case("zb-h1", 2, 2, **RECOMPUTED_NORMS),
]
OFFLOADED_INPUTS = {"layout__activation_checkpointing": "offload"}
LAYOUT_CASES += [
    LayoutCase("ddp-recompute-offload", 2, {"layout.activation_checkpointing": "offload"}, 2),
    LayoutCase(
        "zero3-recompute-offload", 2, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "offload"}
    ),
    tensor_parallel_case(2, 2, **OFFLOADED_INPUTS),
    tensor_parallel_case(2, 4, layout__data_parallel="zero3", **OFFLOADED_INPUTS),
    pipeline_case("1f1b", 2, 2, layout__recomputed_blocks=[1, 2], **OFFLOADED_INPUTS),
    pipeline_case("zb-v", 2, 2, **OFFLOADED_INPUTS),
    pipeline_case("zb-h1", 2, 4, layout__data_parallel="zero3", **OFFLOADED_INPUTS),
    pipeline_case("interleaved", 2, 2, layout__virtual_stages=2, **OFFLOADED_INPUTS),
]
LAYOUT_CASES += [tensor_parallel_case(4, 8, ("dense",), layout__data_parallel="zero1")]
LAYOUT_CASES += [
    tensor_parallel_case(2, 4, ("moe",), layout__data_parallel=data, optimizer__name="muon")
    for data in ("ddp", "zero3")
]
LAYOUT_CASES += [
    tensor_parallel_case(2, 4, models, layout__pp=2, layout__schedule=schedule)
    for schedule, models in (
        ("1f1b", (*DEEP_MODELS, "deep-tied")),
        ("zb-h1", ("deep-moe", "deep-tied")),
        ("zb-v", DEEP_MODELS),
    )
]
LAYOUT_CASES += [
    tensor_parallel_case(2, 8, ("deep-moe",), layout__pp=2, layout__schedule="zb-h1", layout__data_parallel="zero3"),
    tensor_parallel_case(2, 8, ("deep",), layout__pp=2, layout__schedule="dualpipe-v", layout__data_parallel="zero1"),
    tensor_parallel_case(
        2,
        8,
        ("deep-moe",),
        layout__pp=2,
        layout__schedule="zb-v",
        layout__activation_checkpointing="full",
        **WITHOUT_SEQUENCE_PARALLEL,
    ),
    tensor_parallel_case(4, 8, ("deep",), layout__pp=2, layout__schedule="interleaved", layout__virtual_stages=2),
]


def context_parallel_case(
    cp: int, world_size: int, models: tuple[str, ...] = ("dense", "moe"), **choices: Any
) -> LayoutCase:
    """Return a row of context parallelism, with micro-batches of two sequences (one in a pipeline)."""
    row = tensor_parallel_case(1, world_size, models, layout__cp=cp, **choices)
    return replace(row, name=row.name.replace("tp1-", "cp"))


ULYSSES = {"layout__cp_method": "ulysses"}
LAYOUT_CASES += [context_parallel_case(cp, cp, **choices) for cp in (2, 4) for choices in ({}, ULYSSES)]
LAYOUT_CASES += [context_parallel_case(2, 2, ("gpt2", "tied", "full-norm"), **choices) for choices in ({}, ULYSSES)]
LAYOUT_CASES += [context_parallel_case(2, 4, layout__data_parallel=data) for data in ("ddp", "zero1", "zero2", "zero3")]
LAYOUT_CASES += [
    context_parallel_case(2, 4, ("moe",), **ULYSSES, layout__data_parallel=data) for data in ("zero1", "zero3")
]
LAYOUT_CASES += [
    context_parallel_case(2, 4, layout__tp=2, **choices) for choices in ({}, ULYSSES, WITHOUT_SEQUENCE_PARALLEL)
]
LAYOUT_CASES += [
    context_parallel_case(
        2, 8, ("moe",), layout__tp=2, layout__data_parallel="zero3", layout__activation_checkpointing="full"
    )
]
LAYOUT_CASES += [context_parallel_case(2, 8, ("moe",), layout__data_parallel="hsdp", layout__dp_shard=2)]
LAYOUT_CASES += [context_parallel_case(4, 8, ("dense",), layout__data_parallel="zero2")]
LAYOUT_CASES += [
    context_parallel_case(2, 4, DEEP_MODELS, layout__pp=2, layout__schedule="zb-v"),
    context_parallel_case(2, 4, ("deep-tied",), layout__pp=2, layout__schedule="1f1b", **ULYSSES),
    context_parallel_case(2, 8, ("deep-moe",), layout__pp=2, layout__tp=2, layout__schedule="zb-h1"),
    context_parallel_case(
        2, 8, ("deep-moe",), layout__pp=2, layout__schedule="dualpipe-v", layout__data_parallel="zero3"
    ),
]


def expert_parallel_case(ep: int, world_size: int, models: tuple[str, ...] = ("moe",), **choices: Any) -> LayoutCase:
    """Return a row of expert parallelism, with micro-batches of two sequences (one in a pipeline)."""
    row = tensor_parallel_case(1, world_size, models, layout__ep=ep, **choices)
    return replace(row, name=row.name.replace("tp1-", "ep"))


LAYOUT_CASES += [
    LayoutCase("ddp", 2, models=("capacity",)),
    expert_parallel_case(2, 2, ("capacity",)),
    tensor_parallel_case(2, 2, ("capacity",), **WITHOUT_SEQUENCE_PARALLEL),
]
LAYOUT_CASES += [
    expert_parallel_case(2, 4, ("capacity",), layout__data_parallel="zero3", layout__activation_checkpointing=recompute)
    for recompute in ("full", "offload")
]
LAYOUT_CASES += [
    tensor_parallel_case(tp, tp, ("three-heads",), layout__tp_attention="gathered", **choices)
    for tp in (2, 4)
    for choices in ({}, WITHOUT_SEQUENCE_PARALLEL)
]
LAYOUT_CASES += [
    LayoutCase("ep3", 3, {"layout.ep": 3, "training.tokens_per_step": 6 * 32}, models=("six-experts",)),
    LayoutCase("tp2-uneven", 4, UNEVEN_TP_BATCH, models=("moe",)),
]
LAYOUT_CASES += [
    LayoutCase(
        "zero1-muon-more-ranks-than-rows",
        8,
        {"layout.data_parallel": "zero1", "optimizer.name": "muon"},
        models=("moe",),
    )
]
LAYOUT_CASES += [LayoutCase("cp2-muon", 2, {"layout.cp": 2, "optimizer.name": "muon"})]
LAYOUT_CASES += [tensor_parallel_case(4, 4, optimizer__name="muon")]
DATA_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
LAYOUT_CASES += [
    expert_parallel_case(ep, n, layout__data_parallel=data)
    for ep, n in ((2, 2), (2, 4), (4, 4))
    for data in DATA_STRATEGIES
]
LAYOUT_CASES += [expert_parallel_case(2, 4, layout__tp=2, layout__data_parallel=data) for data in DATA_STRATEGIES]
LAYOUT_CASES += [
    expert_parallel_case(4, 4, layout__cp=2, layout__data_parallel=data) for data in ("ddp", "zero1", "zero3")
]
LAYOUT_CASES += [
    expert_parallel_case(2, 4, layout__tp=4, layout__data_parallel=data) for data in ("ddp", "zero1", "zero3")
]
LAYOUT_CASES += [
    expert_parallel_case(2, 4, layout__data_parallel="zero3", layout__activation_checkpointing=recompute)
    for recompute in ("full", "selective")
]
LAYOUT_CASES += [
    expert_parallel_case(2, 2, layout__data_parallel="zero3", **RECOMPUTED_NORMS),
    context_parallel_case(2, 2, ("dense",), **RECOMPUTED_NORMS),
]
LAYOUT_CASES += [
    expert_parallel_case(2, 4, layout__data_parallel=data, optimizer__name="muon") for data in ("ddp", "zero1", "zero3")
]
LAYOUT_CASES += [
    expert_parallel_case(2, 4, ("deep-moe",), layout__pp=2, layout__schedule=schedule, layout__data_parallel=data)
    for schedule, data in (("1f1b", "ddp"), ("zb-h1", "zero1"), ("zb-v", "zero3"))
]
LAYOUT_CASES += [
    expert_parallel_case(2, 4, layout__data_parallel="hsdp", layout__dp_shard=2),
    expert_parallel_case(2, 8, layout__data_parallel="hsdp", layout__dp_shard=4),
    expert_parallel_case(4, 8, layout__tp=2, layout__cp=2, layout__data_parallel="zero3"),
    expert_parallel_case(
        2, 8, ("deep-moe",), layout__pp=2, layout__tp=2, layout__schedule="zb-v", layout__data_parallel="zero1"
    ),
    expert_parallel_case(
        4, 8, ("deep-moe",), layout__pp=2, layout__cp=2, layout__schedule="dualpipe-v", layout__data_parallel="zero3"
    ),
]
PIPELINE_OUTERMOST = {"layout__rank_order": "pipeline_outer"}
LAYOUT_CASES += [
    pipeline_case("zb-v", 2, 4, layout__data_parallel="zero1", **PIPELINE_OUTERMOST),
    expert_parallel_case(2, 4, ("deep-moe",), layout__pp=2, layout__data_parallel="zero3", **PIPELINE_OUTERMOST),
    expert_parallel_case(
        4, 8, ("deep-moe",), layout__pp=2, layout__cp=2, layout__data_parallel="zero1", **PIPELINE_OUTERMOST
    ),
    tensor_parallel_case(
        2, 8, ("deep-tied",), layout__pp=2, layout__data_parallel="hsdp", layout__dp_shard=1, **PIPELINE_OUTERMOST
    ),
]
CPU_OFFLOAD = {"layout__offload": "cpu"}
LAYOUT_CASES += [
    tensor_parallel_case(2, world_size, layout__data_parallel=data, **CPU_OFFLOAD)
    for world_size, data in ((2, "zero1"), (4, "zero2"), (4, "zero3"))
]
LAYOUT_CASES += [
    context_parallel_case(2, world_size, layout__data_parallel=data, **CPU_OFFLOAD)
    for world_size, data in ((2, "zero2"), (4, "zero3"))
]
LAYOUT_CASES += [
    expert_parallel_case(2, world_size, layout__data_parallel=data, **CPU_OFFLOAD)
    for world_size in (2, 4)
    for data in ("zero1", "zero2", "zero3")
]
LAYOUT_CASES += [
    pipeline_case("1f1b", 2, 2, layout__data_parallel="zero1", **CPU_OFFLOAD),
    pipeline_case("zb-v", 2, 4, layout__data_parallel="zero2", **CPU_OFFLOAD),
]
LAYOUT_CASES += [
    pipeline_case("zb-h1", 2, 4, layout__data_parallel="zero3", **CPU_OFFLOAD),
    pipeline_case("zb-h1", 2, 4, ("deep-tied",), layout__data_parallel="zero1", **CPU_OFFLOAD),
]
LAYOUT_CASES += [
    tensor_parallel_case(2, 8, ("deep-moe",), layout__pp=2, layout__ep=2, layout__data_parallel=data, **CPU_OFFLOAD)
    for data in ("zero2", "zero3")
]
NVME_OFFLOAD = {"layout.offload": "nvme", "layout.offload_directory": tempfile.gettempdir()}
LAYOUT_CASES += [
    LayoutCase(
        f"{axis}2-{data}-nvme", 4, {f"layout.{axis}": 2, "layout.data_parallel": data, **NVME_OFFLOAD}, models=("moe",)
    )
    for axis, data in (("tp", "zero2"), ("cp", "zero3"), ("ep", "zero1"))
]
LAYOUT_CASES += [
    tensor_parallel_case(
        2, 4, ("moe",), layout__ep=2, layout__data_parallel=data, optimizer__name="muon", **CPU_OFFLOAD
    )
    for data in ("zero1", "zero3")
]
FEWER_EXPERTS_THAN_RANKS = (
    {"layout.data_parallel": "zero1"},
    {"layout.data_parallel": "zero1", "optimizer.name": "muon"},
    {"layout.data_parallel": "zero2", "layout.offload": "cpu"},
    {"layout.data_parallel": "zero3"},
    {"layout.data_parallel": "zero3", "optimizer.name": "muon"},
    {"layout.data_parallel": "zero1", "layout.ep": 2},
    {"layout.data_parallel": "zero3", "layout.ep": 2},
)
LAYOUT_CASES += [
    LayoutCase("-".join(map(str, changes.values())), 4, changes, models=("two-experts",))
    for changes in FEWER_EXPERTS_THAN_RANKS
]
PARITY_CASES = [
    pytest.param(
        row,
        model,
        id=f"{row.name}-x{row.ranks}-acc{row.gradient_accumulation_steps}-{model}",
    )
    for row in LAYOUT_CASES
    for model in row.models
]
DATA_PARALLEL_SETTINGS = {data: {"layout.data_parallel": data} for data in ("ddp", "zero1", "zero2", "zero3")}
DATA_PARALLEL_SETTINGS["hsdp"] = {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}
DATA_PARALLEL_SETTINGS["parameter_server"] = {"layout.data_parallel": "parameter_server"}
OPTIMIZERS = {
    "muon": {"optimizer.name": "muon"},
    "sgd": {"optimizer.name": "sgd"},
    "no-clip": {"optimizer.max_grad_norm": 0.0},
}


@pytest.fixture(scope="module")
def text(documents: Path) -> Path:
    return documents


@pytest.fixture(scope="session")
def step_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The number of steps that every row trains."""
    return {"training.steps": 20 if request.config.getoption("all") else 5}


@cache
def single_process_trajectory(
    text: Path, model: str, changes: tuple[tuple[str, Any], ...]
) -> list[tuple[float, float]]:
    """Return the trajectory of one process."""
    return train_and_evaluate(
        small_run(text, text.parent / f"reference-{model}", {"model": MODELS[model], **dict(changes)})
    )


def reference_trajectory(text: Path, model: str, changes: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the trajectory of one process with those changes of a layout that apply to it: steps, batch and
    optimizer."""
    return single_process_trajectory(
        text,
        model,
        tuple((key, value) for key, value in changes.items() if key.startswith(("training.", "optimizer."))),
    )


def layout_settings(row: LayoutCase, model: str) -> dict[str, Any]:
    servers = row.changes.get("layout.num_servers", 1) if "server" in row.name else 0
    micro_batch = 8 // (row.ranks - servers) // row.gradient_accumulation_steps
    return {"model": MODELS[model], "layout.micro_batch_size": micro_batch, **row.changes}


@pytest.mark.parametrize(("case", "model"), PARITY_CASES)
def test_layout_equals_single_process_training_in_fp64(
    case: LayoutCase, model: str, text: Path, step_settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**layout_settings(case, model), **step_settings}
    run, expected = small_run(text, tmp_path, changes), reference_trajectory(text, model, changes)
    results = [train_and_evaluate(run)] if case.ranks == 1 else rank_pool(case.ranks).run(train_and_evaluate, run)
    for rank, result in enumerate(results):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


# Any two of data, optimizer, ranks and model occur together: the models alternate.
OPTIMIZER_CASES = [
    (data, optimizer, n, ("dense", "moe")[(row + column + n // 4) % 2])
    for row, data in enumerate(DATA_PARALLEL_SETTINGS)
    for column, optimizer in enumerate(OPTIMIZERS)
    for n in (2, 4)
    if not (data == "hsdp" and n == 2)
]


@pytest.mark.parametrize(("data", "optimizer", "world_size", "model"), OPTIMIZER_CASES)
def test_optimizer_with_data_parallelism_equals_single_process(
    data: str, optimizer: str, world_size: int, model: str, text: Path, step_settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = OPTIMIZERS[optimizer]
    run = small_run(
        text, tmp_path, {"model": MODELS[model], **DATA_PARALLEL_SETTINGS[data], **changes, **step_settings}
    )
    expected = reference_trajectory(text, model, {**changes, **step_settings})
    for rank, result in enumerate(rank_pool(world_size).run(train_and_evaluate, run)):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


BF16_CASES = [LayoutCase(data, 2, {"layout.data_parallel": data}) for data in DATA_STRATEGIES]
BF16_CASES += [LayoutCase("ddp-bf16-wire", 2, {"layout.gradient_compression": "bf16"})]
BF16_CASES += [
    LayoutCase("hsdp-2x2", 4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}, gradient_accumulation_steps=2)
]
BF16_CASES += [LayoutCase("zero2", 2, {"layout.data_parallel": "zero2"}, gradient_accumulation_steps=2)]
BF16_CASES += [pipeline_case("1f1b", 2, 2), pipeline_case("zb-h1", 2, 4, layout__data_parallel="zero1")]
BF16_CASES += [pipeline_case("1f1b", 2, 4, layout__data_parallel="zero3")]
BF16_CASES += [pipeline_case("zb-h1", 2, 4, layout__data_parallel="zero3", training__tokens_per_step=4 * 32)]
BF16_CASES += [
    tensor_parallel_case(2, 2),
    tensor_parallel_case(2, 4, layout__data_parallel="zero1", **WITHOUT_SEQUENCE_PARALLEL),
    tensor_parallel_case(2, 4, layout__data_parallel="zero3"),
]
BF16_CASES += [
    context_parallel_case(2, 2),
    context_parallel_case(2, 2, **ULYSSES),
    context_parallel_case(2, 4, layout__data_parallel="zero3"),
]
BF16_CASES += [expert_parallel_case(2, 2), expert_parallel_case(2, 4, layout__tp=2, layout__data_parallel="zero3")]


@pytest.mark.parametrize(
    ("case", "model"),
    [
        pytest.param(row, model, id=f"{row.name}-x{row.ranks}-acc{row.gradient_accumulation_steps}-{model}")
        for row in BF16_CASES
        for model in ("dense", "moe")
        if model == "moe" or "layout.ep" not in row.changes
    ],
)
def test_layout_loss_in_bf16_is_close_to_single_process(
    case: LayoutCase, model: str, text: Path, step_settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**layout_settings(case, model), **step_settings, "training.precision": "bf16"}
    run, expected = small_run(text, tmp_path, changes), reference_trajectory(text, model, changes)
    result = rank_pool(case.ranks).run(train_and_evaluate, run)[0]
    assert [loss for loss, _ in result] == pytest.approx([loss for loss, _ in expected], rel=0.02)


@pytest.mark.parametrize(("sequences", "offload"), [(2, "none"), (4, "cpu"), (8, "none")])
def test_split_backward_schedule_equals_1f1b_bitwise_in_bf16(
    sequences: int, offload: str, text: Path, step_settings: dict[str, Any], tmp_path: Path
) -> None:
    """Gradients of micro-batches are summed in fp32. This also holds where all second halves come after the last first
    half."""
    changes = {"layout.data_parallel": "zero3", "layout.offload": offload, "training.tokens_per_step": sequences * 32}
    changes |= {"model": MODELS["deep-moe"], "training.precision": "bf16", **step_settings}
    full, split = (
        small_run(text, tmp_path / schedule, {**changes, **pipeline_case(schedule, 2, 4).changes})
        for schedule in ("1f1b", "zb-h1")
    )
    assert rank_pool(4).run(train_and_evaluate, split) == rank_pool(4).run(train_and_evaluate, full)


def test_pipeline_schedule_from_csv_equals_single_process(
    text: Path, step_settings: dict[str, Any], tmp_path: Path
) -> None:
    """The order comes from a search and is written as CSV. The error for an order that cannot run names the first
    violation."""
    file = tmp_path / "searched.csv"
    times = ActionTimes(forward=2, input_grad=3, weight_grad=2, transfer=1)
    file.write_text(to_csv(search_schedule(2, 8, times, Fraction(2), moves=200)))
    changes = {"layout.pp": 2, "layout.schedule_file": str(file), "layout.micro_batch_size": 1}
    for model in DEEP_MODELS:
        run = small_run(text, tmp_path, {"model": MODELS[model], **changes, **step_settings})
        expected = reference_trajectory(text, model, step_settings)
        for rank, result in enumerate(rank_pool(2).run(train_and_evaluate, run)):
            assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0].replace("0F0,", "", 1), *lines[1:]]))
    load_schedule_csv.cache_clear()
    with pytest.raises(UserError, match=r"0F0"):
        check_layout(ResolvedRun(run, 2))


def test_parity_comparison_detects_learning_rate_change_of_one_millionth(
    text: Path, step_settings: dict[str, Any], tmp_path: Path
) -> None:
    changed = train_and_evaluate(
        small_run(text, tmp_path, {"optimizer.learning_rate": 0.01 * (1 + 1e-6), **step_settings})
    )
    assert changed != [pytest.approx(step, rel=1e-10) for step in reference_trajectory(text, "dense", step_settings)]


def test_random_layouts_equal_single_process(text: Path) -> None:
    for world_size, model, layers, changes in draw_valid_layouts(seed=7, count=6, text=text):
        assert max_relative_difference(text, world_size, model, layers, changes) < 1e-10, (
            world_size,
            model,
            layers,
            changes,
        )
