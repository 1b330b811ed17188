"""Names of Phalanx's parameters in Hugging Face checkpoints: one table per family.

{i} is the layer; {e} means that each expert is a separate tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from phalanx.model.transformer import Transformer
from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec


class TensorLocation(NamedTuple):
    """The tensor of a checkpoint that contains one of Phalanx's parameters, alone or with others."""

    name: str
    part: int = 0
    """Index of the parameter among `parts` equal parts along the output axis."""
    parts: int = 1
    transposed: bool = False
    """Stored as [in, out]: GPT-2's Conv1D."""


Names = dict[str, TensorLocation]


def _block_names(prefix: str, names: Names) -> Names:
    """Return a block's names as full names, for any layer."""
    return {
        f"blocks.{{i}}.{ours}": location._replace(name=f"{prefix}.{{i}}.{location.name}")
        for ours, location in names.items()
    }


LLAMA = {
    "embedding.weight": TensorLocation("model.embed_tokens.weight"),
    "norm.weight": TensorLocation("model.norm.weight"),
    "head.weight": TensorLocation("lm_head.weight"),
} | _block_names(
    "model.layers",
    {
        "attention_norm.weight": TensorLocation("input_layernorm.weight"),
        "attention.wq.weight": TensorLocation("self_attn.q_proj.weight"),
        "attention.wk.weight": TensorLocation("self_attn.k_proj.weight"),
        "attention.wv.weight": TensorLocation("self_attn.v_proj.weight"),
        "attention.wo.weight": TensorLocation("self_attn.o_proj.weight"),
        "attention.q_norm.weight": TensorLocation("self_attn.q_norm.weight"),
        "attention.k_norm.weight": TensorLocation("self_attn.k_norm.weight"),
        "mlp_norm.weight": TensorLocation("post_attention_layernorm.weight"),
        "mlp.gate.weight": TensorLocation("mlp.gate_proj.weight"),
        "mlp.up.weight": TensorLocation("mlp.up_proj.weight"),
        "mlp.down.weight": TensorLocation("mlp.down_proj.weight"),
        "mlp.router.gate.weight": TensorLocation("mlp.gate.weight"),
        "mlp.experts.gate": TensorLocation("mlp.experts.{e}.gate_proj.weight"),
        "mlp.experts.up": TensorLocation("mlp.experts.{e}.up_proj.weight"),
        "mlp.experts.down": TensorLocation("mlp.experts.{e}.down_proj.weight"),
    },
)

MIXTRAL = LLAMA | _block_names(
    "model.layers",
    {
        "mlp.router.gate.weight": TensorLocation("block_sparse_moe.gate.weight"),
        "mlp.experts.gate": TensorLocation("block_sparse_moe.experts.{e}.w1.weight"),
        "mlp.experts.up": TensorLocation("block_sparse_moe.experts.{e}.w3.weight"),
        "mlp.experts.down": TensorLocation("block_sparse_moe.experts.{e}.w2.weight"),
    },
)

GPT2 = {
    "embedding.weight": TensorLocation("transformer.wte.weight"),
    "positions.weight": TensorLocation("transformer.wpe.weight"),
    "norm.weight": TensorLocation("transformer.ln_f.weight"),
    "norm.bias": TensorLocation("transformer.ln_f.bias"),
    "head.weight": TensorLocation("lm_head.weight"),
} | _block_names(
    "transformer.h",
    {
        "attention_norm.weight": TensorLocation("ln_1.weight"),
        "attention_norm.bias": TensorLocation("ln_1.bias"),
        "attention.wq.weight": TensorLocation("attn.c_attn.weight", part=0, parts=3, transposed=True),
        "attention.wk.weight": TensorLocation("attn.c_attn.weight", part=1, parts=3, transposed=True),
        "attention.wv.weight": TensorLocation("attn.c_attn.weight", part=2, parts=3, transposed=True),
        "attention.wq.bias": TensorLocation("attn.c_attn.bias", part=0, parts=3),
        "attention.wk.bias": TensorLocation("attn.c_attn.bias", part=1, parts=3),
        "attention.wv.bias": TensorLocation("attn.c_attn.bias", part=2, parts=3),
        "attention.wo.weight": TensorLocation("attn.c_proj.weight", transposed=True),
        "attention.wo.bias": TensorLocation("attn.c_proj.bias"),
        "mlp_norm.weight": TensorLocation("ln_2.weight"),
        "mlp_norm.bias": TensorLocation("ln_2.bias"),
        "mlp.up.weight": TensorLocation("mlp.c_fc.weight", transposed=True),
        "mlp.up.bias": TensorLocation("mlp.c_fc.bias"),
        "mlp.down.weight": TensorLocation("mlp.c_proj.weight", transposed=True),
        "mlp.down.bias": TensorLocation("mlp.c_proj.bias"),
    },
)

FAMILIES: dict[str, Names] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA,
    "olmoe": LLAMA,
    "mixtral": MIXTRAL,
}
"""Tables by config.json's model_type."""


def hf_location(kind: str, name: str) -> TensorLocation:
    """Return the location of parameter `name` in a checkpoint of model type `kind`, with {e} unresolved.

    Raises:
        UserError: the model type has no such parameter.
    """
    layer = re.match(r"blocks\.(\d+)\.", name)
    location = FAMILIES[kind].get(re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name))
    if location is None:
        problem = f"has no counterpart in a checkpoint of type {kind}"
        raise UserError("model.from_hf", name, problem, fix="use the model shape of its config.json")
    return location._replace(name=location.name.replace("{i}", layer[1])) if layer else location


class TensorSource(NamedTuple):
    """The parameters that form a Hugging Face tensor, concatenated along the output axis."""

    names: tuple[str, ...]
    expert: int | None
    """Row of stacked experts that are separate tensors in the checkpoint; else None."""
    transposed: bool


def hf_sources(kind: str, shapes: Mapping[str, torch.Size]) -> dict[str, TensorSource]:
    """Return the sources of every tensor of a checkpoint of type `kind`, by its Hugging Face name.

    `shapes` are those of Phalanx's parameters, in the model's own order, which is also that of fused parts."""
    sources: dict[str, TensorSource] = {}
    for name, shape in shapes.items():
        location = hf_location(kind, name)
        experts: list[int | None] = list(range(shape[0])) if "{e}" in location.name else [None]
        for expert in experts:
            hf_name = location.name.replace("{e}", str(expert))
            source = sources.get(hf_name, TensorSource((), expert, location.transposed))
            sources[hf_name] = source._replace(names=(*source.names, name))
    return sources


def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shape of each parameter of a model by Phalanx's name, in the model's own order."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Transformer(spec).named_parameters()}
