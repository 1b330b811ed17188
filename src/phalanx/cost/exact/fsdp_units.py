"""Units in which ZeRO-3 gathers parameters and reduces gradients: the root, and every wrapped part of blocks."""

from __future__ import annotations

from phalanx.cost.exact.parameter_shapes import Shapes, max_shard_elements
from phalanx.spec.layout import Layout


def fsdp_unit_sizes(shapes: Shapes, layout: Layout, ranks: int) -> list[int]:
    """Return the elements that a rank owns, with padding, of each unit: the root, then every wrapped part.

    Args:
        shapes: Parameters of the rank.
        layout: Layout of the run.
        ranks: Ranks that share the parameters.
    """
    owned = {"": 0}
    for name, shape in shapes.items():
        unit = fsdp_unit_of(name, layout)
        owned[unit] = owned.get(unit, 0) + max_shard_elements(shape, ranks)
    return list(owned.values())


def fsdp_unit_of(name: str, layout: Layout) -> str:
    """Return the name of the FSDP unit that a parameter belongs to; "" for the root."""
    # "blocks.0.attention.wq.weight": a block is the first two names, a sublayer three. Recomputed blocks stay one unit.
    depth = {"model": 0, "block": 2, "sublayer": 2 if layout.recomputes_full_blocks else 3}[layout.fsdp_unit]
    return ".".join(name.split(".")[:depth]) if name.startswith("blocks.") else ""
