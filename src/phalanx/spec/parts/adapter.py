"""Low-rank adapters of the products of a part (LoRA, arXiv 2106.09685, section 4.1): y = W x + s B A x, with W frozen.

With DoRA (arXiv 2402.09353, equation 5), a row i of the output is m_i y_i / |W_i + s B_i A|, where m is trained, and
the norm of the row has no gradient (section 4.3).

A and B are products like others. If ranks share W by columns, they share B like it, and A x is computed for the tokens
of a rank, so that only its few numbers are gathered. If they share W by rows, they share A like it, and sum A x. They
share m like a bias: by columns of the output, or each has all of it and sums squares of its part of the rows.

With QLoRA (arXiv 2305.14314), the matrices of all products have 4 bits for a number, except those that float8 leaves
out too, such as routers'."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.parts.operations import GroupedLinear, Linear, Magnitude, Operation, Parameter, Part, Value
from phalanx.spec.tuning import ADAPTER_SUFFIXES, MAGNITUDE_SUFFIX, AdapterSpec


def add_adapters(part: Part, adapter: AdapterSpec | None) -> Part:
    """Return a part with adapters after the products that are targets."""
    if adapter is None:
        return part
    operations: list[Operation] = []
    for operation in part.operations:
        if isinstance(operation, Linear) and adapter.base_dtype == "nf4" and not operation.is_precise:
            operation = _quantized(operation)
        operations.append(operation)
        if isinstance(operation, Linear) and is_target(adapter, part, operation):
            a, b = describe_adapter(operation, adapter)
            operations += [a, b]
            if adapter.dora:
                operations.append(describe_magnitude(operation, b))
    return replace(part, operations=operations)


def is_target(adapter: AdapterSpec, part: Part, linear: Linear) -> bool:
    """Return whether a product of a part has an adapter.

    Those of routed experts have one if named, as have routers and gates of few columns."""
    if linear.adapts:
        return False
    if adapter.targets == "linear":
        return not linear.is_precise and not isinstance(linear, GroupedLinear)
    return adapter.is_target(f"{part.name}.{linear.product_name}")


def _quantized(linear: Linear) -> Linear:
    """Return a product whose matrix is stored in 4 bits."""
    leaf, *_ = linear.parameters
    return replace(linear, parameters=linear.parameters | {leaf: replace(linear.matrix, is_quantized=True)})


def describe_adapter(linear: Linear, adapter: AdapterSpec) -> tuple[Linear, Linear]:
    """Return A and B of a product, of which only B is zero at first."""
    (x,) = linear.reads
    if isinstance(linear, GroupedLinear):
        return _describe_adapters_of_experts(linear, adapter)
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
        dropout=adapter.dropout,
    )
    weight = Parameter((linear.writes.width, adapter.rank), "zeros")
    return a, replace(
        a,
        name=names[1],
        reads=(inner,),
        writes=replace(linear.writes),
        scale=1.0,
        dropout=0.0,
        parameters={"weight": weight},
    )


def _describe_adapters_of_experts(linear: GroupedLinear, adapter: AdapterSpec) -> tuple[Linear, Linear]:
    """Return A and B of each expert. Ranks that share W by rows sum B A x with W x."""
    (x,) = linear.reads
    experts, rows, columns = linear.matrix.shape
    leaf = next(iter(linear.parameters))
    names = [f"{leaf}{suffix}" for suffix in ADAPTER_SUFFIXES]
    inner = replace(x, width=adapter.rank, cut=None)
    a = GroupedLinear(
        name=linear.name,
        reads=(x,),
        writes=inner,
        parameters={names[0]: Parameter((experts, adapter.rank, columns), "fan_in")},
        is_precise=True,
        scale=adapter.scale,
        adapts=linear.product_name,
    )
    parameters = {names[1]: Parameter((experts, rows, adapter.rank), "zeros")}
    return a, replace(a, reads=(inner,), writes=replace(linear.writes), scale=1.0, parameters=parameters)


def describe_magnitude(linear: Linear, b: Linear) -> Magnitude:
    """Return the magnitudes of the rows of a product, of whose adapter `b` is the last product."""
    return Magnitude(
        name=f"{linear.name}{MAGNITUDE_SUFFIX}",
        reads=(linear.writes, b.writes),
        writes=replace(linear.writes, view_of=None),
        parameters={"weight": Parameter((linear.writes.width,), "row_norms")},
        adapts=linear.name,
        crosses_ranks=linear.role == "row",
    )
