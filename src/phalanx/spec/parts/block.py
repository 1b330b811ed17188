"""The residual branches of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial

from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.attention import describe_attention
from phalanx.spec.parts.experts import describe_experts
from phalanx.spec.parts.mlp import describe_mlp
from phalanx.spec.parts.operations import Norm, Parameter, Part, Value

ONE_RANK = Layout()


@dataclass(frozen=True)
class Branch:
    """x + part(norm(x)), where x is the residual stream."""

    norm: Norm
    part: Part

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by their names in the block."""
        part = {f"{self.part.name}.{name}": parameter for name, parameter in self.part.parameters.items()}
        return self.norm.named_parameters | part


Block = tuple[Branch, ...]
"""Branches of a layer, in their order."""


@lru_cache
def blocks(spec: ModelSpec, layout: Layout = ONE_RANK) -> tuple[Block, ...]:
    """Return the blocks of a model under a layout; layers of one kind are one object."""
    describe = cache(partial(_describe_block, spec, layout))
    return tuple(describe(spec.is_moe_layer(layer), spec.attention_window(layer)) for layer in range(spec.num_layers))


def _describe_block(spec: ModelSpec, layout: Layout, has_experts: bool, window: int | None) -> Block:
    attention = describe_attention(spec, layout, window, residual_stream(spec))
    x = residual_stream(spec)
    ffn = describe_experts(spec, spec.moe, layout, x) if has_experts and spec.moe else describe_mlp(spec, x)
    return tuple(Branch(describe_norm(spec, f"{part.name}_norm", part.input), part) for part in (attention, ffn))


def describe_norm(spec: ModelSpec, name: str, output: Value | None = None) -> Norm:
    """Return a norm of the residual stream."""
    parameters = {"weight": Parameter((spec.hidden_size,), "ones")}
    if spec.norm == "layernorm":
        parameters["bias"] = Parameter((spec.hidden_size,), "zeros")
    stream = residual_stream(spec)
    return Norm(
        name=name,
        reads=(stream,),
        writes=output or residual_stream(spec),
        parameters=parameters,
        width=spec.hidden_size,
        eps=spec.norm_eps,
        kind=spec.norm,
    )


def residual_stream(spec: ModelSpec) -> Value:
    """Return a tensor of the residual stream."""
    return Value(spec.hidden_size, tokens="residual", numbers="residual")
