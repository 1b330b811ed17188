"""Memory and traffic of real ranks, compared with the formulas that `phalanx memory` prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.traffic import traffic_by_role
from phalanx.plan.predicted_vs_measured import (
    PARTS,
    STATE,
    TOTAL,
    Comparison,
    bytes_by_operation,
    bytes_sent_by_operation,
    compare_with_prediction,
    ranks_in_role,
)
from phalanx.spec.files.write import to_toml
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.testing.processes import run_python
from tests.helpers.small_runs import DENSE, MOE, measure_steady_step, small_run

# Large enough for a few sums of losses and norms to be below a hundredth of the traffic.
MODELS = {
    "dense": {
        **DENSE,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 128,
        "vocab_size": 1024,
    },
    "moe": {**MOE, "hidden_size": 64, "vocab_size": 1024},
}
MODELS["wide"] = {**MODELS["dense"], "hidden_size": 128}
MODELS["wide moe"] = {**MODELS["moe"], "hidden_size": 128, "moe": {**MOE["moe"], "expert_ffn_size": 128}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    **{
        f"{data}x{n}": (n, {"layout.data_parallel": data})
        for data in ("ddp", "zero1", "zero2", "zero3")
        for n in (2, 4)
    },
    "ddpx2-bf16-wire": (2, {"layout.data_parallel": "ddp", "layout.gradient_compression": "bf16"}),
    "ddpx2-powersgd": (
        2,
        {"layout.data_parallel": "ddp", "layout.gradient_compression": "powersgd", "layout.powersgd_rank": 2},
    ),
    "zero1x2-buckets": (2, {"layout.data_parallel": "zero1", "layout.bucket_mb": 0.1}),
    "zero3x2-kept": (2, {"layout.data_parallel": "zero3", "layout.reshard_after_forward": False}),
    "hsdpx4": (4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    "serverx2": (2, {"layout.data_parallel": "parameter_server"}),
    "serversx4": (4, {"layout.data_parallel": "parameter_server", "layout.num_servers": 2}),
    "serverx4-async": (4, {"layout.data_parallel": "parameter_server", "layout.max_staleness": 1}),
}


def is_within_bound(row: Comparison) -> bool:
    """Return whether the communication buffers are within their bound."""
    return bool(row.measured <= 1.1 * row.predicted + 1000)


def compare_steady_step(run: RunSpec, world_size: int) -> list[Comparison]:
    """Return the memory and traffic of a step, predicted and measured."""
    for _ in range(3):  # a thread of gloo may free a buffer some time after the wait for it
        measured = rank_pool(world_size).run(measure_steady_step, run) if world_size > 1 else [measure_steady_step(run)]
        rows = list(compare_with_prediction(ResolvedRun(run, world_size), dict(enumerate(measured))))
        if all(is_within_bound(row) for row in rows if row.quantity == "communication"):
            break
    return rows


MOE_RUNS = [("moe", "bf16", None, "adamw"), ("moe", "bf16", None, "muon")]
# Any two of layout, precision and micro-batch occur together: micro-batches alternate.
DATA_PARALLEL_RUNS = [
    (layout, *numbers)
    for index, layout in enumerate(LAYOUTS)
    for numbers in (
        ("dense", "bf16", (None, 1)[index % 2], "adamw"),
        ("dense", "fp32", (1, None)[index % 2], "adamw"),
        *MOE_RUNS,
    )
]


@pytest.mark.parametrize(("layout", "model", "precision", "micro_batch", "optimizer"), DATA_PARALLEL_RUNS)
def test_state_and_traffic_match_prediction_for_data_parallel_layouts(
    layout: str, model: str, precision: str, micro_batch: int | None, optimizer: str, text: Path, tmp_path: Path
) -> None:
    world_size, changes = LAYOUTS[layout]
    changes = {**changes, **({"layout.micro_batch_size": micro_batch} if micro_batch else {})}
    numbers = {"training.precision": precision, "optimizer.name": optimizer}
    run = small_run(text, tmp_path, {"model": MODELS[model], **numbers, **changes})
    for row in compare_steady_step(run, world_size):
        if row.quantity in STATE:
            assert row.measured == row.predicted, row
        elif row.quantity not in (*PARTS, TOTAL):
            if "async" in layout:  # in one step a worker may receive two updates, or none
                continue
            assert row.measured == pytest.approx(row.predicted, rel=0.01), row
        elif row.quantity == "communication":
            assert is_within_bound(row), row
            if "powersgd" in layout:  # the error feedback, as large as the gradients
                assert row.measured >= 4 * count_parameters(run.model).block_matrices, row


ADAPTER = {"rank": 4, "alpha": 8.0}
NF4 = {**ADAPTER, "base_dtype": "nf4"}
EXPERTS = {**ADAPTER, "targets": ["experts.gate", "experts.up", "experts.down"]}
FROZEN_RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "moe", {"training.freeze": ["*norm*"]}),
    "ddp": (2, "dense", {"training.freeze": ["embedding.*", "blocks.0.*"]}),
    "zero1": (2, "moe", {"training.freeze": ["blocks.*.w[qk].*", "*.up*"], "layout.data_parallel": "zero1"}),
    "zero2": (2, "dense", {"training.freeze": ["head.*", "blocks.*.attention.*"], "layout.data_parallel": "zero2"}),
    "zero3": (2, "moe", {"training.freeze": ["embedding.*", "blocks.0.*"], "layout.data_parallel": "zero3"}),
    "zero3-scattered": (
        4,
        "dense",
        {"training.freeze": ["blocks.1.*", "blocks.*.w[qv].*", "head.*"], "layout.data_parallel": "zero3"},
    ),
    "hsdp": (4, "dense", {"training.freeze": ["*.mlp.*"], "layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    "server": (2, "dense", {"training.freeze": ["embedding.*", "*norm*"], "layout.data_parallel": "parameter_server"}),
    "tp": (2, "dense", {"training.freeze": ["embedding.*", "blocks.*.w[qk].*", "*norm*"], "layout.tp": 2}),
    "pp": (
        2,
        "dense",
        {"training.freeze": ["embedding.*", "blocks.0.*"], "layout.pp": 2, "layout.micro_batch_size": 1},
    ),
    "ep": (2, "moe", {"training.freeze": ["*.experts.up", "*router*"], "layout.ep": 2}),
    "adapters": (1, "moe", {"adapter": ADAPTER}),
    "adapters-zero1": (2, "dense", {"adapter": ADAPTER, "layout.data_parallel": "zero1"}),
    "adapters-zero3": (4, "moe", {"adapter": ADAPTER, "layout.data_parallel": "zero3"}),
    "adapters-server": (2, "dense", {"adapter": ADAPTER, "layout.data_parallel": "parameter_server"}),
    "adapters-tp": (2, "dense", {"adapter": ADAPTER, "layout.tp": 2}),
    "adapters-pp": (
        2,
        "dense",
        {"adapter": ADAPTER, "layout.pp": 2, "layout.schedule": "zb-h1", "layout.micro_batch_size": 1},
    ),
    "magnitudes-tp": (2, "dense", {"adapter": {**ADAPTER, "dora": True}, "layout.tp": 2}),
    "experts-ep-zero3": (4, "moe", {"adapter": EXPERTS, "layout.ep": 2, "layout.data_parallel": "zero3"}),
    "experts-tp": (2, "moe", {"adapter": EXPERTS, "layout.tp": 2}),
    "nf4": (1, "wide moe", {"adapter": NF4}),
    "nf4-zero1": (2, "wide", {"adapter": NF4, "layout.data_parallel": "zero1"}),
    "nf4-zero3": (4, "wide moe", {"adapter": NF4, "layout.data_parallel": "zero3"}),
    "nf4-server": (2, "wide", {"adapter": NF4, "layout.data_parallel": "parameter_server"}),
    "nf4-tp": (2, "wide moe", {"adapter": NF4, "layout.tp": 2}),
    "nf4-ep-zero3": (4, "wide moe", {"adapter": NF4, "layout.ep": 2, "layout.data_parallel": "zero3"}),
    "adapters-cp": (2, "dense", {"adapter": ADAPTER, "layout.cp": 2, "layout.data_parallel": "zero2"}),
}
"""Ranks, model and changes of runs that train a part of the model."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", FROZEN_RUNS)
def test_state_and_traffic_match_prediction_with_frozen_parameters(
    case: str, precision: str, text: Path, tmp_path: Path
) -> None:
    world_size, model, changes = FROZEN_RUNS[case]
    run = small_run(text, tmp_path, {"model": MODELS[model], "training.precision": precision, **changes})
    for row in compare_steady_step(run, world_size):
        if row.quantity in STATE:
            assert row.measured == row.predicted, row
        elif row.quantity == "communication":
            assert is_within_bound(row), row
        elif row.quantity not in (*PARTS, TOTAL, "working", "all_to_all"):  # experts are not balanced
            # Sums of losses are not counted one by one.
            assert row.measured == pytest.approx(row.predicted, rel=0.01, abs=256), row


LONG_SEQUENCES = {"training.seq_len": 1024, "data.mask_documents": False}
"""Sequences so long that activations are larger than everything of the size of the weights."""
PIPELINE_RUNS = [
    (2, {"layout.schedule": schedule, **choices})
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-v")
    for choices in ({}, {"layout.activation_checkpointing": "full"})
]
PIPELINE_RUNS += [(2, {"layout.schedule": "interleaved", "layout.virtual_stages": 2})]
PIPELINE_RUNS += [(2, {"layout.schedule": schedule, "model": MOE}) for schedule in ("1f1b", "zb-h1")]
MODEL_PARALLEL_RUNS = [
    *[(n, {"layout.pp": 2, **choices}) for n, choices in PIPELINE_RUNS],
    (4, {"layout.pp": 2, "layout.data_parallel": "zero1"}),
    (4, {"layout.pp": 2, "layout.tp": 2}),
    *[(2, {"layout.tp": 2, "layout.sequence_parallel": is_on}) for is_on in (True, False)],
    (
        2,
        {
            "layout.tp": 2,
            "layout.tp_attention": "gathered",
            "model": {**DENSE, "num_heads": 3, "num_kv_heads": 3, "head_dim": 16},
        },
    ),
    (4, {"layout.tp": 2, "layout.data_parallel": "zero3"}),
    *[(2, {"layout.cp": 2, "layout.cp_method": kind}) for kind in ("ring", "ulysses")],
    (2, {"layout.ep": 2}),
]
MODEL_PARALLEL_RUNS += [
    (world_size, {**axis, "layout.data_parallel": data, "layout.offload": "cpu"})
    for world_size, data, axis in (
        (2, "zero1", {"layout.tp": 2}),
        (4, "zero2", {"layout.cp": 2}),
        (4, "zero3", {"layout.ep": 2}),
        (4, "zero3", {"layout.pp": 2, "layout.schedule": "zb-h1"}),
    )
]


@pytest.mark.alone  # on a busy machine, a tensor in transfer is held a little longer
@pytest.mark.parametrize(
    ("world_size", "changes", "precision"),
    [
        *[(*shared, "bf16") for shared in MODEL_PARALLEL_RUNS],
        *[(*shared, "fp32") for shared in MODEL_PARALLEL_RUNS[::3]],
    ],
    ids=str,
)
def test_memory_matches_prediction_for_model_parallel_layouts(
    world_size: int, changes: dict[str, Any], precision: str, text: Path, tmp_path: Path
) -> None:
    """State is exact. Activations and buffers are at most 3 % above the prediction (8 % in bf16, where casts, and
    temporary tensors of norms and attention, are not counted one by one). In pipelines, where micro-batches in flight
    are larger than buffers, they are also at most as much below. Elsewhere buffers are an upper estimate: 2 to 24 %
    below was measured."""
    model = {
        **(MOE if "layout.ep" in changes else changes.get("model", DENSE)),
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_layers": 4,
        "max_seq_len": 1024,
    }
    sequences = 8 if "layout.pp" in changes else 4  # all held at a time in some pipelines, and nowhere else
    numbers = {
        "training.precision": precision,
        "layout.micro_batch_size": 1,
        "training.tokens_per_step": sequences * 1024,
    }
    run = small_run(text, tmp_path, {**LONG_SEQUENCES, **numbers, **changes, "model": model})
    for row in compare_with_prediction(
        ResolvedRun(run, world_size), dict(enumerate(rank_pool(world_size).run(measure_steady_step, run)))
    ):
        if row.quantity in STATE:
            assert row.measured == row.predicted, row
        elif row.quantity == "working":
            tolerance = 0.08 if precision == "bf16" else 0.03
            least = 1 - tolerance if (2, changes) in MODEL_PARALLEL_RUNS[: len(PIPELINE_RUNS)] else 0.75
            assert least * row.predicted <= row.measured <= (1 + tolerance) * row.predicted, row


REALISTIC_MODEL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_layers": 6,
    "num_heads": 4,
    "ffn_hidden_size": 384,
    "max_seq_len": 256,
    "tie_embeddings": False,
}
"""A model in which, as in real ones, no tensor has a large share of the memory."""
PEAK_MEMORY_RUNS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"layout.activation_checkpointing": "full"}),
    (1, {"layout.activation_checkpointing": "offload"}),
    (1, {"layout.activation_checkpointing": "selective"}),
    *[(1, {"layout.activation_checkpointing": "full", "optimizer.name": name}) for name in ("muon", "sgd")],
    *[(n, {"layout.data_parallel": data}) for n in (2, 4) for data in ("ddp", "zero1", "zero2", "zero3")],
    (2, {"layout.data_parallel": "parameter_server"}),
    (4, {"layout.pp": 2, "layout.data_parallel": "zero3"}),
    (4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    *[(2, {"layout.pp": 2, "layout.schedule": schedule}) for schedule in ("gpipe", "1f1b", "zb-h1")],
    (4, {"layout.pp": 2, "layout.data_parallel": "zero1"}),
    (2, {"layout.tp": 2}),
    (4, {"layout.tp": 2, "layout.data_parallel": "zero1"}),
    *[(2, {"layout.cp": 2, "layout.cp_method": kind}) for kind in ("ring", "ulysses")],
]
PEAK_MEMORY_RUNS += [
    (world_size, {**changes, "training.precision": "fp8"})
    for world_size, changes in (
        (1, {}),
        (1, {"layout.activation_checkpointing": "full"}),
        (2, {"layout.data_parallel": "zero3"}),
        (2, {"layout.pp": 2, "layout.schedule": "1f1b"}),
    )
]


@pytest.mark.parametrize(("world_size", "changes"), PEAK_MEMORY_RUNS, ids=str)
def test_peak_memory_is_within_5_percent_of_prediction(
    world_size: int, changes: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    """The peak is much less than the sum of the parts' peaks: gradients are allocated while activations are freed, and
    buffers at other times."""
    shared = changes.get("layout.pp", 1) * changes.get("layout.tp", 1) * changes.get("layout.cp", 1)
    sequences = 2 * world_size // shared
    numbers = {"training.precision": "fp32", "training.seq_len": 256, "training.tokens_per_step": sequences * 256}
    numbers |= {"layout.micro_batch_size": 2, "data.mask_documents": False, "model": REALISTIC_MODEL}
    numbers |= {"cluster.device": "cpu"}
    run = small_run(text, tmp_path, {**numbers, **changes})
    for _ in range(3):  # as above, buffers may be freed late
        rows = [
            row
            for row in compare_with_prediction(
                ResolvedRun(run, world_size), dict(enumerate(rank_pool(world_size).run(measure_steady_step, run)))
            )
            if row.quantity == TOTAL
        ]
        if all(row.measured <= 1.05 * row.predicted for row in rows):
            break
    for row in rows:
        assert row.measured == pytest.approx(row.predicted, rel=0.05), row


NO_SEQUENCE_PARALLEL = {"layout.sequence_parallel": False}
EQUAL_HEADS, NO_SHARED_EXPERTS = {**DENSE, "num_kv_heads": 4}, {**MOE, "moe": {**MOE["moe"], "num_shared_experts": 0}}
TRAFFIC_RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "gathered": (2, EQUAL_HEADS, {"layout.tp": 2, "layout.tp_attention": "gathered"}),
    "gathered-whole": (2, EQUAL_HEADS, {"layout.tp": 2, "layout.tp_attention": "gathered", **NO_SEQUENCE_PARALLEL}),
    "tp-selective": (2, NO_SHARED_EXPERTS, {"layout.tp": 2, "layout.activation_checkpointing": "selective"}),
    "tp-full": (2, NO_SHARED_EXPERTS, {"layout.tp": 2, "layout.activation_checkpointing": "full"}),
    "ring-full": (2, MOE, {"layout.cp": 2, "layout.activation_checkpointing": "full"}),
    "ulysses-full": (
        2,
        MOE,
        {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.activation_checkpointing": "full"},
    ),
    "ep-full": (2, MOE, {"layout.ep": 2, "layout.activation_checkpointing": "full"}),
    "ep-cp-zero3": (4, MOE, {"layout.ep": 4, "layout.cp": 2, "layout.data_parallel": "zero3"}),
}
"""Layouts in addition to those that `tests/verify` compares with the plan call by call."""


@pytest.mark.parametrize("case", TRAFFIC_RUNS)
def test_traffic_matches_prediction_for_model_parallel_layouts(case: str, text: Path, tmp_path: Path) -> None:
    """Bytes agree to 1 %; 500 bytes are allowed for loss sums and gradient norms. Expert traffic is averaged over
    ranks, because experts are not balanced in the first steps."""
    world_size, model, changes = TRAFFIC_RUNS[case]
    replicas = world_size // (changes.get("layout.tp", 1) * changes.get("layout.cp", 1))
    numbers = {
        "training.precision": "fp32",
        "training.tokens_per_step": 2 * 32 * replicas,
        "layout.micro_batch_size": 1,
        "model": {**model, "num_layers": 4},
    }
    run = small_run(text, tmp_path, {**numbers, **changes})
    measured = rank_pool(world_size).run(measure_steady_step, run)
    for role, traffic in traffic_by_role(ResolvedRun(run, world_size)).items():
        expected, ranks = bytes_by_operation(traffic), ranks_in_role(role, ResolvedRun(run, world_size))
        operations = {row["operation"] for rank in ranks for row in measured[rank]["collectives"]}
        for operation in {*expected, *operations} - {"recv"}:
            sent = [bytes_sent_by_operation(measured[rank]["collectives"], operation) for rank in ranks]
            measured_bytes = sum(sent) / len(sent) if run.layout.ep > 1 else max(sent)
            assert measured_bytes == pytest.approx(expected.get(operation, 0), rel=0.01, abs=500), (role, operation)


def test_model_state_bytes_match_zero_paper_formulas(text: Path, tmp_path: Path) -> None:
    """Bytes per parameter with mixed precision and Adam are 16, 4 + 12/N, 2 + 14/N and 16/N (arXiv 1910.02054, section
    3.1), here with N = 4."""
    published = {"ddp": 16.0, "zero1": 4 + 12 / 4, "zero2": 2 + 14 / 4, "zero3": 16 / 4}
    model = {**MODELS["dense"], "vocab_size": 1024}
    for data, per_parameter in published.items():
        run = small_run(text, tmp_path, {"model": model, "training.precision": "bf16", "layout.data_parallel": data})
        state_bytes = [
            sum(rank_record["held_bytes"].get(part, 0) for part in STATE)
            for rank_record in rank_pool(4).run(measure_steady_step, run)
        ]
        assert state_bytes == pytest.approx([per_parameter * count_parameters(run.model).total] * 4, rel=0.01)


def test_train_measure_memory_prints_predicted_and_measured(text: Path, tmp_path: Path) -> None:
    run = small_run(
        text, tmp_path, {"training.steps": 4, "layout.data_parallel": "zero2", "training.precision": "bf16"}
    )
    (tmp_path / "run.toml").write_text(to_toml(run))
    command = [sys.executable, "-m", "phalanx", "train", str(tmp_path / "run.toml"), "--nproc", "2", "--profile-memory"]
    stdout = run_python(command, check=True, text=True, timeout=120).stdout
    folder = tmp_path / "parity" / "measured"
    rows = json.loads((folder / "comparison.json").read_text())
    for row in rows:
        assert f"{row['quantity']:14} {row['predicted']:>14,} {row['measured']:>14,}" in stdout
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.json", "rank-00000.json", "rank-00001.json"]
