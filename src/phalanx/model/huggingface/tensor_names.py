"""Names of Phalanx's parameters in Hugging Face checkpoints, by the table of a family."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.model.transformer import Transformer
from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Family, RowOrder, Rows
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import carried_tensors, model_parameters

ROUTER_BIAS = ".router.bias"
"""End of the name of a router's bias, which not all families store."""


class TensorSource(NamedTuple):
    """The parameters that form a Hugging Face tensor, one after another along the output axis."""

    names: tuple[str, ...]
    expert: int | None
    """Row of stacked experts that are separate tensors in the checkpoint; else None."""
    rows: Rows
    """How the checkpoint stores them."""
    layer: ModelSpec
    """Description of the layer (`spec.layers`); outside of layers that of the model."""
    is_precise: bool
    """True if exports keep it in fp32."""

    @property
    def has_experts(self) -> bool:
        """True if the parameters are stacks of experts, which the checkpoint has apart, or in one tensor."""
        return self.expert is not None or self.rows.stacked

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or that of an expert, as the checkpoint has it."""
        tensor = self.stored_rows(tensor)
        for axis in self.rows.unit_axes:
            tensor = tensor.unsqueeze(axis)
        return tensor.T if self.rows.transposed else tensor

    def stored_rows(self, tensor: Tensor) -> Tensor:
        """Return rows of the parameters, one after another, in the order of the checkpoint."""
        return tensor[self._order(tensor)] if self.rows.order else tensor

    def with_axes(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """Return a tensor of the checkpoint, or that of an expert, with the axes that the model has.

        `shape` is that of the parameters."""
        if self.rows.unit_axes:
            return tensor.squeeze(self.rows.unit_axes)
        transposed = self.rows.transposed
        return tensor.T if transposed or (transposed is None and tensor.shape != shape) else tensor

    def loaded_rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """Return some rows of the model, of a tensor with the axes that the model has."""
        return tensor[self._order(tensor).argsort()[rows]] if self.rows.order else tensor[rows]

    def _order(self, tensor: Tensor) -> Tensor:
        """Return the index in the model of each row of the checkpoint's tensor."""
        assert self.rows.order
        return row_order(self.rows.order, self.layer, len(tensor))


@lru_cache  # all experts of a layer, and most layers, have one order
def row_order(order: RowOrder, layer: ModelSpec, rows: int) -> Tensor:
    """Return an order of rows as a tensor."""
    return torch.tensor(list(order(layer, rows)))


def hf_sources(family: Family, spec: ModelSpec) -> dict[str, TensorSource]:
    """Return the sources of every tensor of a family's checkpoint, by its Hugging Face name, in the model's order.

    Biases of routers may be missing.

    Raises:
        UserError: the family has no such parameter.
    """
    tensors: dict[str, tuple[str, tuple[str, ...], Rows]] = {}
    if spec.moe and family.expert_tensors:
        family = replace(family, tensors={**family.tensors, **family.expert_tensors})
    for hf_name, rows in family.stored_rows:
        names = tuple(f"blocks.{{i}}.{name}" if "{i}" in hf_name else name for name in rows.names)
        tensors |= dict.fromkeys(names, (hf_name, names, rows))
    for hf_name, rows in family.of_mtp_layers(spec.mtp.layers).stored_rows if spec.mtp else ():
        names = tuple(f"blocks.{{mtp}}.{name}" for name in rows.names)
        tensors |= dict.fromkeys(names, (hf_name, names, rows))
    layers = layer_specs(spec)
    parameters = model_parameters(spec) | carried_tensors(spec)
    precise = {name for name, parameter in parameters.items() if parameter.is_precise}
    sources: dict[str, TensorSource] = {}
    for name, shape in parameter_shapes(spec).items():
        layer = match[1] if (match := re.match(r"blocks\.(\d+)\.", name)) else ""
        kind = "mtp" if layer and int(layer) >= spec.num_layers else "i"
        pattern = re.sub(r"^blocks\.\d+\.", f"blocks.{{{kind}}}.", name)
        if pattern not in tensors and pattern.endswith(ROUTER_BIAS):
            continue
        if pattern not in tensors:
            problem = f"has no counterpart in a checkpoint of type {family.model_type}"
            raise UserError("model.from_hf", name, problem, fix="use the model shape of its config.json")
        hf_name, names, rows = tensors[pattern]
        names = tuple(part.replace(f"{{{kind}}}", layer) for part in names)
        # In bf16 the biases of a router, which differ little, would be equal.
        is_precise = name in precise or name.endswith(ROUTER_BIAS)
        for expert in range(shape[0]) if "{e}" in hf_name else [None]:
            tensor = hf_name.replace("{i}", layer).replace("{e}", str(expert))
            sources[tensor] = TensorSource(names, expert, rows, layers[int(layer)] if layer else spec, is_precise)
    return sources


@lru_cache
def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shape of each tensor of a model by Phalanx's name, in the model's own order."""
    with torch.device("meta"):
        tensors = Transformer(spec).state_dict()
    return {name: x.shape for name, x in tensors.items()}
