"""Exports for other trainers contain the degrees, batch and shape of the run, and only names that the trainers know."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.plan.export.common import RELEASES, TRAINER_NAMES, ExportedConfig, Trainer
from phalanx.plan.export.export import export
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import to_csv
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

Table = dict[str, Any]
KNOWN_OPTIONS_DIR = Path(__file__).parent / "flags"
TRAINERS: tuple[Trainer, ...] = ("megatron", "torchtitan", "automodel", "deepspeed", "nanotron")
WORLD_SIZE = 16

LLAMA = {"preset": "llama3-8b"}
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 640,
    "max_seq_len": 1024,
}
QWEN = {**SMALL, "head_dim": 64, "qk_norm": "head", "norm_eps": 1e-6}
GPT2 = {
    **SMALL,
    "num_kv_heads": 8,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position_embedding": "learned",
    "bias": True,
}
EXPERTS = {**SMALL, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 128, "num_shared_experts": 1}}


def make_run(
    model: Table = LLAMA, training: Table | None = None, optimizer: Table | None = None, **layout: Any
) -> RunSpec:
    """Return a run of 64 sequences of 1,024 tokens per step."""
    return run_from_table(
        {
            "name": "other",
            "model": model,
            "data": {"tokenizer": "bytes"},
            "training": {"seq_len": 1024, "tokens_per_step": 65_536, "steps": 100} | (training or {}),
            "optimizer": {"warmup_steps": 10} | (optimizer or {}),
            "layout": layout,
        }
    )


def parse_megatron_flags(exported: ExportedConfig) -> Table:
    """Return Megatron-LM's flags without dashes; True for flags without a value."""
    arguments = shlex.split(exported.text.replace("\\\n", " "), comments=True)
    flags: Table = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.startswith("--"):
            flags[argument[2:]] = True if following.startswith("--") or following == "$@" else following
    return {name: value for name, value in flags.items() if name not in ("nnodes", "nproc-per-node")}


def parse_torchtitan_calls(exported: ExportedConfig) -> dict[str, Table]:
    """Return the keywords of each call in torchtitan's module by the called
    name; arguments other than literals as source."""
    calls: dict[str, Table] = {}
    for node in ast.walk(ast.parse(exported.text)):
        if isinstance(node, ast.Call) and node.keywords:
            keywords = calls.setdefault(ast.unparse(node.func), {})
            keywords.update({keyword.arg or "": _literal_or_source(keyword.value) for keyword in node.keywords})
    return calls


def _literal_or_source(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def dotted_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the dotted names of all keys; keys of tables in a list have the name of the list."""
    for key, value in table.items():
        yield prefix + key
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                yield from dotted_keys(inner, f"{prefix}{key}.")


def known_option_names(trainer: Trainer) -> set[str]:
    """Return the names that `make test-exports` has read with the release's parser."""
    lines = (KNOWN_OPTIONS_DIR / f"{trainer}.txt").read_text().splitlines()
    assert lines[0] == f"# {RELEASES[trainer]}"
    return set(lines[1:])


def exported_option_names(exported: ExportedConfig, trainer: str) -> set[str]:
    """Return every name in the export."""
    if trainer == "megatron":
        return set(parse_megatron_flags(exported))
    if trainer == "torchtitan":
        nodes = ast.parse(exported.text).body
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        imported = {f"{node.module}:{alias.name}" for node in imports for alias in node.names}
        return imported | {
            f"{call}.{keyword}" for call, keywords in parse_torchtitan_calls(exported).items() for keyword in keywords
        }
    return set(dotted_keys(json.loads(exported.text) if trainer == "deepspeed" else yaml.safe_load(exported.text)))


def read_megatron(exported: ExportedConfig) -> Table:
    table = parse_megatron_flags(exported)
    size = {axis: int(table[f"{axis}-parallel-size"]) for axis in ("tensor-model", "pipeline-model", "context")}
    tp, pp, cp = size.values()
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": WORLD_SIZE // (tp * pp * cp),
        "micro_batch": int(table["micro-batch-size"]),
        "sequences": int(table["global-batch-size"]),
        "sequence": int(table["seq-length"]),
        "layers": int(table["num-layers"]),
        "width": int(table["hidden-size"]),
        "ffn": int(table["ffn-hidden-size"]),
        "heads": int(table["num-attention-heads"]),
        "head_dim": int(table["kv-channels"]),
        "kv_heads": int(table.get("num-query-groups", table["num-attention-heads"])),
        "vocab": int(table["vocab-size"]),
    }


def read_torchtitan(exported: ExportedConfig) -> Table:
    calls = parse_torchtitan_calls(exported)
    axes, training = calls["ParallelismConfig"], calls["TrainingConfig"]
    attention = calls.get("make_gqa_config") or calls["Attention.Config"]
    latent_head_dim = attention.get("qk_nope_head_dim", 0) + attention.get("qk_rope_head_dim", 0)
    (model,) = (keywords for call, keywords in calls.items() if call.endswith("Model.Config"))
    (block,) = (keywords for call, keywords in calls.items() if call.endswith("TransformerBlock.Config"))
    pp = axes["pipeline_parallel_degree"]
    return {
        "tp": axes["tensor_parallel_degree"],
        "pp": pp,
        "cp": axes["context_parallel_degree"],
        "dp": axes["data_parallel_replicate_degree"] * axes["data_parallel_shard_degree"],
        "micro_batch": axes["pipeline_parallel_microbatch_size"] if pp > 1 else training["local_batch_size"],
        "sequences": training["global_batch_size"],
        "sequence": training["seq_len"],
        "layers": int(re.findall(r"range\((\d+)\)", model["layers"])[0]),
        "width": model["dim"],
        # If all layers have experts, the export for torchtitan contains no dense width.
        "ffn": int(re.findall(r"\((\d+)\)", block["feed_forward"])[0])
        if "feed_forward" in block
        else SMALL["ffn_hidden_size"],
        "heads": attention["n_heads"],
        "head_dim": latent_head_dim or attention["head_dim"],
        "kv_heads": attention["n_heads"] if latent_head_dim else attention["n_kv_heads"],
        "vocab": model["vocab_size"],
    }


def read_deepspeed(exported: ExportedConfig) -> Table:
    table = json.loads(exported.text)
    micro, steps = table["train_micro_batch_size_per_gpu"], table["gradient_accumulation_steps"]
    return {
        "tp": table.get("tensor_parallel", {}).get("autotp_size", 1),
        "cp": table.get("sequence_parallel_size", 1),
        "dp": table["train_batch_size"] // (micro * steps),
        "micro_batch": micro,
        "sequences": table["train_batch_size"],
    }


def read_nanotron(exported: ExportedConfig) -> Table:
    table = yaml.safe_load(exported.text)
    axes, tokens, model = table["parallelism"], table["tokens"], table["model"]["model_config"]
    micro = tokens["micro_batch_size"]
    return {
        "tp": axes["tp"],
        "pp": axes["pp"],
        "cp": 1,
        "dp": axes["dp"],
        "micro_batch": micro,
        "sequences": micro * tokens["batch_accumulation_per_replica"] * axes["dp"],
        "sequence": tokens["sequence_length"],
        "layers": model["num_hidden_layers"],
        "width": model["hidden_size"],
        "ffn": model["intermediate_size"],
        "heads": model["num_attention_heads"],
        "head_dim": model["hidden_size"] // model["num_attention_heads"],
        "kv_heads": model["num_key_value_heads"],
        "vocab": model["vocab_size"],
    }


def read_automodel(exported: ExportedConfig) -> Table:
    table = yaml.safe_load(exported.text)
    axes, steps, model = table["distributed"], table["step_scheduler"], table["model"]["config"]
    tp, pp = axes.get("tp_size", 1), axes.get("pp_size", 1)
    return {
        "tp": tp,
        "pp": pp,
        "cp": 1,
        "dp": WORLD_SIZE // (tp * pp),
        "micro_batch": axes["pipeline"]["pp_microbatch_size"] if pp > 1 else steps["local_batch_size"],
        "sequences": steps["global_batch_size"],
        "sequence": table["dataset"]["seq_len"],
        "layers": model["num_hidden_layers"],
        "width": model["hidden_size"],
        # Experts of some families have the only width.
        "ffn": model.get("intermediate_size", SMALL["ffn_hidden_size"]),
        "heads": model["num_attention_heads"],
        "head_dim": model.get("qk_head_dim", model["head_dim"]),
        "kv_heads": model["num_key_value_heads"],
        "vocab": model["vocab_size"],
    }


READERS = {
    "automodel": read_automodel,
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
    "deepspeed": read_deepspeed,
    "nanotron": read_nanotron,
}
WSD, NVME_OFFLOAD = {"lr_schedule": "wsd"}, {"offload": "nvme", "offload_directory": "/scratch"}
GLM: Table = {
    **EXPERTS,
    "attention_bias": "qkv",
    "rope": {"fraction": 0.5},
    "moe": {
        **EXPERTS["moe"],
        "router_score": "sigmoid",
        "choice_bias": True,
        "routed_scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
        "num_shared_experts": 1,
        "shared_gate": True,
        "shared_ffn_size": 96,
    },
}
LATENT: Table = {
    **EXPERTS,
    "num_kv_heads": EXPERTS["num_heads"],
    "head_dim": 24,
    "norm_eps": 1e-6,
    "attention_scale": 24**-0.5 * (0.1 * math.log(40) + 1) ** 2,
    "rope": {"scaling": "yarn", "factor": 40.0, "original_context": 4096, "attention_factor": 1.0},
    "mixer": {"kind": "latent_attention", "latent_rank": 32, "query_rank": 48, "rope_dim": 8, "value_dim": 16},
}
QWEN_EXPERTS: Table = {**QWEN, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 128}}
HF_LATENT: Table = {**LATENT, "moe": {**EXPERTS["moe"], "router_score": "sigmoid", "choice_bias": True}}
LEADING: Table = {
    **HF_LATENT["moe"],
    "num_leading_dense_layers": 2,
    "num_groups": 4,
    "top_groups": 2,
    "routed_scale": 2.5,
}
KINDS: list[Table] = [{"name": "full", "sliding_window": False}]
SINKS: Table = {
    **SMALL,
    "ffn_hidden_size": 128,
    "layers": "window full",
    "kinds": KINDS,
    "sliding_window": 64,
    "attention_sinks": True,
    "attention_bias": "all",
    "activation": "clamped_swiglu",
    "rope": {"scaling": "yarn", "factor": 32.0, "original_context": 4096, "truncate": False},
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 128, "bias": True},
}
GEMMA2: Table = {
    "qk_norm": "none",
    "sliding_window": 64,
    "activation": "geglu_tanh",
    "norm_position": "both",
    "norm_offset": True,
    "attention_softcap": 50.0,
    "logits_softcap": 30.0,
    "embedding_scale": 16.0,
    "tie_embeddings": True,
}
EXPORT_CASES: list[tuple[str, RunSpec]] = [
    ("megatron", make_run(tp=4, pp=2, data_parallel="zero1", activation_checkpointing="selective")),
    ("megatron", make_run(tp=2, pp=2, cp=2, schedule="interleaved", virtual_stages=2, micro_batch_size=1)),
    ("megatron", make_run(SMALL, pp=4, activation_checkpointing="full")),
    ("megatron", make_run(data_parallel="zero1", activation_checkpointing="norms")),
    ("megatron", make_run(GPT2, tp=2, sequence_parallel=False, data_parallel="zero1", offload="cpu")),
    ("megatron", make_run(QWEN, cp=2, cp_method="ulysses", data_parallel="zero3", optimizer=WSD)),
    ("megatron", make_run(data_parallel="hsdp", dp_shard=8, reshard_after_forward=False)),
    ("megatron", make_run(EXPERTS, tp=2, ep=4, data_parallel="zero2")),
    (
        "megatron",
        make_run({**EXPERTS, "moe": {**EXPERTS["moe"], "num_leading_dense_layers": 2, "capacity_factor": 1.5}}, ep=8),
    ),
    (
        "megatron",
        make_run({**SMALL, "rope": {"scaling": "llama3", "factor": 8.0}}, gradient_compression="bf16", bucket_mb=50.0),
    ),
    ("megatron", make_run({**SMALL, "rope": {"scaling": "linear", "factor": 4.0}}, optimizer={"name": "sgd"})),
    ("megatron", make_run(GLM, ep=8)),
    ("megatron", make_run(LATENT, ep=8, tp=2)),
    ("megatron", make_run({**LATENT, "mtp": {}}, ep=8, tp=2)),
    ("torchtitan", make_run(data_parallel="hsdp", dp_shard=4, tp=2, activation_checkpointing="full")),
    ("torchtitan", make_run(tp=2, pp=2, cp=2, data_parallel="zero3")),
    ("torchtitan", make_run(pp=4, data_parallel="zero3", schedule="zb-v", micro_batch_size=1)),
    ("torchtitan", make_run(pp=2, data_parallel="zero3", schedule="interleaved", virtual_stages=4, micro_batch_size=2)),
    ("torchtitan", make_run(QWEN, data_parallel="zero2", offload="cpu", optimizer=WSD)),
    ("torchtitan", make_run(SMALL, {"compile": True}, {"lr_schedule": "none", "max_grad_norm": 0.0})),
    (
        "torchtitan",
        make_run({**EXPERTS, "tie_embeddings": True}, tp=2, ep=4, data_parallel="zero3", reshard_after_forward=False),
    ),
    ("torchtitan", make_run({"preset": "llama3-405b"}, tp=8, pp=2, data_parallel="zero3")),
    ("torchtitan", make_run(tp=2, pp=2, data_parallel="ddp", sequence_parallel=False)),
    (
        "torchtitan",
        make_run({**EXPERTS, "moe": {**EXPERTS["moe"], "num_leading_dense_layers": 2}}, ep=8, data_parallel="zero3"),
    ),
    ("automodel", make_run(tp=2, pp=2, data_parallel="zero3", micro_batch_size=1, activation_checkpointing="full")),
    ("automodel", make_run({**SMALL, "sliding_window": 64, "rope": {"theta": 1e6}}, data_parallel="ddp")),
    ("automodel", make_run(QWEN, data_parallel="zero2", offload="cpu", optimizer=WSD)),
    ("automodel", make_run(QWEN_EXPERTS, ep=8, pp=2, data_parallel="zero3", micro_batch_size=1)),
    ("automodel", make_run(HF_LATENT, ep=8, data_parallel="hsdp", dp_shard=8, optimizer={"max_grad_norm": 0.0})),
    ("automodel", make_run(SINKS, training={"precision": "fp32"}, data_parallel="zero3", ep=4)),
    ("automodel", make_run({**QWEN, "layers": "window full", "kinds": KINDS, **GEMMA2}, data_parallel="zero3")),
    ("torchtitan", make_run(HF_LATENT, ep=8, tp=2, data_parallel="zero3")),
    (
        "torchtitan",
        make_run({**LATENT, "mixer": {**LATENT["mixer"], "query_rank": None}, "moe": LEADING}, data_parallel="zero3"),
    ),
    ("deepspeed", make_run(data_parallel="zero3", **NVME_OFFLOAD)),
    ("deepspeed", make_run(data_parallel="zero3", optimizer={"lr_schedule": "none"})),
    (
        "deepspeed",
        make_run(
            tp=4, sequence_parallel=False, data_parallel="zero2", offload="cpu", optimizer={"lr_schedule": "linear"}
        ),
    ),
    ("deepspeed", make_run(pp=4, data_parallel="zero1", activation_checkpointing="full")),
    ("deepspeed", make_run(data_parallel="zero3", activation_checkpointing="offload")),
    ("deepspeed", make_run(cp=4, cp_method="ulysses", data_parallel="zero3")),
    ("deepspeed", make_run(EXPERTS, ep=8, data_parallel="zero1")),
    ("deepspeed", make_run(GPT2, gradient_compression="bf16")),
    ("nanotron", make_run(SMALL, tp=4, pp=2, data_parallel="zero1", optimizer=WSD)),
    ("nanotron", make_run(SMALL, tp=2, sequence_parallel=False, pp=4, schedule="gpipe")),
    ("nanotron", make_run({**SMALL, "tie_embeddings": True}, optimizer={"lr_schedule": "none"})),
]


@pytest.mark.parametrize("run", [run for trainer, run in EXPORT_CASES if trainer == "torchtitan"])
def test_torchtitan_export_imports_only_what_it_uses(run: RunSpec) -> None:
    nodes = list(ast.walk(ast.parse(export(ResolvedRun(run, WORLD_SIZE), "torchtitan").text)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.asname or alias.name for node in imports for alias in node.names]
    assert [name for name in names if name not in {node.id for node in nodes if isinstance(node, ast.Name)}] == []


@pytest.mark.parametrize(("trainer", "run"), EXPORT_CASES)
def test_export_round_trips_degrees_batch_and_model_shape(trainer: Trainer, run: RunSpec) -> None:
    exported = export(ResolvedRun(run, WORLD_SIZE), trainer)
    exported_values, sizes, batch_plan, spec = (
        READERS[trainer](exported),
        parallel_dims(run.layout, WORLD_SIZE),
        ResolvedRun(run, WORLD_SIZE).batch,
        run.model,
    )
    expected = {
        "dp": sizes.dp_size,
        "tp": sizes.tp,
        "pp": sizes.pp,
        "cp": sizes.cp,
        "micro_batch": batch_plan.micro_batch_size,
        "sequences": batch_plan.global_batch_size,
        "sequence": 1024,
        "layers": spec.num_layers,
        "width": spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "kv_heads": spec.num_kv_heads,
        "vocab": spec.vocab_size,
    }
    assert exported_values == {name: expected[name] for name in exported_values}
    assert (
        exported_values["dp"] * exported_values["tp"] * exported_values.get("pp", sizes.pp) * exported_values["cp"]
        == WORLD_SIZE
    )
    if trainer != "deepspeed":
        assert exported_values.keys() == expected.keys()


def test_megatron_export_has_both_scales_of_yarn() -> None:
    table = parse_megatron_flags(export(ResolvedRun(make_run(LATENT, ep=8), WORLD_SIZE), "megatron"))
    assert (float(table["mscale"]), float(table["mscale-all-dim"])) == (1, 1)
    plain = {**LATENT, "attention_scale": None, "rope": LATENT["rope"] | {"attention_factor": None}}
    table = parse_megatron_flags(export(ResolvedRun(make_run(plain, ep=8), WORLD_SIZE), "megatron"))
    assert (float(table["mscale"]), float(table["mscale-all-dim"])) == (1, 0)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_export_writes_the_options_that_the_release_has_read(trainer: Trainer) -> None:
    exports = [export(ResolvedRun(run, WORLD_SIZE), name) for name, run in EXPORT_CASES if name == trainer]
    assert set().union(
        *(exported_option_names(exported_run, trainer) for exported_run in exports)
    ) == known_option_names(trainer)


@pytest.mark.parametrize(("trainer", "run"), EXPORT_CASES)
def test_export_begins_with_the_version_it_is_for(trainer: Trainer, run: RunSpec) -> None:
    exported = export(ResolvedRun(run, WORLD_SIZE), trainer)
    assert exported.notes[0] == f"For {RELEASES[trainer]}."
    assert exported.notes[0] in exported.text.splitlines()[0]
    if trainer != "deepspeed":
        assert exported.text.startswith("".join(f"# {note}\n" for note in exported.notes))


ZERO1_MICRO_BATCH_1 = {"data_parallel": "zero1", "micro_batch_size": 1}
UNSUPPORTED_CASES: list[tuple[Trainer, RunSpec, str, str]] = [
    *(
        (trainer, make_run(SMALL, data_parallel="parameter_server", tp=1), "layout.data_parallel", "zero1")
        for trainer in TRAINERS
    ),
    *((trainer, make_run(SMALL, training={"precision": "fp64"}), "training.precision", "bf16") for trainer in TRAINERS),
    *((trainer, make_run(SMALL, optimizer={"name": "muon"}), "optimizer.name", "adamw") for trainer in TRAINERS),
    *(
        (trainer, make_run(SMALL, gradient_compression="powersgd"), "layout.gradient_compression", "remove it")
        for trainer in TRAINERS
    ),
    *(
        (trainer, make_run({**SMALL, "attention_sinks": True}), "model.attention_sinks", "model")
        for trainer in TRAINERS
        if trainer != "deepspeed"
    ),
    *(
        (trainer, make_run({**SMALL, "sliding_window": 64}), "model.sliding_window", "64 or less")
        for trainer in TRAINERS
        if trainer not in ("automodel", "deepspeed")
    ),
    ("megatron", make_run(pp=4, schedule="zb-v", **ZERO1_MICRO_BATCH_1), "layout.schedule", "1f1b"),
    ("megatron", make_run(pp=4, schedule="gpipe", **ZERO1_MICRO_BATCH_1), "layout.schedule", "1f1b"),
    ("megatron", make_run(pp=2, data_parallel="zero3"), "layout.data_parallel", "zero1"),
    ("megatron", make_run(data_parallel="zero3", offload="cpu"), "layout.offload", "zero1"),
    ("megatron", make_run(data_parallel="zero1", **NVME_OFFLOAD), "layout.offload", "cpu"),
    ("megatron", make_run({**SMALL, "rope": {"theta": 1e4 + 0.5}}), "model.rope.theta", "use an integer"),
    ("megatron", make_run({**SMALL, "rope": {"scaling": "yarn", "factor": 4.0}}), "model.rope.scaling", "remove it"),
    ("megatron", make_run({**SMALL, "attention_scale": 0.1}), "model.attention_scale", "remove it"),
    ("megatron", make_run({**LATENT, "rope": {}}), "model.attention_scale", "remove it"),
    ("megatron", make_run({**LATENT, "attention_bias": "qkv"}), "model.attention_bias", "none"),
    (
        "megatron",
        make_run({**LATENT, "rope": LATENT["rope"] | {"beta_fast": 1.0}}),
        "model.rope.beta_fast",
        "use 32.0",
    ),
    ("megatron", make_run({**SMALL, "mixer": {"kind": "short_convolution"}}), "model.mixer.kind", "another model"),
    ("megatron", make_run(SMALL, tp=8), "layout.tp", "divisor"),
    ("megatron", make_run({**EXPERTS, "moe": {**EXPERTS["moe"], "top_k": 1}}), "model.moe.normalize_top_k", "false"),
    ("torchtitan", make_run(data_parallel="zero1"), "layout.data_parallel", "zero2"),
    ("torchtitan", make_run(EXPERTS, data_parallel="ddp", ep=2), "layout.ep", "zero3"),
    (
        "torchtitan",
        make_run({**QWEN, "rope": {"scaling": "llama3", "factor": 8.0}}, data_parallel="zero3"),
        "model.rope.scaling",
        "another model",
    ),
    (
        "torchtitan",
        make_run(pp=4, schedule="zb-h1", data_parallel="zero3", micro_batch_size=1),
        "layout.schedule",
        "schedule_file",
    ),
    ("torchtitan", make_run(cp=2, cp_method="ulysses", data_parallel="zero3"), "layout.cp_method", "ring"),
    ("torchtitan", make_run(GPT2), "model.norm", "another model"),
    ("torchtitan", make_run(tp=16), "layout.tp", "divisor"),
    ("torchtitan", make_run({**LATENT, "rope": {}}, data_parallel="zero3"), "model.attention_scale", "remove it"),
    (
        "torchtitan",
        make_run({**SMALL, "rope": {"scaling": "yarn", "factor": 4.0}}, data_parallel="zero3"),
        "model.rope.scaling",
        "another model",
    ),
    ("torchtitan", make_run({**SMALL, "mixer": {"kind": "short_convolution"}}), "model.mixer.kind", "another model"),
    ("torchtitan", make_run(activation_checkpointing="selective"), "layout.activation_checkpointing", "full"),
    ("torchtitan", make_run(activation_checkpointing="offload"), "layout.activation_checkpointing", "full"),
    ("torchtitan", make_run(activation_checkpointing="norms"), "layout.activation_checkpointing", "none"),
    ("automodel", make_run(GPT2, tp=2, data_parallel="zero3"), "layout.tp", "1"),
    ("automodel", make_run(QWEN_EXPERTS, tp=2, data_parallel="zero3"), "layout.tp", "1"),
    ("automodel", make_run(tp=2, data_parallel="ddp"), "layout.data_parallel", "zero3"),
    ("automodel", make_run(cp=2, data_parallel="zero3"), "layout.cp", "1"),
    ("automodel", make_run(tp=8, pp=2, micro_batch_size=64, data_parallel="zero3"), "layout.pp", "micro_batch"),
    (
        "automodel",
        make_run({**SMALL, "tie_embeddings": True}, pp=2, schedule="zb-v", data_parallel="zero3", micro_batch_size=1),
        "model.tie_embeddings",
        "false",
    ),
    ("automodel", make_run({**SMALL, "norm_position": "after"}), "model.norm_position", "before"),
    ("automodel", make_run(activation_checkpointing="norms"), "layout.activation_checkpointing", "full"),
    ("deepspeed", make_run(activation_checkpointing="norms"), "layout.activation_checkpointing", "none"),
    ("megatron", make_run(activation_checkpointing="offload"), "layout.activation_checkpointing", "full"),
    ("megatron", make_run(activation_checkpointing="full", recomputed_blocks=2), "layout.recomputed_blocks", "remove"),
    ("deepspeed", make_run(pp=2, data_parallel="zero3"), "layout.data_parallel", "zero1"),
    ("deepspeed", make_run(data_parallel="hsdp", dp_shard=8), "layout.data_parallel", "zero3"),
    ("deepspeed", make_run(tp=2), "layout.sequence_parallel", "false"),
    ("deepspeed", make_run(cp=2), "layout.cp_method", "ulysses"),
    ("deepspeed", make_run(pp=4, schedule="dualpipe-v", **ZERO1_MICRO_BATCH_1), "layout.schedule", "1f1b"),
    ("deepspeed", make_run(data_parallel="zero1", **NVME_OFFLOAD), "layout.offload", "zero3"),
    ("nanotron", make_run(SMALL, data_parallel="hsdp", dp_shard=4), "layout.data_parallel", "ddp"),
    ("nanotron", make_run(SMALL, cp=2), "layout.cp", "1"),
    ("nanotron", make_run(), "model.rope.theta", "another model"),
    ("nanotron", make_run(SMALL, activation_checkpointing="full"), "layout.activation_checkpointing", "none"),
    ("nanotron", make_run(EXPERTS, ep=2, data_parallel="zero3"), "model.moe", "another model"),
    ("nanotron", make_run({**SMALL, "qk_norm": "head"}), "model.qk_norm", "another model"),
    ("nanotron", make_run({**SMALL, "head_dim": 64}), "model.head_dim", "32"),
    ("nanotron", make_run(SMALL, data_parallel="zero1", offload="cpu"), "layout.offload", "remove it"),
]


@pytest.mark.parametrize(("trainer", "run", "field", "fix"), UNSUPPORTED_CASES)
def test_export_rejects_options_unsupported_by_the_trainer(
    trainer: Trainer, run: RunSpec, field: str, fix: str
) -> None:
    world_size = WORLD_SIZE + (run.layout.data_parallel == "parameter_server")
    with pytest.raises(UserError) as error:
        export(ResolvedRun(run, world_size), trainer)
    assert error.value.field == field
    change, others = error.value.fix.split("; trainers for the unchanged run: ")
    assert fix in change
    suggested = [other for other in TRAINERS if TRAINER_NAMES[other] in others]
    assert others == (", ".join(TRAINER_NAMES[other] for other in suggested) or "none of them")
    for other in TRAINERS:
        if other in suggested:
            assert export(ResolvedRun(run, world_size), other).text
        else:
            with pytest.raises(UserError):
                export(ResolvedRun(run, world_size), other)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_export_rejects_batch_not_divisible_by_data_parallel_size(trainer: Trainer) -> None:
    with pytest.raises(UserError, match=r"unequal shares \(67 sequences per step\)"):
        export(ResolvedRun(make_run(training={"tokens_per_step": 67 * 1024}, micro_batch_size=2), WORLD_SIZE), trainer)


MEGATRON_OVERLAP = {"overlap-grad-reduce", "overlap-param-gather"}


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        ({"data_parallel": "zero1", "pp": 2}, MEGATRON_OVERLAP),
        ({"data_parallel": "ddp"}, {"overlap-grad-reduce"}),
        ({"data_parallel": "zero3"}, MEGATRON_OVERLAP),
        ({"data_parallel": "ddp", "pp": 16}, set()),
    ],
)
def test_megatron_export_has_flags_that_the_predicted_time_assumes(layout: Table, overlap: set[str]) -> None:
    names = exported_option_names(
        export(ResolvedRun(make_run(micro_batch_size=1, **layout), WORLD_SIZE), "megatron"), "megatron"
    )
    assert names & MEGATRON_OVERLAP == overlap
    assert "cross-entropy-loss-fusion" in names
    assert "moe-permute-fusion" not in names
    experts = export(ResolvedRun(make_run(EXPERTS, micro_batch_size=1, data_parallel="zero1"), WORLD_SIZE), "megatron")
    assert "moe-permute-fusion" in exported_option_names(experts, "megatron")


@pytest.mark.parametrize(
    ("layout", "overlaps"), [({"data_parallel": "zero1"}, True), ({"data_parallel": "ddp"}, False)]
)
def test_deepspeed_export_overlaps_reductions_outside_pipelines(layout: Table, overlaps: bool) -> None:
    for pp in (1, 2):
        zero = json.loads(
            export(ResolvedRun(make_run(micro_batch_size=1, pp=pp, **layout), WORLD_SIZE), "deepspeed").text
        )
        assert zero["zero_optimization"].get("overlap_comm", False) == (overlaps and pp == 1)


@pytest.mark.parametrize(
    ("trainer", "layout", "state"),
    [
        ("megatron", {"data_parallel": "zero1"}, "6 + 12/16 bytes of state a parameter"),
        ("megatron", {"data_parallel": "ddp"}, "18 bytes of state a parameter"),
        ("megatron", {"data_parallel": "zero3"}, "a bf16 copy of its shard of the parameters"),
        ("torchtitan", {"data_parallel": "zero3"}, "the output of each activation function"),
        ("deepspeed", {"data_parallel": "zero2"}, "buckets of 500,000,000 gradients"),
        ("nanotron", {"data_parallel": "zero1"}, "fp32 gradients of all parameters of a rank"),
    ],
)
def test_export_says_what_the_other_trainer_keeps_in_addition(trainer: Trainer, layout: Table, state: str) -> None:
    model = {**SMALL, "rope": {"theta": 10_000.0}}
    exported = export(ResolvedRun(make_run(model, micro_batch_size=1, **layout), WORLD_SIZE), trainer)
    (note,) = (note for note in exported.notes if "in addition to" in note)
    assert note.startswith(f"{TRAINER_NAMES[trainer]} keeps in addition to what Phalanx does: ")
    assert state in note
    assert "P(OOM)" not in exported.text


@pytest.mark.parametrize("trainer", TRAINERS)
def test_export_notes_name_untuned_default_hyperparameters(trainer: Trainer) -> None:
    layout = {"data_parallel": "zero1"} if trainer not in ("torchtitan", "automodel") else {"data_parallel": "zero2"}
    table = {"model": QWEN | {"qk_norm": "none", "head_dim": 32}, "layout": {"micro_batch_size": 1, **layout}}
    batch = {"seq_len": 1024, "tokens_per_step": 65_536}
    exported = export(ResolvedRun(run_from_table({**table, "training": batch}), WORLD_SIZE), trainer)
    for expected in (
        "optimizer.learning_rate = 0.003: not set",
        "training.steps = 1000: a default of Phalanx",
        "optimizer.warmup_steps = 50: a default of Phalanx",
    ):
        assert any(note.startswith(expected) for note in exported.notes)
        assert trainer == "deepspeed" or f"# {expected}" in exported.text
    assert any(note.startswith("checkpoint.every = 500: ") for note in exported.notes) == (trainer == "nanotron")
    tuned = {**table, "training": {**batch, "steps": 9}, "optimizer": {"learning_rate": 0.003}}
    tuned["checkpoint"] = {"every": 3}
    assert not any("default" in note for note in export(ResolvedRun(run_from_table(tuned), WORLD_SIZE), trainer).notes)


def test_export_rejects_unknown_trainer() -> None:
    with pytest.raises(UserError, match="is not known"):
        export(ResolvedRun(make_run(), WORLD_SIZE), "accelerate")  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}])
def test_exported_pipeline_split_equals_layers_per_stage(layout: Table) -> None:
    run = make_run(data_parallel="zero1", micro_batch_size=1, **layout)
    lengths = [len(stage) for stage in layers_per_stage(run)]
    assert len(set(lengths)) > 1
    split = parse_megatron_flags(export(ResolvedRun(run, WORLD_SIZE), "megatron"))["pipeline-model-parallel-layout"]
    assert (split[0], split[-1]) == ("E", "L")
    assert [stage.count("t") for stage in split.split("|")] == lengths
    exported = export(ResolvedRun(run.replace(layout={**layout, "data_parallel": "zero3"}), WORLD_SIZE), "torchtitan")
    parts = parse_torchtitan_calls(exported)["ParallelismConfig"]["module_fqns_per_model_part"]
    blocks = [f"layers.{layer}" for layer in range(run.model.num_layers)]
    assert [name for part in parts for name in part] == ["tok_embeddings", *blocks, "norm", "lm_head"]


def test_exported_layers_for_multi_token_prediction_are_on_the_last_stage() -> None:
    run = make_run({**SMALL, "mtp": {"layers": 2, "loss_coef": 0.3}}, pp=2, data_parallel="zero1", micro_batch_size=1)
    flags = parse_megatron_flags(export(ResolvedRun(run, WORLD_SIZE), "megatron"))
    assert (flags["mtp-num-layers"], flags["mtp-loss-scaling-factor"]) == ("2", "0.3")
    num_layers = run.model.num_layers
    assert flags["pipeline-model-parallel-layout"].replace("|", "") == f"E{'t' * num_layers}mmL"
    with pytest.raises(UserError, match=r"model\.mtp"):
        export(ResolvedRun(run, WORLD_SIZE), "torchtitan")


SHARDING_CASES: list[tuple[Trainer, RunSpec, Table]] = [
    ("megatron", make_run(data_parallel="zero1"), {"use-distributed-optimizer": True, "use-megatron-fsdp": None}),
    ("megatron", make_run(data_parallel="zero2"), {"data-parallel-sharding-strategy": "optim_grads"}),
    ("megatron", make_run(data_parallel="hsdp", dp_shard=8), {"num-distributed-optimizer-instances": "2"}),
    ("torchtitan", make_run(), {"data_parallel_replicate_degree": 16, "data_parallel_shard_degree": 1}),
    (
        "torchtitan",
        make_run(data_parallel="zero2"),
        {"data_parallel_shard_degree": 16, "fsdp_reshard_after_forward": "never"},
    ),
    (
        "torchtitan",
        make_run(data_parallel="zero3"),
        {"data_parallel_shard_degree": 16, "fsdp_reshard_after_forward": "always"},
    ),
    ("torchtitan", make_run(data_parallel="hsdp", dp_shard=8), {"data_parallel_replicate_degree": 2}),
    ("deepspeed", make_run(), {"stage": 0}),
    ("deepspeed", make_run(data_parallel="zero2"), {"stage": 2}),
    ("nanotron", make_run(SMALL), {"zero_stage": 0}),
    ("nanotron", make_run(SMALL, data_parallel="zero1"), {"zero_stage": 1}),
]


@pytest.mark.parametrize(("trainer", "run", "expected"), SHARDING_CASES)
def test_exported_sharding_options_match_data_parallel_strategy(
    trainer: Trainer, run: RunSpec, expected: Table
) -> None:
    exported = export(ResolvedRun(run, WORLD_SIZE), trainer)
    if trainer == "megatron":
        table = parse_megatron_flags(exported)
    elif trainer == "torchtitan":
        table = parse_torchtitan_calls(exported)["ParallelismConfig"]
    elif trainer == "deepspeed":
        table = json.loads(exported.text)["zero_optimization"]
    else:
        table = yaml.safe_load(exported.text)["optimizer"]
    assert {name: table.get(name) for name in expected} == expected


def test_torchtitan_export_local_batch_contains_all_micro_batches() -> None:
    run = make_run(pp=4, data_parallel="zero3", micro_batch_size=2)
    training = parse_torchtitan_calls(export(ResolvedRun(run, WORLD_SIZE), "torchtitan"))["TrainingConfig"]
    batch_plan = ResolvedRun(run, WORLD_SIZE).batch
    assert batch_plan.gradient_accumulation_steps > 1
    assert training["local_batch_size"] == 2 * batch_plan.gradient_accumulation_steps
    assert training["local_batch_size"] * batch_plan.dp_size == batch_plan.global_batch_size


@pytest.mark.parametrize(
    ("layout", "uses_mapping"), [({"tp": 2}, True), ({"cp": 2}, False), ({"ep": 4}, False), ({"tp": 2, "ep": 2}, True)]
)
def test_megatron_export_uses_tp_pp_dp_mapping_only_when_supported(layout: Table, uses_mapping: bool) -> None:
    model = EXPERTS if "ep" in layout else SMALL
    run = make_run(model, pp=2, data_parallel="zero1", **layout)
    exported = export(ResolvedRun(run, WORLD_SIZE), "megatron")
    assert ("use-tp-pp-dp-mapping" in parse_megatron_flags(exported)) == uses_mapping
    assert any("closer to each other than pipeline ranks" in note for note in exported.notes) != uses_mapping
    outside = export(
        ResolvedRun(make_run(model, pp=2, data_parallel="zero1", rank_order="pipeline_outer", **layout), WORLD_SIZE),
        "megatron",
    )
    assert "use-tp-pp-dp-mapping" not in parse_megatron_flags(outside)
    assert not any("closer to each other than pipeline ranks" in note for note in outside.notes)


@pytest.mark.parametrize(
    ("kv_heads", "tp", "comm_type"), [(8, 1, "a2a"), (8, 2, "a2a"), (4, 2, "p2p"), (2, 1, "p2p"), (1, 1, "p2p")]
)
def test_megatron_export_asks_for_all_to_all_only_with_enough_key_value_heads(
    kv_heads: int, tp: int, comm_type: str
) -> None:
    run = make_run({**SMALL, "num_kv_heads": kv_heads}, tp=tp, cp=4, cp_method="ulysses", data_parallel="zero1")
    exported = export(ResolvedRun(run, WORLD_SIZE), "megatron")
    assert parse_megatron_flags(exported)["cp-comm-type"] == comm_type
    assert any("in a ring (p2p)" in note for note in exported.notes) == (comm_type == "p2p")


def test_megatron_export_uses_virtual_stage_count_for_even_split() -> None:
    model = {**SMALL, "vocab_size": 256, "num_layers": 64}
    flags = parse_megatron_flags(
        export(
            ResolvedRun(
                make_run(model, pp=2, schedule="interleaved", virtual_stages=2, micro_batch_size=1), WORLD_SIZE
            ),
            "megatron",
        )
    )
    assert flags["num-virtual-stages-per-pipeline-rank"] == "2"
    assert "pipeline-model-parallel-layout" not in flags


def test_megatron_export_sets_expert_parallel_sizes() -> None:
    for ep, split in ((4, "1"), (1, "2")):
        flags = parse_megatron_flags(export(ResolvedRun(make_run(EXPERTS, tp=2, ep=ep), WORLD_SIZE), "megatron"))
        assert (flags["expert-model-parallel-size"], flags["expert-tensor-parallel-size"]) == (str(ep), split)
        assert (flags["num-experts"], flags["moe-router-topk"]) == ("8", "2")
        assert flags["moe-shared-expert-intermediate-size"] == "128"


def test_megatron_export_is_valid_shell_script(tmp_path: Path) -> None:
    exported = export(ResolvedRun(make_run(pp=4, tp=2, data_parallel="zero1"), WORLD_SIZE), "megatron")
    script = tmp_path / "megatron.sh"
    script.write_text(exported.text)
    subprocess.run(["bash", "-n", script], check=True)
    lines = [line for line in exported.text.splitlines() if line.strip().startswith("--")]
    assert all(line.endswith(" \\") and line.count("--") == 1 for line in lines)


def test_torchtitan_export_schedule_names_exist_in_pytorch() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    from phalanx.plan.export.torchtitan import TORCH_NAMES

    for name in (*TORCH_NAMES.values(), "PipelineScheduleMulti"):
        assert get_schedule_class(name)


def test_torchtitan_export_accepts_schedule_files_except_v_shaped(tmp_path: Path) -> None:
    micro_batches = ResolvedRun(
        make_run(pp=4, data_parallel="zero3", micro_batch_size=2), WORLD_SIZE
    ).batch.gradient_accumulation_steps
    for name in ("zb-h1", "zb-v"):
        (tmp_path / name).write_text(to_csv(build_schedule(name, 4, micro_batches)))
    run = make_run(pp=4, data_parallel="zero3", micro_batch_size=2, schedule_file=str(tmp_path / "zb-h1"))
    axes = parse_torchtitan_calls(export(ResolvedRun(run, WORLD_SIZE), "torchtitan"))["ParallelismConfig"]
    assert axes["pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    assert axes["pipeline_parallel_schedule_csv"] == str(tmp_path / "zb-h1")
    with pytest.raises(UserError, match="stage s on rank s mod pp"):
        export(
            ResolvedRun(
                make_run(pp=4, data_parallel="zero3", micro_batch_size=2, schedule_file=str(tmp_path / "zb-v")),
                WORLD_SIZE,
            ),
            "torchtitan",
        )


def test_nanotron_export_writes_small_floats_as_yaml_numbers() -> None:
    table = yaml.safe_load(export(ResolvedRun(make_run(SMALL, optimizer={"eps": 1e-8}), WORLD_SIZE), "nanotron").text)
    assert table["optimizer"]["adam_eps"] == 1e-8


def test_export_module_does_not_import_torch() -> None:
    code = "import sys; import phalanx.plan.export.export; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
