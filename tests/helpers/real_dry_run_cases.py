"""Layouts of models of real size, with few layers per stage, whose traced program is compared with the plan."""

from __future__ import annotations

from itertools import starmap
from typing import Any, NamedTuple

from phalanx.launch.recomputation import resolve_recomputation
from phalanx.spec.files.load import preset_names, resolve_preset, run_from_table
from phalanx.spec.layer_pattern import parse_layers
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
    sequence: int = SEQUENCE
    """Tokens of a sequence; a micro-batch is one."""

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in self.layout.items()]
        return "-".join([self.preset, f"x{self.world_size}", *changed, self.precision])

    def run(self) -> RunSpec:
        """Return the run, with two layers a stage, or with one of each kind."""
        pp = self.layout.get("pp", 1)
        schedule = self.layout.get("schedule", "1f1b")
        stages = pp * (2 if schedule in V_SCHEDULES else self.layout.get("virtual_stages", 1))
        replicas = self.world_size // (pp * self.layout.get("tp", 1) * self.layout.get("cp", 1))
        preset = resolve_preset({"preset": self.preset}, "models", "model")
        kinds = list(dict.fromkeys(parse_layers(preset["layers"]))) if "layers" in preset else []
        shares_keys = "num_shared_kv_layers" in preset
        layers = (stages + shares_keys) * kinds if len(kinds) > 1 else []
        model: dict[str, Any] = {"preset": self.preset, "num_layers": len(layers) or 2 * stages}
        if layers:
            model["layers"] = " ".join(layers)
        if shares_keys:
            model["num_shared_kv_layers"] = len(kinds)
        if preset.get("moe", {}).get("num_leading_dense_layers", 0) > 1:
            model["moe"] = {"num_leading_dense_layers": 1}
        run = run_from_table(
            {
                "model": model,
                "training": {
                    "seq_len": self.sequence,
                    "precision": self.precision,
                    "tokens_per_step": self.sequence * replicas * self.micro_batches,
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


def preset_case(index: int, preset: str) -> RealCase:
    """Return one of three layouts of a preset on eight ranks, with as many experts on a rank as it allows."""
    layouts = ({"pp": 2, "data_parallel": "zero1"}, {"data_parallel": "zero3"}, {"tp": 2, "data_parallel": "zero1"})
    layout: dict[str, Any] = dict(layouts[index % len(layouts)])
    table = resolve_preset({"preset": preset}, "models", "model")
    if "moe" in table:
        layout["ep"] = 8 // (layout.get("pp", 1) * layout.get("tp", 1))
    return RealCase(preset, 8, 4, layout, sequence=512 if preset.startswith("kimi-linear") else 1024)


OTHER_PRESETS = sorted({*preset_names("models")} - {"tiny"} - {case.preset for case in REAL_CASES})
PRESET_CASES = list(starmap(preset_case, enumerate(OTHER_PRESETS)))
"""A layout of each preset that the others leave out. Delta rules are slow to trace."""
