"""Layouts that run on the null GPU: the number of ranks, and changes of a run file."""

from __future__ import annotations

import json
from itertools import product

from tests.helpers.small_runs import DENSE, MOE, TWO_EXPERTS, Table
from tests.parity.covering_set import FILE, run_changes, world_size

Case = tuple[int, Table]

BF16: Table = {
    "training.precision": "bf16",
    "training.compile": False,
    "optimizer.warmup_steps": 1,
    "cluster.device": "cuda",
}
"""Changes in all layouts."""
DEEP: Table = {**DENSE, "num_layers": 8}
SCHEDULES: dict[str, Table] = {
    "1f1b": {},
    "interleaved": {"layout.virtual_stages": 2},
    "zb-h1": {},
    "zb-h2": {},
    "zb-v": {},
    "dualpipe-v": {},
}

"""The model has fewer experts than ranks, which share the rows of each expert."""

SINGLE_AXES: dict[str, Case] = {
    "two-experts-zero1": (4, {"model": TWO_EXPERTS, "layout.data_parallel": "zero1"}),
    "two-experts-zero1-fp32": (
        4,
        {"model": TWO_EXPERTS, "layout.data_parallel": "zero1", "training.precision": "fp32"},
    ),
    "two-experts-zero2-offload": (
        4,
        {"model": TWO_EXPERTS, "layout.data_parallel": "zero2", "layout.offload": "cpu"},
    ),
    "two-experts-zero3": (4, {"model": TWO_EXPERTS, "layout.data_parallel": "zero3"}),
    "single": (1, {}),
    "single-compile": (1, {"training.compile": True}),
    "single-offload": (1, {"layout.data_parallel": "zero1", "layout.offload": "cpu"}),
    "ddp": (2, {}),
    "ddp-bf16": (2, {"layout.gradient_compression": "bf16"}),
    "ddp-powersgd": (2, {"layout.gradient_compression": "powersgd"}),
    "zero1": (2, {"layout.data_parallel": "zero1"}),
    "zero2": (2, {"layout.data_parallel": "zero2"}),
    "zero2-offload": (2, {"layout.data_parallel": "zero2", "layout.offload": "cpu"}),
    "zero3": (2, {"layout.data_parallel": "zero3"}),
    "zero3-sublayer": (2, {"layout.data_parallel": "zero3", "layout.fsdp_unit": "sublayer"}),
    "zero3-offload": (2, {"layout.data_parallel": "zero3", "layout.offload": "cpu"}),
    "hsdp": (4, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    "tp": (2, {"layout.tp": 2}),
    "tp-whole-sequences-zero3": (
        4,
        {"layout.tp": 2, "layout.sequence_parallel": False, "layout.data_parallel": "zero3"},
    ),
    "ring": (2, {"layout.cp": 2}),
    "ulysses-zero3": (4, {"layout.cp": 2, "layout.cp_method": "ulysses", "layout.data_parallel": "zero3"}),
    "moe": (1, {"model": MOE}),
    "moe-ep-zero3": (2, {"model": MOE, "layout.ep": 2, "layout.data_parallel": "zero3"}),
    "moe-ep": (4, {"model": MOE, "layout.ep": 2}),
    "moe-ep-tp-zero1": (4, {"model": MOE, "layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero1"}),
    "moe-capacity": (1, {"model": {**MOE, "moe": {**MOE["moe"], "capacity_factor": 1.0}}}),
    "muon-zero1": (2, {"optimizer.name": "muon", "layout.data_parallel": "zero1"}),
    "muon-zero3-tp": (4, {"optimizer.name": "muon", "layout.data_parallel": "zero3", "layout.tp": 2}),
    "sgd-zero3": (2, {"optimizer.name": "sgd", "layout.data_parallel": "zero3"}),
    "fp32-zero3": (2, {"training.precision": "fp32", "layout.data_parallel": "zero3"}),
    "fp64": (1, {"training.precision": "fp64"}),
    "zero1-recompute-offload": (2, {"layout.data_parallel": "zero1", "layout.activation_checkpointing": "offload"}),
    "zero3-tp-recompute-offload": (
        4,
        {"layout.data_parallel": "zero3", "layout.tp": 2, "layout.activation_checkpointing": "offload"},
    ),
    "zero1-offload": (2, {"layout.data_parallel": "zero1", "layout.offload": "cpu"}),
    "moe-fp32": (1, {"model": MOE, "training.precision": "fp32"}),
    "moe-ep-zero3-full": (
        2,
        {
            "model": MOE,
            "layout.ep": 2,
            "layout.data_parallel": "zero3",
            "layout.activation_checkpointing": "full",
        },
    ),
    "moe-ep-capacity": (
        2,
        {
            "model": {**MOE, "moe": {**MOE["moe"], "capacity_factor": 1.0}},
            "layout.ep": 2,
            "layout.data_parallel": "zero3",
        },
    ),
    "parameter-server": (3, {"layout.data_parallel": "parameter_server"}),
}
"""Layouts of one axis each; pipelines have their own table."""

PIPELINES: dict[str, Case] = {
    f"{schedule}-pp{pp}-{data}": (
        pp if data == "alone" else 2 * pp,
        {
            "model": DEEP,
            "training.tokens_per_step": 24 * 32,  # 12 micro-batches between copies, whose bf16 gradients add up in fp32
            "layout.pp": pp,
            "layout.schedule": schedule,
            "layout.micro_batch_size": 1,
            **SCHEDULES[schedule],
            "layout.data_parallel": "ddp" if data == "alone" else data,
        },
    )
    for schedule, pp, data in product(SCHEDULES, (2, 4), ("ddp", "zero1", "zero3", "alone"))
    if data != "alone" or schedule in ("1f1b", "zb-v")
}
"""Pipelines of several replicas have their own groups. A pipeline of all ranks uses the default group."""

COVERING: dict[str, Case] = {
    "-".join(value for value in choices.values()).replace(", ", "-").replace(" ", "-"): (
        world_size(choices),
        run_changes(choices),
    )
    for choices in json.loads(FILE.read_text())
}
