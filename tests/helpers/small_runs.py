"""Short runs of the real trainer, whose losses and gradient norms are compared between layouts."""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.data.prepare import prepare
from phalanx.runs.create import claim_run_directory, run_directory
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.standard import standard_callbacks
from phalanx.train.profiling.step_profiler import first_steady_step, profile_step
from phalanx.train.progress import ProgressDisplay
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data

Table = dict[str, Any]
DENSE: Table = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "max_seq_len": 64,
    "qk_norm": "head",
}
INDEXERS: Table = {
    **DENSE,
    "num_kv_heads": 4,
    "qk_norm": "none",
    "mixer": {
        "kind": "latent_attention",
        "query_rank": 24,
        "latent_rank": 16,
        "rope_dim": 4,
        "value_dim": 8,
        "indexer": {"num_heads": 3, "head_dim": 8, "top_k": 64},
    },
}
MOE: Table = {
    **DENSE,
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "num_shared_experts": 1, "bias_update_rate": 0.01},
}
TWO_EXPERTS: Table = {**MOE, "moe": {**MOE["moe"], "num_experts": 2}}
"""Fewer experts than data-parallel ranks."""
TEMPERATURE: Table = {"scale": 0.4, "interval": 5, "offset": 1}
KINDS: Table = {
    **MOE,
    "num_layers": 4,
    "layers": "window full dense nope",
    "norm_position": "both",
    "sliding_window": 12,
    "kinds": [
        {"name": "full", "sliding_window": False, "head_dim": 16, "rope": {"theta": 1e6}, "attention_sinks": True},
        {"name": "dense", "moe": False, "ffn_hidden_size": 96, "num_heads": 8},
        {
            "name": "nope",
            "position_embedding": "none",
            "qk_norm": "full",
            "query_temperature": TEMPERATURE,
            "indexer": {"num_heads": 2, "head_dim": 8, "block_size": 16, "top_blocks": 4},
        },
    ],
}
"""Layers of four kinds, with norms before and after their parts, and an indexer of blocks, as in MiniMax-M3."""
DIALS: Table = {
    **DENSE,
    "num_layers": 4,
    "activation": "geglu_tanh",
    "attention_bias": "qkv",
    "attention_scale": 0.3,
    "attention_clip": 0.5,
    "rope": {"fraction": 0.5},
    "query_temperature": TEMPERATURE,
    "norm_offset": "layers",
    "embedding_scale": 3.0,
    "residual_scale": 0.6,
    "logits_divisor": 2.5,
    "logits_softcap": 1.5,
}
"""Biases, scales, offsets and limits, as in Qwen2, Granite, Gemma and OLMo."""
LATENT: Table = {
    **MOE,
    "num_layers": 4,
    "num_kv_heads": 4,
    "head_dim": 12,
    "qk_norm": "none",
    "attention_bias": "all",
    "attention_gate": "head",
    "mixer": {"kind": "latent_attention", "latent_rank": 20, "query_rank": 24, "rope_dim": 4, "value_dim": 6},
    "layers": "latent*2 dense nope",
    "kinds": [
        {
            "name": "dense",
            "moe": False,
            "mixer": {"kind": "latent_attention", "latent_rank": 16, "rope_dim": 6, "value_dim": 12},
        },
        {"name": "nope", "position_embedding": "none", "query_temperature": {"scale": 0.2, "interval": 4}},
    ],
}
"""Latent attention, as in DeepSeek-V3 and Mistral 4, and a gate of each head, as in Ling 3."""
PARALLEL: Table = {
    **DENSE,
    "num_layers": 4,
    "norm": "layernorm",
    "norm_parameters": "weight",
    "qk_norm": "each_head",
    "parallel_residual": "one_norm",
    "activation": "xielu",
    "residual_scale": 0.6,
    "layers": "window*3 nope",
    "sliding_window": 12,
    "kinds": [{"name": "nope", "sliding_window": False, "position_embedding": "none"}],
}
"""Attention and MLP in parallel, as in Cohere 2, a norm of each head, as in Command R+, and xIELU, as in Apertus."""
WIDE: Table = {
    **DENSE,
    "num_layers": 4,
    "head_dim": 8,
    "norm_position": "both",
    "attention_scale": 1.0,
    "attention_gate": "head",
    "value_norm": True,
    "layer_scalars": True,
    "rope": {"theta": 1e6, "scaling": "proportional", "fraction": 0.25},
    "layers": "window*3 full",
    "sliding_window": 12,
    "kinds": [
        {"name": "window", "rope": {"theta": 1e4}},
        {"name": "full", "sliding_window": False, "head_dim": 16, "values_from_keys": True},
    ],
}
"""Full attention with wider heads, whose values are keys, as in Gemma 4, and a gate of each head, as in LFM3."""
SHARED_KEYS: Table = {
    **{field: value for field, value in WIDE.items() if field != "attention_gate"},
    "num_layers": 5,
    "layers": "full window window full window",
    "kinds": [{"name": "window", "num_kv_heads": 1}, {"name": "full", "sliding_window": False, "head_dim": 16}],
    "num_shared_kv_layers": 2,
    "shared_kv_ffn_size": 96,
    "per_layer_input_size": 6,
    "tie_embeddings": True,
}
"""Last layers that read the keys and values of earlier ones, and inputs of each layer, as in Gemma 4 E2B."""
CONVOLUTION: Table = {"kind": "short_convolution", "kernel_size": 3, "bias": True}
CONVOLUTIONS: Table = {
    **MOE,
    "moe": {
        **MOE["moe"],
        "dense_branch": True,
        "router_norm": True,
        "expert_scales": True,
        "num_shared_experts": 1,
        "shared_gate": True,
        "num_groups": 2,
        "top_groups": 1,
        "routed_scale": 1.7,
    },
    "norm_position": "both",
    "num_layers": 4,
    "layers": "conv*2 full dense",
    "kinds": [
        {"name": "conv", "mixer": CONVOLUTION},
        {"name": "dense", "mixer": CONVOLUTION, "moe": False},
    ],
}
"""Convolutions in most layers, as in LFM2, and an MLP with the experts, as in Gemma 4."""

DELTA: Table = {
    **MOE,
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "num_shared_experts": 1, "shared_gate": True},
    "norm_offset": True,
    # Outputs of a document's first tokens may be near 0. With 1e-6, their norm amplifies roundings in each layer.
    "norm_eps": 1e-2,
    "attention_gate": "channel",
    "num_layers": 4,
    "layers": "delta*2 full dense",
    "rope": {"fraction": 0.5},
    "kinds": [
        {
            "name": "delta",
            "mixer": {
                "kind": "gated_delta",
                "num_key_heads": 2,
                "num_value_heads": 4,
                "key_head_dim": 8,
                "value_head_dim": 12,
                "negative_eigenvalues": True,
                "norm_eps": 1e-3,
            },
        },
        {"name": "full", "num_kv_heads": 1, "norm_position": "after"},
        {"name": "dense", "moe": False},
    ],
}
"""Gated DeltaNet in most layers, and attention with a gate, as in Qwen3-Next; norms and updates as in OLMo Hybrid."""
KIMI: Table = {
    **DELTA,
    "norm_offset": False,
    "attention_gate": "none",
    "qk_norm": "none",
    "position_embedding": "none",
    "num_kv_heads": 4,
    "head_dim": 12,
    "mixer": {"kind": "latent_attention", "latent_rank": 20, "rope_dim": 4, "value_dim": 6},
    "rope": {},
    "kinds": [
        {"name": "delta", "mixer": {"kind": "kimi_delta", "num_heads": 4, "head_dim": 8}},
        {
            "name": "dense",
            "mixer": {"kind": "kimi_delta", "num_heads": 4, "head_dim": 12, "has_latents": False, "decay_bound": -5.0},
            "moe": False,
        },
    ],
}
"""Kimi Delta Attention in most layers, and latent attention without positions, as in Kimi Linear; a layer of Ling 3."""
BIASED_EXPERTS: Table = {
    **DENSE,
    "qk_norm": "none",
    "num_layers": 4,
    "layers": "window full",
    "sliding_window": 12,
    "attention_sinks": True,
    "attention_bias": "all",
    "activation": "clamped_swiglu",
    "swiglu_limit": 0.1,
    "rope": {"theta": 1.5e5, "scaling": "yarn", "factor": 4.0, "original_context": 16, "truncate": False},
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "bias": True},
    "kinds": [{"name": "full", "sliding_window": False}],
}
"""Biases and an activation with limits, as in gpt-oss."""
MAMBA: Table = {"kind": "mamba2", "num_heads": 4, "head_dim": 8, "state_size": 8, "chunk_size": 8, "max_step": 0.5}
MAMBAS: Table = {
    **MOE,
    "position_embedding": "none",
    "num_layers": 4,
    "layers": "mamba full mamba dense",
    "kinds": [
        {"name": "mamba", "mixer": MAMBA},
        {"name": "dense", "mixer": MAMBA | {"bias": True}, "moe": False},
    ],
}
"""Mamba-2 with one group, as in Granite 4: ranks share its heads, and its norm."""
SIDE_BY_SIDE: Table = {
    **DENSE,
    "num_layers": 4,
    "value_scale": 0.7,
    "gate_scale": 0.6,
    "up_scale": 1.4,
    "side_mixer": MAMBA | {"num_groups": 2, "scales": [0.8, 1.2, 0.9, 1.1, 0.7], "output_scale": 0.6},
}
"""Attention and Mamba-2 side by side, with factors of their products, as in Falcon-H1."""
BRANCHES: Table = {
    **MOE,
    "moe": MOE["moe"] | {"latent_size": 20},
    "activation": "relu2",
    "num_layers": 4,
    "layers": "mamba experts attention mlp",
    "kinds": [
        {"name": "mamba", "branches": "mixer", "mixer": MAMBA | {"num_groups": 2}},
        {"name": "attention", "branches": "mixer", "position_embedding": "none"},
        {"name": "experts", "branches": "mlp"},
        {"name": "mlp", "branches": "mlp", "moe": False, "ffn_hidden_size": 96},
    ],
}
"""Layers of one branch, as in Nemotron 3: Mamba-2 with groups, experts, attention, an MLP."""

HEAD_GATES: Table = {
    **MOE,
    "num_layers": 4,
    "norm_offset": True,
    "attention_gate": "head",
    "value_head_dim": 6,
    "value_scale": 0.7,
    "layers": "full window limited dense",
    "sliding_window": 12,
    "kinds": [
        {"name": "full", "sliding_window": False, "rope": {"theta": 1e6, "fraction": 0.5}},
        {"name": "window", "num_heads": 8, "num_kv_heads": 4, "attention_sinks": True},
        {"name": "limited", "silu_limit": 0.1, "shared_silu_limit": 0.2},
        {"name": "dense", "moe": False, "silu_limit": 0.2},
    ],
}
"""A gate of each head, and limits of SwiGLUs, as in Step 3.5, and narrow values, as in MiMo-V2."""

PREDICTIONS: Table = {
    **MOE,
    "num_layers": 4,
    "norm_offset": True,
    "logits_softcap": 1.5,
    "moe": {**MOE["moe"], "num_leading_dense_layers": 1},
    "mtp": {"layers": 2, "loss_coef": 0.3},
}
"""Multi-token prediction by two layers, as in DeepSeek-V3."""

MODELS_OF_KINDS: dict[str, Table] = {
    "attention": KINDS,
    "branches": BRANCHES,
    "convolution": CONVOLUTIONS,
    "delta": DELTA,
    "kimi": KIMI,
    "dials": DIALS,
    "parallel": PARALLEL,
    "wide": WIDE,
    "latent": LATENT,
    "biased experts": BIASED_EXPERTS,
    "head gates": HEAD_GATES,
    "mamba": MAMBAS,
    "side by side": SIDE_BY_SIDE,
    "predictions": PREDICTIONS,
    "shared keys": SHARED_KEYS,
}
"""Models with several kinds of layers, or with less common dials."""

GPT2: Table = {
    "qk_norm": "none",
    "position_embedding": "learned",
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
}
STEPS = 20


@cache
def shared_data_cache() -> str:
    """Return the directory of tokens of all runs in this process, so that the same text is prepared only once."""
    folder = tempfile.mkdtemp(prefix="phalanx-parity-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_documents(folder: Path) -> None:
    """Write the standard library's json in parts, so that documents end inside sequences."""
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        for part, lines in enumerate(source.read_text().split("\n\n")[:16]):
            (folder / f"{source.stem}{part}.py").write_text(lines)


def small_run(text: Path, out: Path, changes: Table) -> RunSpec:
    """Return a small run over the Python files of a directory, with changed values ("section.key": value).

    The first file by name is held out, because a share of few files may be empty."""
    held_out, *train = sorted(str(file) for file in text.rglob("*.py"))
    table: Table = {
        "name": "parity",
        "output_dir": str(out),
        "model": DENSE,
        "data": {"train": train, "held_out": [held_out], "tokenizer": "bytes", "cache": shared_data_cache()},
        "training": {"steps": STEPS, "seq_len": 32, "tokens_per_step": 8 * 32, "precision": "fp64"},
        "optimizer": {"warmup_steps": 3, "learning_rate": 0.01},
        "evaluation": {"tokens": 512},
    }
    table = copy.deepcopy(table)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            table.setdefault(section, {})[name] = value
        else:
            table[section] = value
    return run_from_table(table)


def find_examples() -> None:
    """Let this process import the modules of examples/, as if it had been started in that directory."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)


def make_trainer(run: RunSpec, device: str = "cpu", **data: Any) -> Trainer:
    """Return the real trainer of a run on this rank, with prepared data. `data` changes the training data."""
    corpus = replace(open_training_data(run, prepare(run.data)), **data)
    torch_device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    return Trainer(run, corpus, Path(run.output_dir) / run.name, torch_device)


def metered_step(trainer: Trainer, batches: Iterator[Batch]) -> tuple[MetricsRecord, Table]:
    """Train one step with the step profiler; return its record and its measurements."""
    record, profile = profile_step(trainer, lambda _: trainer.train_step(batches))
    return record, {"step": record["step"], **profile.as_dict}


def measure_steady_step(run: RunSpec) -> Table:
    """Measure the memory and traffic of this rank in the first step that is equal to all later steps."""
    trainer, number = make_trainer(run), first_steady_step(run)
    batches = prefetch(trainer.loader, 0, number)
    for _ in range(number - 1):
        trainer.train_step(batches)
    _, measured = metered_step(trainer, batches)
    trainer.strategy.drain_pending_updates()
    return measured


def train_until(trainer: Trainer, last: int) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step up to `last`."""
    batches = prefetch(trainer.loader, trainer.step, last)
    records = [trainer.train_step(batches) for _ in range(trainer.step, last)]
    return [(record["loss"], record["grad_norm"]) for record in records]


def train_and_evaluate(run: RunSpec, device: str = "cpu") -> list[tuple[float, float]]:
    """Return the losses and gradient norms, followed by the held-out loss of the trained weights."""
    trainer = make_trainer(run, device)
    result = train_until(trainer, run.training.steps)
    evaluation = trainer.evaluate()
    return [*result, (evaluation["held_out_loss"], evaluation["held_out_bits_per_byte"])]


def training_trajectory(run: RunSpec) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of every step on this rank."""
    trainer = make_trainer(run)
    result = train_until(trainer, run.training.steps)
    trainer.strategy.drain_pending_updates()
    return result


def save_two_checkpoints(text: Path, out: Path) -> Path:
    """Train a run on one rank and save after steps 2 and 4; return the directory of checkpoints."""
    run = small_run(text, out, {"model": MOE})
    claim_run_directory(run_directory(run))
    trainer = make_trainer(run)
    for last in (2, 4):
        train_until(trainer, last)
        trainer.save()
        trainer.checkpointer.wait()
    return trainer.directory / "checkpoints"


def train_to_end(
    trainer: Trainer,
    record_writers: Mapping[str, Callback] | None = None,
    user_callbacks: Mapping[str, Callback] | None = None,
) -> MetricsRecord:
    """Train with the default callbacks and those of a user; return the last evaluation."""
    callbacks = standard_callbacks(trainer, record_writers, user_callbacks)
    return trainer.train(callbacks, ProgressDisplay(0, trainer.run.training.steps, quiet=True))
