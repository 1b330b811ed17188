"""The position-wise network of a block. Shapes: D width, F inner width."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.model.products import SWIGLU, Activation, ProductLinear, activated_linear, gelu
from phalanx.spec.model import ModelSpec


class MLP(nn.Module):
    """A network with an inner width: its first products, an activation, and `down`."""

    activation: Activation
    down: ProductLinear

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the shape of `x`."""
        return activated_linear(self.down, self.activation, *self.project_in(x))

    def project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project to the inner width: the inputs of the activation."""
        raise NotImplementedError


class SwiGLUMLP(MLP):
    """down(silu(gate x) * up x) (GLU variants, arXiv 2002.05202)."""

    activation = SWIGLU

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = ProductLinear(width, ffn, bias=False)
        self.up = ProductLinear(width, ffn, bias=False)
        self.down = ProductLinear(ffn, width, bias=False)

    def project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project to the inner width: gate and up."""
        return self.gate(x), self.up(x)


class GELUMLP(MLP):
    """down(gelu(up x)) (GPT-2)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = ProductLinear(spec.hidden_size, spec.ffn_hidden_size, spec.bias)
        self.down = ProductLinear(spec.ffn_hidden_size, spec.hidden_size, spec.bias)
        self.activation = gelu("tanh" if spec.activation == "gelu_tanh" else "none")

    def project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project to the inner width."""
        return (self.up(x),)


def build_mlp(spec: ModelSpec) -> MLP:
    """Build the dense MLP of `spec`."""
    return SwiGLUMLP(spec.hidden_size, spec.ffn_hidden_size) if spec.activation == "swiglu" else GELUMLP(spec)
