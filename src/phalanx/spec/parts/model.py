"""The parameters of a whole model, and the carried tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks, describe_last_norm, residual_stream
from phalanx.spec.parts.operations import Linear, Parameter, Part
from phalanx.spec.parts.per_layer_inputs import describe_per_layer_inputs


@lru_cache
def layer_inputs(spec: ModelSpec) -> Part | None:
    """Return the part that computes inputs of all layers besides the residual stream, if the model has it."""
    return describe_per_layer_inputs(spec, residual_stream(spec)) if spec.per_layer_input_size else None


@lru_cache
def model_parameters(spec: ModelSpec) -> dict[str, Parameter]:
    """Return the parameters of a model by name, in the order of the transformer's `named_parameters`."""
    table = Parameter((spec.vocab_size, spec.hidden_size))
    parameters = {"embedding.weight": table}
    if spec.position_embedding == "learned":
        parameters["positions.weight"] = Parameter((spec.max_seq_len, spec.hidden_size))
    if inputs := layer_inputs(spec):
        parameters |= {f"{inputs.name}.{name}": parameter for name, parameter in inputs.parameters.items()}
    for layer, block in enumerate(blocks(spec)):
        for branch in block:
            parameters |= {f"blocks.{layer}.{name}": parameter for name, parameter in branch.parameters.items()}
    parameters |= describe_last_norm(spec).named_parameters
    if not spec.tie_embeddings:
        parameters["head.weight"] = table
    return {name: replace(each, is_frozen=spec.tuning.freezes(name)) for name, each in parameters.items()}


def adaptable_products(spec: ModelSpec) -> dict[str, Linear]:
    """Return the products of blocks that may have an adapter, by their names in a block."""
    return {
        f"{branch.part.name}.{linear.product_name}": linear
        for block in dict.fromkeys(blocks(spec))
        for branch in block
        for linear in branch.part.linears
        if not linear.adapts
    }


def is_head_trained(spec: ModelSpec) -> bool:
    """Return whether the head's matrix, which may be that of the embedding, has a gradient."""
    return not model_parameters(spec)["embedding.weight" if spec.tie_embeddings else "head.weight"].is_frozen


@lru_cache
def num_forward_only_blocks(spec: ModelSpec, has_pipeline: bool = False) -> int:
    """Return the number of blocks, the first ones, that need no backward pass, because nothing before is trained.

    In a pipeline, stages pass gradients on to the first one."""
    trained = [name for name, parameter in model_parameters(spec).items() if not parameter.is_frozen]
    if has_pipeline or any(not name.startswith(("blocks.", "norm.", "head.")) for name in trained):
        return 0
    return min((int(name.split(".")[1]) for name in trained if name.startswith("blocks.")), default=spec.num_layers)


@lru_cache
def carried_tensors(spec: ModelSpec) -> dict[str, Parameter]:
    """Return the tensors by name that are loaded and saved with a model, but have no effect on training.

    Why: `docs/design/decisions/carried-tensors.md`."""
    return {
        f"blocks.{layer}.{branch.part.name}.{name}": tensor
        for layer, block in enumerate(blocks(spec))
        for branch in block
        for name, tensor in branch.part.carried.items()
    }
