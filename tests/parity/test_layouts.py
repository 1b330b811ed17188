"""The one table of layouts: each must give one process's losses and gradient norms, and the held-out loss of what was
trained, in fp64 to 1e-10 relative. `make parity` trains each for 20 steps; `make test` for 5, and layouts of four ranks
and more only with the last of their models.

A new strategy is proven by adding rows."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.exact.layout_checks import check_pipeline
from phalanx.schedule.registry import load_schedule_csv
from phalanx.schedule.schedule import to_csv
from phalanx.schedule.search import search_schedule
from phalanx.schedule.simulate import ActionTimes
from phalanx.spec.errors import UserError
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, GPT2, MOE, described, proof
from tests.parity.fuzz import difference, layouts

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
UNEVEN = {"layout.tp": 2, "training.tokens_per_step": 7 * 32, "layout.micro_batch_size": 1}
MODELS["capacity"] = {**MOE, "moe": {**MOE["moe"], "capacity_factor": 0.75}}
MODELS["three-heads"] = {**DENSE, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 36}
MODELS |= {"uneven": {**DENSE, "vocab_size": 263}, "wide": {**MOE, "num_heads": 8, "num_kv_heads": 4}}
DEEP = ("deep", "deep-moe")


@dataclass(frozen=True)
class Row:
    """A layout: its ranks, what it changes in the run file, and the micro-batches of 8 sequences over all ranks."""

    name: str
    ranks: int
    changes: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    models: tuple[str, ...] = ("dense", "moe")


ROWS = [
    Row("one", 1, accumulation=4),
    Row("one-recompute-full", 1, {"layout.activation_checkpointing": "full"}),
    Row("one-recompute-selective", 1, {"layout.activation_checkpointing": "selective"}),
    Row("ddp", 2),
    Row("ddp", 2, accumulation=2),
    Row("ddp", 4),
    Row("ddp", 4, accumulation=2),
    Row("ddp-small-buckets-static", 2, {"layout.bucket_mb": 0.01, "layout.ddp_static_graph": True}, models=("dense",)),
    Row("zero3", 2, {"layout.data_parallel": "zero3"}),
    Row("zero3", 2, {"layout.data_parallel": "zero3"}, accumulation=2),
    Row("zero3", 4, {"layout.data_parallel": "zero3"}),
    Row("zero3", 4, {"layout.data_parallel": "zero3"}, accumulation=2),
    Row("zero3-recompute-full", 2, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full"}),
    Row(
        "zero3-whole",
        2,
        {"layout.data_parallel": "zero3", "layout.fsdp_unit": "model", "layout.reshard_after_forward": False},
    ),
    Row(
        "zero3-sublayer",
        2,
        {"layout.data_parallel": "zero3", "layout.fsdp_unit": "sublayer", "layout.fsdp_prefetch": 2},
    ),
    Row("zero1", 2, {"layout.data_parallel": "zero1"}),
    Row("zero1", 2, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}, accumulation=2),
    Row("zero1", 4, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.01}),
    Row("zero2", 2, {"layout.data_parallel": "zero2"}),
    Row("zero2", 2, {"layout.data_parallel": "zero2", "layout.bucket_mb": 0.01}, accumulation=2),
    Row("zero2", 4, {"layout.data_parallel": "zero2", "layout.bucket_mb": 0.01}),
    Row("zero2", 1, {"layout.data_parallel": "zero2"}, accumulation=2),
    Row("ddp-uneven", 4, {"layout.micro_batch_size": 2, "training.tokens_per_step": 7 * 32}),
    Row(
        "zero1-uneven",
        4,
        {"layout.data_parallel": "zero1", "training.tokens_per_step": 7 * 32, "layout.micro_batch_size": 1},
    ),
    Row("server-uneven", 4, {"layout.data_parallel": "parameter_server", "layout.micro_batch_size": 2}),
    Row("server", 2, {"layout.data_parallel": "parameter_server"}),
    Row("server", 3, {"layout.data_parallel": "parameter_server"}, accumulation=2),
    Row("servers-2", 4, {"layout.data_parallel": "parameter_server", "layout.num_servers": 2}),
    Row("server-async-0", 3, {"layout.data_parallel": "parameter_server", "layout.max_staleness": 0}),
    Row(
        "servers-2-async-0",
        4,
        {"layout.data_parallel": "parameter_server", "layout.num_servers": 2, "layout.max_staleness": 0},
    ),
    Row("hsdp-2x2", 4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    Row("hsdp-2x2", 4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}, accumulation=2),
]


def pipeline(schedule: str, pp: int, world_size: int, models: tuple[str, ...] = DEEP, **choices: Any) -> Row:
    """A row of a pipeline whose ranks have micro-batches of one sequence."""
    name = "-".join([schedule, f"pp{pp}", *map(str, choices.values())])
    changes = {"layout.pp": pp, "layout.schedule": schedule, "layout.micro_batch_size": 1}
    changes |= {key.replace("__", "."): value for key, value in choices.items()}
    return Row(name, world_size, changes, 8 * pp // world_size, models)


SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
ROWS += [pipeline(schedule, 2, 2) for schedule in SCHEDULES]
ROWS += [pipeline(schedule, 4, 4) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
ROWS += [pipeline(schedule, 4, 4, ("deeper",)) for schedule in ("zb-v", "dualpipe-v")]
ROWS += [pipeline("interleaved", 2, 2, layout__virtual_stages=2)]
ROWS += [pipeline("interleaved", pp, pp, ("deeper",), layout__virtual_stages=v) for pp, v in ((2, 4), (4, 2))]
ROWS += [pipeline(schedule, 2, 4) for schedule in ("1f1b", "zb-h1", "zb-v", "dualpipe-v")]
ROWS += [
    pipeline(schedule, 2, 4, layout__data_parallel=data)
    for schedule in ("gpipe", "zb-v")
    for data in ("zero1", "zero2")
]
ROWS += [
    pipeline(schedule, 2, 4, layout__data_parallel="zero3") for schedule in ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
]
ROWS += [
    pipeline("zb-v", 2, 4, ("deep-tied",), layout__data_parallel="zero3"),
    pipeline("zb-h1", 2, 4, layout__data_parallel="zero3", layout__activation_checkpointing="full"),
    pipeline("1f1b", 2, 8, layout__data_parallel="hsdp", layout__dp_shard=2),
    pipeline("zb-v", 2, 8, layout__data_parallel="zero1"),
    pipeline("1f1b", 4, 8, layout__data_parallel="zero3"),
]
ROWS += [
    pipeline(schedule, 2, 2, layout__activation_checkpointing=recompute)
    for schedule in ("1f1b", "zb-v")
    for recompute in ("full", "selective")
]
ROWS += [
    pipeline("1f1b", 2, 2, ("deep-gpt2",)),
    pipeline("zb-h1", 2, 2, ("deep-gpt2",)),
    pipeline("zb-v", 2, 2, ("deep-tied",)),
    pipeline("1f1b", 2, 2, ("deep-tied",)),
    pipeline("zb-h1", 4, 4, ("deep-tied",)),
    pipeline("gpipe", 2, 4, ("deep-tied",)),
    pipeline("zb-h2", 2, 4, ("deep-tied",), layout__data_parallel="zero1"),
    pipeline("dualpipe-v", 2, 4, ("deep-tied",), layout__data_parallel="zero1"),
    pipeline("1f1b", 2, 2, layout__micro_batch_size=2),
    pipeline("zb-h1", 2, 4, layout__data_parallel="zero1", training__tokens_per_step=7 * 32),
]


def tensor(tp: int, world_size: int, models: tuple[str, ...] = ("dense", "moe"), **choices: Any) -> Row:
    """A row of tensor parallelism, with micro-batches of two sequences (one in a pipeline)."""
    name = "-".join([f"tp{tp}", *(str(value) for value in choices.values())])
    changes = {key.replace("__", "."): value for key, value in choices.items()}
    pp = changes.get("layout.pp", 1)
    shared = pp * changes.get("layout.cp", 1) * changes.setdefault("layout.tp", tp)
    micro_batch = 2 if pp == 1 and world_size <= 4 * shared else 1
    changes["layout.micro_batch_size"] = micro_batch
    return Row(name, world_size, changes, 8 * shared // world_size // micro_batch, models)


APART = {"layout__sequence_parallel": False}
ROWS += [tensor(tp, tp, **choices) for tp in (2, 4) for choices in ({}, APART)]
ROWS += [tensor(2, 2, ("gpt2", "tied", "full-norm"), **choices) for choices in ({}, APART)]
ROWS += [tensor(4, 4, ("uneven", "full-norm"), **choices) for choices in ({}, APART)]
ROWS += [tensor(2, 4, layout__data_parallel=data) for data in ("ddp", "zero1", "zero2", "zero3")]
ROWS += [tensor(2, 4, layout__data_parallel="zero3", **APART), tensor(8, 8, ("wide",))]
ROWS += [
    tensor(2, 4, layout__data_parallel="zero3", layout__activation_checkpointing=recompute)
    for recompute in ("full", "selective")
]
ROWS += [tensor(2, 8, ("moe",), layout__data_parallel="hsdp", layout__dp_shard=2)]
ROWS += [tensor(4, 8, ("dense",), layout__data_parallel="zero1")]
ROWS += [tensor(2, 4, ("moe",), layout__data_parallel=data, optimizer__name="muon") for data in ("ddp", "zero3")]
ROWS += [
    tensor(2, 4, models, layout__pp=2, layout__schedule=schedule)
    for schedule, models in (("1f1b", (*DEEP, "deep-tied")), ("zb-h1", ("deep-moe", "deep-tied")), ("zb-v", DEEP))
]
ROWS += [
    tensor(2, 8, ("deep-moe",), layout__pp=2, layout__schedule="zb-h1", layout__data_parallel="zero3"),
    tensor(2, 8, ("deep",), layout__pp=2, layout__schedule="dualpipe-v", layout__data_parallel="zero1"),
    tensor(
        2, 8, ("deep-moe",), layout__pp=2, layout__schedule="zb-v", layout__activation_checkpointing="full", **APART
    ),
    tensor(4, 8, ("deep",), layout__pp=2, layout__schedule="interleaved", layout__virtual_stages=2),
]


def context(cp: int, world_size: int, models: tuple[str, ...] = ("dense", "moe"), **choices: Any) -> Row:
    """A row of context parallelism, with micro-batches of two sequences (one in a pipeline)."""
    row = tensor(1, world_size, models, layout__cp=cp, **choices)
    return replace(row, name=row.name.replace("tp1-", "cp"))


ULYSSES = {"layout__cp_method": "ulysses"}
ROWS += [context(cp, cp, **choices) for cp in (2, 4) for choices in ({}, ULYSSES)]
ROWS += [context(2, 2, ("gpt2", "tied", "full-norm"), **choices) for choices in ({}, ULYSSES)]
ROWS += [context(2, 4, layout__data_parallel=data) for data in ("ddp", "zero1", "zero2", "zero3")]
ROWS += [context(2, 4, ("moe",), **ULYSSES, layout__data_parallel=data) for data in ("zero1", "zero3")]
ROWS += [context(2, 4, layout__tp=2, **choices) for choices in ({}, ULYSSES, APART)]
ROWS += [context(2, 8, ("moe",), layout__tp=2, layout__data_parallel="zero3", layout__activation_checkpointing="full")]
ROWS += [context(2, 8, ("moe",), layout__data_parallel="hsdp", layout__dp_shard=2)]
ROWS += [context(4, 8, ("dense",), layout__data_parallel="zero2")]
ROWS += [
    context(2, 4, DEEP, layout__pp=2, layout__schedule="zb-v"),
    context(2, 4, ("deep-tied",), layout__pp=2, layout__schedule="1f1b", **ULYSSES),
    context(2, 8, ("deep-moe",), layout__pp=2, layout__tp=2, layout__schedule="zb-h1"),
    context(2, 8, ("deep-moe",), layout__pp=2, layout__schedule="dualpipe-v", layout__data_parallel="zero3"),
]


def expert(ep: int, world_size: int, models: tuple[str, ...] = ("moe",), **choices: Any) -> Row:
    """A row of expert parallelism, with micro-batches of two sequences (one in a pipeline)."""
    row = tensor(1, world_size, models, layout__ep=ep, **choices)
    return replace(row, name=row.name.replace("tp1-", "ep"))


ROWS += [Row("ddp", 2, models=("capacity",)), expert(2, 2, ("capacity",)), tensor(2, 2, ("capacity",), **APART)]
ROWS += [expert(2, 4, ("capacity",), layout__data_parallel="zero3", layout__activation_checkpointing="full")]
ROWS += [
    tensor(tp, tp, ("three-heads",), layout__tp_attention="gathered", **choices)
    for tp in (2, 4)
    for choices in ({}, APART)
]
ROWS += [
    Row("ep3", 3, {"layout.ep": 3, "training.tokens_per_step": 6 * 32}, models=("six-experts",)),
    Row("tp2-uneven", 4, UNEVEN, models=("moe",)),
]
ROWS += [
    Row(
        "zero1-muon-more-ranks-than-rows",
        8,
        {"layout.data_parallel": "zero1", "optimizer.name": "muon"},
        models=("moe",),
    )
]
ROWS += [Row("cp2-muon", 2, {"layout.cp": 2, "optimizer.name": "muon"})]
ROWS += [tensor(4, 4, optimizer__name="muon")]
FAMILY = ("ddp", "zero1", "zero2", "zero3")
ROWS += [expert(ep, n, layout__data_parallel=data) for ep, n in ((2, 2), (2, 4), (4, 4)) for data in FAMILY]
ROWS += [expert(2, 4, layout__tp=2, layout__data_parallel=data) for data in FAMILY]
ROWS += [expert(4, 4, layout__cp=2, layout__data_parallel=data) for data in ("ddp", "zero1", "zero3")]
ROWS += [expert(2, 4, layout__tp=4, layout__data_parallel=data) for data in ("ddp", "zero1", "zero3")]
ROWS += [
    expert(2, 4, layout__data_parallel="zero3", layout__activation_checkpointing=recompute)
    for recompute in ("full", "selective")
]
ROWS += [expert(2, 4, layout__data_parallel=data, optimizer__name="muon") for data in ("ddp", "zero1", "zero3")]
ROWS += [
    expert(2, 4, ("deep-moe",), layout__pp=2, layout__schedule=schedule, layout__data_parallel=data)
    for schedule, data in (("1f1b", "ddp"), ("zb-h1", "zero1"), ("zb-v", "zero3"))
]
ROWS += [
    expert(2, 4, layout__data_parallel="hsdp", layout__dp_shard=2),
    expert(2, 8, layout__data_parallel="hsdp", layout__dp_shard=4),
    expert(4, 8, layout__tp=2, layout__cp=2, layout__data_parallel="zero3"),
    expert(2, 8, ("deep-moe",), layout__pp=2, layout__tp=2, layout__schedule="zb-v", layout__data_parallel="zero1"),
    expert(
        4, 8, ("deep-moe",), layout__pp=2, layout__cp=2, layout__schedule="dualpipe-v", layout__data_parallel="zero3"
    ),
]
OUTERMOST = {"layout__rank_order": "pipeline_outer"}
ROWS += [
    pipeline("zb-v", 2, 4, layout__data_parallel="zero1", **OUTERMOST),
    expert(2, 4, ("deep-moe",), layout__pp=2, layout__data_parallel="zero3", **OUTERMOST),
    expert(4, 8, ("deep-moe",), layout__pp=2, layout__cp=2, layout__data_parallel="zero1", **OUTERMOST),
    tensor(2, 8, ("deep-tied",), layout__pp=2, layout__data_parallel="hsdp", layout__dp_shard=1, **OUTERMOST),
]
CPU = {"layout__offload": "cpu"}
ROWS += [
    tensor(2, world_size, layout__data_parallel=data, **CPU)
    for world_size, data in ((2, "zero1"), (4, "zero2"), (4, "zero3"))
]
ROWS += [context(2, world_size, layout__data_parallel=data, **CPU) for world_size, data in ((2, "zero2"), (4, "zero3"))]
ROWS += [
    expert(2, world_size, layout__data_parallel=data, **CPU)
    for world_size in (2, 4)
    for data in ("zero1", "zero2", "zero3")
]
ROWS += [
    pipeline("1f1b", 2, 2, layout__data_parallel="zero1", **CPU),
    pipeline("zb-v", 2, 4, layout__data_parallel="zero2", **CPU),
]
ROWS += [
    pipeline("zb-h1", 2, 4, layout__data_parallel="zero3", **CPU),
    pipeline("zb-h1", 2, 4, ("deep-tied",), layout__data_parallel="zero1", **CPU),
]
ROWS += [
    tensor(2, 8, ("deep-moe",), layout__pp=2, layout__ep=2, layout__data_parallel=data, **CPU)
    for data in ("zero2", "zero3")
]
FILES = {"layout.offload": "nvme", "layout.offload_directory": tempfile.gettempdir()}
ROWS += [
    Row(f"{axis}2-{data}-nvme", 4, {f"layout.{axis}": 2, "layout.data_parallel": data, **FILES}, models=("moe",))
    for axis, data in (("tp", "zero2"), ("cp", "zero3"), ("ep", "zero1"))
]
ROWS += [
    tensor(2, 4, ("moe",), layout__ep=2, layout__data_parallel=data, optimizer__name="muon", **CPU)
    for data in ("zero1", "zero3")
]
CASES = [
    pytest.param(
        row,
        model,
        id=f"{row.name}-x{row.ranks}-acc{row.accumulation}-{model}",
        marks=[pytest.mark.thorough] if row.ranks >= 4 and model != row.models[-1] else [],
    )
    for row in ROWS
    for model in row.models
]
DATA = {data: {"layout.data_parallel": data} for data in ("ddp", "zero1", "zero2", "zero3")}
DATA["hsdp"] = {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}
DATA["parameter_server"] = {"layout.data_parallel": "parameter_server"}
OPTIMIZERS = {
    "muon": {"optimizer.name": "muon"},
    "sgd": {"optimizer.name": "sgd"},
    "no-clip": {"optimizer.max_grad_norm": 0.0},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real source files, so that documents end inside sequences."""
    import json

    folder = tmp_path_factory.mktemp("text")
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        for part, lines in enumerate(source.read_text().split("\n\n")[:16]):
            (folder / f"{source.stem}{part}.py").write_text(lines)
    return folder


@pytest.fixture(scope="session")
def length(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How long every row trains."""
    return {"training.steps": request.config.getoption("steps")}


@cache
def trained(text: Path, model: str, changes: tuple[tuple[str, Any], ...]) -> list[tuple[float, float]]:
    """The trajectory of one process."""
    return proof(described(text, text.parent / f"reference-{model}", {"model": MODELS[model], **dict(changes)}))


def reference(text: Path, model: str, changes: dict[str, Any]) -> list[tuple[float, float]]:
    """The same, of what one process has of a layout's changes: the length, the batch, the optimizer."""
    return trained(
        text,
        model,
        tuple((key, value) for key, value in changes.items() if key.startswith(("training.", "optimizer."))),
    )


def layout(row: Row, model: str) -> dict[str, Any]:
    servers = row.changes.get("layout.num_servers", 1) if "server" in row.name else 0
    micro_batch = 8 // (row.ranks - servers) // row.accumulation
    return {"model": MODELS[model], "layout.micro_batch_size": micro_batch, **row.changes}


@pytest.mark.parametrize(("row", "model"), CASES)
def test_layout_equals_single_process_training_in_fp64(
    row: Row, model: str, text: Path, length: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**layout(row, model), **length}
    run, expected = described(text, tmp_path, changes), reference(text, model, changes)
    results = [proof(run)] if row.ranks == 1 else rank_pool(row.ranks).run(proof, run)
    for rank, result in enumerate(results):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


# Every two of data, optimizer, ranks and model meet: the models take turns.
OPTIMIZED = [
    (data, optimizer, n, ("dense", "moe")[(place + turn + n // 4) % 2])
    for place, data in enumerate(DATA)
    for turn, optimizer in enumerate(OPTIMIZERS)
    for n in (2, 4)
    if not (data == "hsdp" and n == 2)
]


@pytest.mark.parametrize(("data", "optimizer", "world_size", "model"), OPTIMIZED)
def test_optimizer_with_data_parallelism_equals_single_process(
    data: str, optimizer: str, world_size: int, model: str, text: Path, length: dict[str, Any], tmp_path: Path
) -> None:
    changes = OPTIMIZERS[optimizer]
    run = described(text, tmp_path, {"model": MODELS[model], **DATA[data], **changes, **length})
    expected = reference(text, model, {**changes, **length})
    for rank, result in enumerate(rank_pool(world_size).run(proof, run)):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"


NEAR = [Row(data, 2, {"layout.data_parallel": data}) for data in FAMILY]
NEAR += [Row("ddp-bf16-wire", 2, {"layout.gradient_compression": "bf16"})]
NEAR += [Row("hsdp-2x2", 4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}, accumulation=2)]
NEAR += [Row("zero2", 2, {"layout.data_parallel": "zero2"}, accumulation=2)]
NEAR += [pipeline("1f1b", 2, 2), pipeline("zb-h1", 2, 4, layout__data_parallel="zero1")]
NEAR += [pipeline("1f1b", 2, 4, layout__data_parallel="zero3")]
NEAR += [pipeline("zb-h1", 2, 4, layout__data_parallel="zero3", training__tokens_per_step=4 * 32)]
NEAR += [
    tensor(2, 2),
    tensor(2, 4, layout__data_parallel="zero1", **APART),
    tensor(2, 4, layout__data_parallel="zero3"),
]
NEAR += [context(2, 2), context(2, 2, **ULYSSES), context(2, 4, layout__data_parallel="zero3")]
NEAR += [expert(2, 2), expert(2, 4, layout__tp=2, layout__data_parallel="zero3")]


@pytest.mark.parametrize(
    ("row", "model"),
    [
        pytest.param(row, model, id=f"{row.name}-x{row.ranks}-acc{row.accumulation}-{model}")
        for row in NEAR
        for model in ("dense", "moe")
        if model == "moe" or "layout.ep" not in row.changes
    ],
)
def test_layout_loss_in_bf16_is_close_to_single_process(
    row: Row, model: str, text: Path, length: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**layout(row, model), **length, "training.precision": "bf16"}
    run, expected = described(text, tmp_path, changes), reference(text, model, changes)
    result = rank_pool(row.ranks).run(proof, run)[0]
    assert [loss for loss, _ in result] == pytest.approx([loss for loss, _ in expected], rel=0.02)


@pytest.mark.parametrize(("sequences", "offload"), [(2, "none"), (4, "cpu"), (8, "none")])
def test_split_backward_schedule_equals_1f1b_bitwise_in_bf16(
    sequences: int, offload: str, text: Path, length: dict[str, Any], tmp_path: Path
) -> None:
    """Over micro-batches in fp32, to the last bit, also where all second halves come after the last first half."""
    changes = {"layout.data_parallel": "zero3", "layout.offload": offload, "training.tokens_per_step": sequences * 32}
    changes |= {"model": MODELS["deep-moe"], "training.precision": "bf16", **length}
    whole, halves = (
        described(text, tmp_path / schedule, {**changes, **pipeline(schedule, 2, 4).changes})
        for schedule in ("1f1b", "zb-h1")
    )
    assert rank_pool(4).run(proof, halves) == rank_pool(4).run(proof, whole)


def test_pipeline_schedule_from_csv_equals_single_process(text: Path, length: dict[str, Any], tmp_path: Path) -> None:
    """A searched order, written as CSV and trained with; of one that cannot run the first violation is said."""
    file = tmp_path / "searched.csv"
    times = ActionTimes(forward=2, input_grad=3, weight_grad=2, transfer=1)
    file.write_text(to_csv(search_schedule(2, 8, times, Fraction(2), moves=200)))
    changes = {"layout.pp": 2, "layout.schedule_file": str(file), "layout.micro_batch_size": 1}
    for model in DEEP:
        run = described(text, tmp_path, {"model": MODELS[model], **changes, **length})
        expected = reference(text, model, length)
        for rank, result in enumerate(rank_pool(2).run(proof, run)):
            assert result == [pytest.approx(step, rel=1e-10) for step in expected], f"rank {rank}"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0].replace("0F0,", "", 1), *lines[1:]]))
    load_schedule_csv.cache_clear()
    with pytest.raises(UserError, match=r"0F0"):
        check_pipeline(run, 2)


def test_parity_comparison_detects_learning_rate_change_of_one_millionth(
    text: Path, length: dict[str, Any], tmp_path: Path
) -> None:
    """A learning rate off by a millionth is seen."""
    changed = proof(described(text, tmp_path, {"optimizer.learning_rate": 0.01 * (1 + 1e-6), **length}))
    assert changed != [pytest.approx(step, rel=1e-10) for step in reference(text, "dense", length)]


def test_random_layouts_equal_single_process(text: Path) -> None:
    for world_size, model, layers, changes in layouts(seed=7, count=6, text=text):
        assert difference(text, world_size, model, layers, changes) < 1e-10, (world_size, model, layers, changes)
