"""The trained tensors of a whole model, and the carried ones."""

from __future__ import annotations

from functools import lru_cache

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks, describe_norm
from phalanx.spec.parts.operations import Parameter


@lru_cache
def model_parameters(spec: ModelSpec) -> dict[str, Parameter]:
    """Return the parameters of a model by name, in the order of the transformer's `named_parameters`."""
    table = Parameter((spec.vocab_size, spec.hidden_size))
    parameters = {"embedding.weight": table}
    if spec.position_embedding == "learned":
        parameters["positions.weight"] = Parameter((spec.max_seq_len, spec.hidden_size))
    for layer, block in enumerate(blocks(spec)):
        for branch in block:
            parameters |= {f"blocks.{layer}.{name}": parameter for name, parameter in branch.parameters.items()}
    parameters |= describe_norm(spec, "norm").named_parameters
    return parameters if spec.tie_embeddings else parameters | {"head.weight": table}


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
