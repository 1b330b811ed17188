"""Exact number of parameters of a model: total, by part, and active per token. Needs no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from phalanx.spec.model import ModelSpec
from phalanx.spec.parameter_shapes import is_muon_parameter
from phalanx.spec.parts.block import blocks, describe_last_norm
from phalanx.spec.parts.model import carried_tensors, layer_inputs, model_parameters
from phalanx.spec.parts.operations import GroupedLinear, Linear, LookUp, Norm, Operation, Part


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by part. Buffers (a router's balancing bias, rotary tables) are not parameters."""

    embedding: int
    """Token embedding, learned positions, and the table of the inputs of layers."""
    attention: int
    """Query, key, value and output projections, with their biases, and sinks."""
    mlp: int
    """Dense MLPs, with their biases."""
    experts: int
    """Routed experts."""
    shared_experts: int
    """Experts that process every token."""
    router: int
    merge: int
    """Products for multi-token prediction of the stream and the next token's embedding."""
    norms: int
    """Norms of the residual stream, and of queries and keys."""
    head: int
    """Output projection to the vocabulary; 0 if it is tied to the embedding."""
    per_layer_inputs: int
    """Product of the embedding for the inputs of layers."""
    inactive_experts: int
    """Part of `experts` that one token does not use."""
    biases: int
    """Biases of attention, MLPs and experts, and sinks; part of these counts."""
    inactive_biases: int
    """Part of `biases` that one token does not use."""
    carried: int
    """Tensors that are loaded and saved with the model, and not trained: indexers of sparse attention."""
    frozen: int
    """Parameters that the run does not train."""
    frozen_matrices: int
    """Part of `frozen` that Muon would train."""
    quantized: int
    """Part of `frozen` that is stored in 4 bits."""
    tied_head: int
    """Embedding parameters that a tied head reuses in its product."""

    @property
    def total(self) -> int:
        """Number of parameters, each counted once."""
        blocks = self.attention + self.mlp + self.experts + self.shared_experts + self.router + self.merge
        return self.embedding + self.per_layer_inputs + blocks + self.norms + self.head + self.carried

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.total - self.carried - self.frozen

    @property
    def active(self) -> int:
        """Parameters that one token uses: top_k of the routed experts, and everything else."""
        return self.total - self.inactive_experts

    @property
    def matmul(self) -> int:
        """Active parameters in a token's matrix products: projections, MLPs, experts, router and head.

        Embedding tables are lookups, and norms and biases are element-wise, so they do not count. A tied head counts
        here, although it has no parameters of its own.
        """
        active_biases = self.biases - self.inactive_biases
        return self.active - self.embedding - self.norms - active_biases - self.carried + self.tied_head

    @property
    def block_matrices(self) -> int:
        """Two-dimensional parameters inside blocks, active or not, which Muon trains."""
        outside = self.embedding + self.per_layer_inputs + self.head
        return self.total - self.carried - outside - self.norms - self.biases - self.frozen_matrices


@lru_cache
def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Return the number of parameters of a model by part, as its parts declare them."""
    table = spec.vocab_size * spec.hidden_size
    positions = spec.max_seq_len * spec.hidden_size if spec.position_embedding == "learned" else 0
    count = Counter(embedding=table + positions, head=0 if spec.tie_embeddings else table)
    count["norms"] = _num_parameters(describe_last_norm(spec))
    if inputs := layer_inputs(spec):
        for operation in inputs.operations:
            field = "embedding" if isinstance(operation, LookUp) else _count_field(operation, inputs)
            count[field] += _num_parameters(operation)
    for block in blocks(spec):
        for branch in block:
            count["norms"] += sum(map(_num_parameters, branch.norms))
            for operation in branch.part.operations:
                numbers = _num_parameters(operation)
                count[_count_field(operation, branch.part)] += numbers
                inactive_share = _inactive_share(operation)
                count["inactive_experts"] += round(numbers * inactive_share)
                if isinstance(operation, Linear):
                    biases = operation.bias.numbers if operation.bias else 0
                    count["biases"] += biases
                    count["inactive_biases"] += round(biases * inactive_share)
                elif not isinstance(operation, Norm):
                    vectors = (each for each in operation.parameters.values() if len(each.shape) == 1)
                    count["biases"] += sum(vector.numbers for vector in vectors)
    frozen = {name: parameter for name, parameter in model_parameters(spec).items() if parameter.is_frozen}
    fields = ("embedding", "attention", "mlp", "experts", "shared_experts", "router", "merge", "norms", "head")
    return ParameterCount(
        **{field: count[field] for field in (*fields, "per_layer_inputs")},
        inactive_experts=count["inactive_experts"],
        biases=count["biases"],
        inactive_biases=count["inactive_biases"],
        carried=sum(tensor.numbers for tensor in carried_tensors(spec).values()),
        frozen=sum(parameter.numbers for parameter in frozen.values()),
        frozen_matrices=sum(
            parameter.numbers for name, parameter in frozen.items() if is_muon_parameter(name, parameter.shape)
        ),
        quantized=sum(parameter.numbers for parameter in frozen.values() if parameter.is_quantized),
        tied_head=table if spec.tie_embeddings else 0,
    )


def _count_field(operation: Operation, part: Part) -> str:
    """Return the field of `ParameterCount` for the parameters of an operation."""
    if isinstance(operation, Norm):
        return "norms"
    if part.kind == "inputs":
        return part.name
    if part.kind != "experts" or isinstance(operation, GroupedLinear):
        return part.kind
    return "router" if operation.name.partition(".")[0] == "router" else "shared_experts"


def _num_parameters(operation: Operation) -> int:
    return sum(parameter.numbers for parameter in operation.parameters.values())


def _inactive_share(operation: Operation) -> Fraction:
    """Return the share of experts that a token does not use."""
    if not isinstance(operation, GroupedLinear):
        return Fraction(0)
    return 1 - Fraction(operation.reads[0].copies, operation.matrix.shape[0])
