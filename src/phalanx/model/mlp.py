"""The position-wise network of a block."""

from __future__ import annotations

from torch import Tensor

from phalanx.model.part import PartModule
from phalanx.model.products import Activation, ProductLinear, TensorTuple, activated_linear, declared_activation
from phalanx.spec.parts.operations import Part


class MLP(PartModule):
    """A network with an inner width: its first products, an activation, and `down`.

    A SwiGLU is down(silu(gate x) * up x) (GLU variants, arXiv 2002.05202), GPT-2's MLP down(gelu(up x))."""

    down: ProductLinear

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.activation: Activation = declared_activation(part)
        self.first_layers = part.input_products()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the shape of `x`."""
        trained = (getattr(self, name) for name in self.part.activation.parameters)
        return activated_linear(self.down, self.activation, *self.read_input(self.project_in, x), *trained)

    def project_in(self, x: Tensor) -> TensorTuple:
        """Project to the inner width: the inputs of the activation."""
        return self.project(x, *self.first_layers)
