"""Low-rank adapters of the products of a part (LoRA, arXiv 2106.09685, section 4.1): y = W x + s B A x, with W frozen.

A and B are products like others. If ranks share W by columns, they share B like it, and A x is computed for the tokens
of a rank, so that only its few numbers are gathered. If they share W by rows, they share A like it, and sum A x."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.parts.operations import GroupedLinear, Linear, Operation, Parameter, Part, Value
from phalanx.spec.tuning import ADAPTER_SUFFIXES, AdapterSpec


def add_adapters(part: Part, adapter: AdapterSpec | None) -> Part:
    """Return a part with adapters after the products that are targets."""
    if adapter is None:
        return part
    operations: list[Operation] = []
    for operation in part.operations:
        operations.append(operation)
        if isinstance(operation, Linear) and is_target(adapter, part, operation):
            operations += describe_adapter(operation, adapter)
    return replace(part, operations=operations)


def is_target(adapter: AdapterSpec, part: Part, linear: Linear) -> bool:
    """Return whether a product of a part has an adapter; routers and gates of few columns have one if named."""
    if not is_adaptable(linear):
        return False
    return not linear.is_precise if adapter.targets == "linear" else adapter.is_target(f"{part.name}.{linear.name}")


def is_adaptable(linear: Linear) -> bool:
    """Return whether a product may have an adapter: not those of routed experts, nor those of an adapter itself."""
    return not isinstance(linear, GroupedLinear) and not linear.adapts


def describe_adapter(linear: Linear, adapter: AdapterSpec) -> tuple[Linear, Linear]:
    """Return A and B of a product, of which only B is zero at first."""
    (x,) = linear.reads
    inner = Value(adapter.rank, tokens="residual" if x.cut else x.tokens)
    names = [f"{linear.name}{suffix}" for suffix in ADAPTER_SUFFIXES]
    a = Linear(
        name=names[0],
        reads=(x,),
        writes=inner,
        parameters={"weight": Parameter((adapter.rank, x.width), "fan_in")},
        # The rank may not be a multiple of what float8 requires.
        is_precise=True,
        scale=adapter.scale,
        adapts=linear.name,
    )
    weight = Parameter((linear.writes.width, adapter.rank), "zeros")
    return a, replace(
        a, name=names[1], reads=(inner,), writes=replace(linear.writes), scale=1.0, parameters={"weight": weight}
    )
