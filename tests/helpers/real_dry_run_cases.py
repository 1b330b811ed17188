"""Layouts of models of real size, with two layers per stage, whose traced program is compared with the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from phalanx.launch.recomputation import resolve_recomputation
from phalanx.spec.files.load import run_from_table
from phalanx.spec.pipeline_schedules import V_SCHEDULES
from phalanx.spec.run import RunSpec

SEQUENCE = 8192
NPROC = 8


class RealCase(NamedTuple):
    """A layout of a preset."""

    preset: str
    world_size: int
    micro_batches: int
    """Micro-batches of a rank in a step."""
    layout: dict[str, Any]
    precision: str = "bf16"

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in self.layout.items()]
        return "-".join([self.preset, f"x{self.world_size}", *changed, self.precision])

    def run(self) -> RunSpec:
        """Return the run, with sequences of 8,192 tokens in micro-batches of one."""
        pp = self.layout.get("pp", 1)
        schedule = self.layout.get("schedule", "1f1b")
        stages = pp * (2 if schedule in V_SCHEDULES else self.layout.get("virtual_stages", 1))
        replicas = self.world_size // (pp * self.layout.get("tp", 1) * self.layout.get("cp", 1))
        run = run_from_table(
            {
                "model": {"preset": self.preset, "num_layers": 2 * stages},
                "training": {
                    "seq_len": SEQUENCE,
                    "precision": self.precision,
                    "tokens_per_step": SEQUENCE * replicas * self.micro_batches,
                },
                "layout": {"micro_batch_size": 1, **self.layout},
                "cluster": {
                    "preset": "h100",
                    "nodes": -(-self.world_size // NPROC),
                    "nproc_per_node": min(self.world_size, NPROC),
                },
            }
        )
        return resolve_recomputation(run, self.world_size)


REAL_CASES = [
    RealCase("llama3-8b", 4, 4, {"tp": 2, "data_parallel": "zero1"}),
    RealCase("llama3-8b", 4, 2, {"tp": 2, "data_parallel": "zero3"}),
    RealCase("llama3-8b", 8, 1, {"pp": 2}),
    RealCase("llama3-8b", 8, 8, {"data_parallel": "zero3"}),
    RealCase("llama3-8b", 8, 16, {"data_parallel": "zero2"}),
    RealCase("llama3-8b", 8, 4, {"cp": 2, "data_parallel": "zero1"}),
    RealCase("llama3-8b", 8, 2, {"cp": 4, "cp_method": "ulysses", "data_parallel": "zero3"}),
    RealCase("llama3-8b", 8, 8, {"pp": 2, "schedule": "zb-v", "data_parallel": "zero1"}),
    RealCase("llama3-8b", 8, 2, {"data_parallel": "zero3"}, "fp8"),
    RealCase("llama3-8b", 2, 4, {"data_parallel": "zero1", "offload": "cpu"}),
    RealCase("llama3-8b", 8, 4, {"data_parallel": "hsdp", "dp_shard": 4, "activation_checkpointing": "auto"}),
    RealCase("llama3-70b", 16, 16, {"tp": 4, "pp": 2, "data_parallel": "zero1"}),
    RealCase("llama3-70b", 16, 2, {"tp": 8, "data_parallel": "zero3", "activation_checkpointing": "full"}),
    RealCase("llama3-70b", 16, 12, {"tp": 2, "pp": 4, "schedule": "zb-v", "data_parallel": "zero1"}, "fp8"),
    RealCase("llama3-70b", 64, 2, {"data_parallel": "zero3", "activation_checkpointing": "selective"}),
    RealCase(
        "llama3-70b",
        32,
        16,
        {
            "tp": 2,
            "cp": 4,
            "cp_method": "ulysses",
            "pp": 2,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "data_parallel": "zero1",
        },
    ),
    RealCase("llama3-405b", 64, 16, {"tp": 8, "pp": 4, "data_parallel": "zero1"}),
    RealCase(
        "llama3-405b",
        128,
        16,
        {
            "tp": 8,
            "cp": 2,
            "pp": 4,
            "schedule": "zb-v",
            "data_parallel": "zero1",
            "activation_checkpointing": "selective",
        },
    ),
    RealCase(
        "llama3-405b",
        128,
        2,
        {"tp": 8, "data_parallel": "hsdp", "dp_shard": 8, "activation_checkpointing": "norms"},
    ),
    RealCase("mixtral-8x7b", 16, 4, {"ep": 8, "data_parallel": "zero1"}),
    RealCase("mixtral-8x7b", 16, 2, {"ep": 4, "tp": 2, "data_parallel": "zero3"}),
    RealCase("mixtral-8x7b", 32, 8, {"ep": 8, "pp": 2, "data_parallel": "zero1"}),
    RealCase("qwen3-30b-a3b", 16, 2, {"data_parallel": "hsdp", "dp_shard": 8, "activation_checkpointing": "full"}),
    RealCase("qwen3-30b-a3b", 16, 4, {"ep": 8, "cp": 2, "data_parallel": "zero2"}),
    RealCase("llama3-8b", 8, 10, {"pp": 4, "schedule": "zb-h1", "data_parallel": "zero1"}),
    RealCase("llama3-8b", 8, 4, {"pp": 2, "tp": 2, "data_parallel": "zero3"}),
    RealCase("llama3-70b", 16, 2, {"tp": 2, "data_parallel": "zero3", "activation_checkpointing": "norms"}),
    RealCase("mixtral-8x7b", 8, 2, {"ep": 8, "data_parallel": "zero3"}),
    RealCase("mixtral-8x7b", 16, 2, {"ep": 4, "data_parallel": "zero3", "activation_checkpointing": "full"}),
]

QUICK_CASES = [REAL_CASES[index] for index in (0, 2, 3, 4, 5, 7, 8, 9, 10, 14, 16, 19)]
"""Twelve cases with every kind of parallelism, schedule, strategy and precision, for `make test`."""
