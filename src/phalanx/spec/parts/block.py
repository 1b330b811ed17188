"""The residual branches of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeVar

from phalanx.spec.layers import layer_specs
from phalanx.spec.layout import Layout, TpAttention
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.adapter import add_adapters
from phalanx.spec.parts.attention import describe_attention
from phalanx.spec.parts.experts import describe_experts
from phalanx.spec.parts.mlp import describe_mlp
from phalanx.spec.parts.operations import Concatenate, LookUp, Norm, Operation, Parameter, Part, Value
from phalanx.spec.parts.per_layer_inputs import describe_per_layer_branch
from phalanx.spec.tuning import TuningSpec

ONE_RANK = Layout()
OperationType = TypeVar("OperationType", bound=Operation)


@dataclass(frozen=True)
class Branch:
    """x + after(part(before(x))), where x is the residual stream; one of the norms may be absent.

    Two branches may have one input: x + after_sum(after_1(part_1(before_1(x))) + after_2(part_2(before_2(x)))).
    They may also have one norm before. A merge replaces the stream: part(x, embedding of the next token)."""

    part: Part
    before: Norm | None
    after: Norm | None
    shares_input: bool = False
    """True if the input is that of the branch before, to whose output that of this one is added."""
    shares_norm: bool = False
    """True if the part reads the output of the norm of the branch before, and has none of its own."""
    after_sum: Norm | None = None
    """Norm of the sum of both outputs."""
    scale: float = 1.0
    """Factor of what is added to the residual stream."""
    scales_stream: bool = False
    """True if the residual stream is multiplied after it by a constant of the layer."""
    after_stream: Norm | None = None
    """Norm of the residual stream after it."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of the residual stream, or of what is added to it."""
        return tuple(norm for norm in (self.before, self.after, self.after_sum, self.after_stream) if norm)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by their names in the block."""
        norms = (self.before, self.after, self.after_sum, self.after_stream)
        before, *after = (norm.named_parameters if norm else {} for norm in norms)
        part = {f"{self.part.name}.{name}": parameter for name, parameter in self.part.parameters.items()}
        return before | part | {name: parameter for each in after for name, parameter in each.items()}


Block = tuple[Branch, ...]
"""Branches of a layer, in their order."""


def blocks(spec: ModelSpec, layout: Layout = ONE_RANK) -> tuple[Block, ...]:
    """Return the blocks of a model under a layout; layers of one kind are one object."""
    return _blocks(spec, layout.tp, layout.tp_attention, layout.ep)


@lru_cache  # a search asks for thousands of layouts with the same of these degrees
def _blocks(spec: ModelSpec, tp: int, tp_attention: TpAttention, ep: int) -> tuple[Block, ...]:
    layout = Layout(tp=tp, tp_attention=tp_attention, ep=ep)
    describe = cache(lambda layer: describe_block(layer, layout))
    described = list(map(describe, layer_specs(spec)))
    if spec.tuning == TuningSpec():
        return tuple(described)
    freeze = cache(_freeze)
    names = cache(lambda block: [name for branch in block for name in branch.parameters])
    return tuple(
        freeze(block, frozenset(name for name in names(block) if spec.tuning.freezes(f"blocks.{layer}.{name}")))
        for layer, block in enumerate(described)
    )


def _freeze(block: Block, names: frozenset[str]) -> Block:
    """Return a block of which some parameters, by their names in it, are not trained."""

    def freeze(operation: OperationType, prefix: str) -> OperationType:
        parameters = {
            leaf: replace(parameter, is_frozen=f"{prefix}{name}" in names)
            for (name, parameter), leaf in zip(operation.named_parameters.items(), operation.parameters, strict=True)
        }
        return replace(operation, parameters=parameters) if parameters else operation

    def freeze_norm(norm: Norm | None) -> Norm | None:
        return norm and freeze(norm, "")

    return tuple(
        replace(
            branch,
            part=replace(
                branch.part,
                operations=[freeze(operation, f"{branch.part.name}.") for operation in branch.part.operations],
            ),
            before=freeze_norm(branch.before),
            after=freeze_norm(branch.after),
            after_sum=freeze_norm(branch.after_sum),
            after_stream=freeze_norm(branch.after_stream),
        )
        for branch in block
    )


def describe_block(layer: ModelSpec, layout: Layout) -> Block:
    """Return the branches of a layer (`spec.layers`)."""
    branches = [Branch(describe_merge(layer), before=None, after=None)] if layer.mtp else []
    mixer = None
    if layer.branches != "mlp":
        x = residual_stream(layer)
        mixer = layer.mixer.describe(layer, x) if layer.mixer else describe_attention(layer, layout, x)
        branches.append(_describe_branch(layer, mixer))
        if layer.side_mixer:
            side = replace(layer.side_mixer.describe(layer, x), name="side_mixer")
            branches.append(Branch(side, before=None, after=None, shares_input=True, shares_norm=True))
    if layer.branches != "mixer":
        branches += _describe_ffn(layer, layout, mixer)
    if layer.per_layer_input_size:
        part = describe_per_layer_branch(layer, residual_stream(layer))
        after = _describe_norm_after(layer, f"{part.name}_after")
        branches.append(Branch(part, before=None, after=after, scale=layer.residual_scale))
    after_stream = describe_norm(layer, "stream_after") if layer.mtp else None
    branches[-1] = replace(branches[-1], scales_stream=layer.layer_scalars, after_stream=after_stream)
    return tuple(replace(branch, part=add_adapters(branch.part, layer.tuning.adapter)) for branch in branches)


def mixer_branch(block: Block) -> Branch | None:
    """Return the branch of a block that mixes tokens, if it has one; of two the attention."""
    return next((branch for branch in block if branch.part.kind == "attention"), None)


def describe_merge(layer: ModelSpec) -> Part:
    """Return the product of the norms of the next token's embedding and of the stream (arXiv 2412.19437, eq. 21)."""
    part = Part("merge", "merge", residual_stream(layer))
    embedding = part.add(LookUp(reads=(), writes=residual_stream(layer)))
    names = {"embedding_norm": embedding, "stream_norm": part.input}
    norms = [part.add(describe_norm(layer, name, x, replace(x))) for name, x in names.items()]
    normalized = part.add(Concatenate(reads=tuple(norms), writes=Value(2 * layer.hidden_size, tokens="residual")))
    part.linear("projection", normalized)
    return part


def _describe_ffn(layer: ModelSpec, layout: Layout, mixer: Part | None) -> Block:
    """Return the branch of an MLP or of experts, or those of both."""
    is_parallel = mixer is not None and layer.parallel_residual != "none"
    shares_norm = is_parallel and layer.parallel_residual == "one_norm"
    x = mixer.input if mixer is not None and shares_norm else residual_stream(layer)
    ffn = describe_experts(layer, layer.moe, layout, x) if layer.moe else describe_mlp(layer, x)
    last = _describe_branch(layer, ffn)
    if shares_norm:
        last = replace(last, before=None, shares_norm=True)
    if is_parallel:
        return (replace(last, shares_input=True),)
    if layer.moe is None or not layer.moe.dense_branch:
        return (last,)
    dense = _describe_branch(layer, describe_mlp(layer, residual_stream(layer), "dense"))
    after_sum = _describe_norm_after(layer, "sum_after") if layer.norm_position == "both" else None
    return dense, replace(last, shares_input=True, after_sum=after_sum)


def _describe_branch(layer: ModelSpec, part: Part) -> Branch:
    has_before = layer.norm_position in ("before", "both")
    has_after = layer.norm_position in ("after", "both")
    return Branch(
        part,
        before=describe_norm(layer, f"{part.name}_norm", output=part.input) if has_before else None,
        after=_describe_norm_after(layer, f"{part.name}_after") if has_after else None,
        scale=layer.residual_scale,
    )


def _describe_norm_after(layer: ModelSpec, name: str) -> Norm:
    x = Value(layer.hidden_size, tokens="residual")
    norm = describe_norm(layer, name, x, replace(x))
    return replace(norm, eps=layer.norm_after_eps) if layer.norm_after_eps else norm


def describe_last_norm(spec: ModelSpec) -> Norm:
    """Return the norm before the head."""
    return describe_norm(spec.model_copy(update={"norm_offset": spec.norm_offset is True}), "norm")


def describe_norm(spec: ModelSpec, name: str, x: Value | None = None, output: Value | None = None) -> Norm:
    """Return a norm of the residual stream in a layer, or of another value of its width."""
    parameters = {}
    if spec.norm_parameters != "none":
        parameters["weight"] = Parameter((spec.hidden_size,), "zeros" if spec.norm_offset else "ones")
    if spec.norm == "layernorm" and spec.norm_parameters == "all":
        parameters["bias"] = Parameter((spec.hidden_size,), "zeros")
    return Norm(
        name=name,
        reads=(x or residual_stream(spec),),
        writes=output or residual_stream(spec),
        parameters=parameters,
        width=spec.hidden_size,
        eps=spec.norm_eps,
        kind=spec.norm,
        has_offset=bool(spec.norm_offset),
    )


def residual_stream(spec: ModelSpec) -> Value:
    """Return a tensor of the residual stream."""
    return Value(spec.hidden_size, tokens="residual", numbers="residual")
