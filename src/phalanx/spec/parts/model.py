"""The trained tensors of a whole model."""

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
