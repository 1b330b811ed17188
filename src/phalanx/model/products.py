"""Products of activations and weights, whose backward pass recomputes the activation.

The input of an MLP's last product is an elementwise function of the outputs of its first ones, which are as large. It
is cheap to compute, so only the outputs of the first products are saved: two numbers per inner unit of a SwiGLU instead
of the four that PyTorch's operations save.

Why: `docs/design/decisions/recomputed-activations.md`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.model.chunks import cached_rows, rows_at_once
from phalanx.model.dropout import Drop, Dropout
from phalanx.model.dtypes import at_least_fp32
from phalanx.model.nf4 import dense
from phalanx.model.sequence_context import compute_dtype
from phalanx.model.uncounted_products import uncounted_products
from phalanx.spec.parts.operations import Part

# The result is written into the tensor of the given gradient, which a backward pass no longer needs.
GELU_BACKWARD = torch.ops.aten.gelu_backward.grad_input
THRESHOLD_BACKWARD = torch.ops.aten.threshold_backward.grad_input
TensorTuple = tuple[Tensor, ...]
LinearFunction = Callable[..., Tensor]
"""Function of rows, a weight [O, I] and perhaps a bias: rows times the transposed weight, plus the bias."""
DeferOrCompute = Callable[[GradientEdge | None, Callable[[], Tensor]], Tensor | None]
"""Takes a weight's edge in the graph and a function that computes its gradient; returns the gradient, or None if
deferred."""


Vjp = Callable[[Tensor], TensorTuple]
"""Vector-Jacobian product: function from an output's gradient, which it may overwrite, to those of the inputs."""


@dataclass(frozen=True)
class Activation:
    """A function of each token's numbers, and its gradients."""

    forward: Callable[..., Tensor]
    forward_and_vjp: Callable[..., tuple[Tensor, Vjp]]
    """Function of the inputs that returns the output and its vector-Jacobian product, which share intermediates."""
    vjp: Callable[..., TensorTuple]
    """Function of the output's gradient and the inputs, which is one kernel if compiled. It returns the gradients of
    the inputs, one of them in the memory of the output's."""


@cache
def compiled_activation(activation: Activation) -> Activation:
    """Return the activation with one kernel for its output and one for its gradients, for any number of tokens."""
    forward = torch.compile(activation.forward, dynamic=True)
    vjp = torch.compile(activation.vjp, dynamic=True)

    def forward_and_vjp(*inputs: Tensor) -> tuple[Tensor, Vjp]:
        return forward(*inputs), lambda gradient: vjp(gradient, *inputs)

    return Activation(forward, forward_and_vjp, vjp)


def gated(activate: Callable[..., Tensor], backward: Any, **options: object) -> Activation:
    """Return activate(gate) x up (GLU variants, arXiv 2002.05202). `backward` is the operator of its gradient."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return activate(gate, **options) * up

    def forward_and_vjp(gate: Tensor, up: Tensor) -> tuple[Tensor, Vjp]:
        activated = activate(gate, **options)

        def vjp_in_place(gradient: Tensor) -> TensorTuple:
            grad_up = activated.mul_(gradient)
            return backward.grad_input(gradient.mul_(up), gate, **options, grad_input=gradient), grad_up

        return activated * up, vjp_in_place

    def vjp(gradient: Tensor, gate: Tensor, up: Tensor) -> TensorTuple:
        grad_up = gradient * activate(gate, **options)
        return gradient.copy_(backward(gradient * up, gate, **options)), grad_up

    return Activation(forward, forward_and_vjp, vjp)


def gated_by_sigmoid() -> Activation:
    """Return sigmoid(gate) x up (GLU, arXiv 1612.08083)."""
    backward = torch.ops.aten.sigmoid_backward

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return gate.sigmoid() * up

    def forward_and_vjp(gate: Tensor, up: Tensor) -> tuple[Tensor, Vjp]:
        activated = gate.sigmoid()

        def vjp_in_place(gradient: Tensor) -> TensorTuple:
            grad_up = gradient * activated
            return backward.grad_input(gradient.mul_(up), activated, grad_input=gradient), grad_up

        return activated * up, vjp_in_place

    def vjp(gradient: Tensor, gate: Tensor, up: Tensor) -> TensorTuple:
        activated = gate.sigmoid()
        grad_up = gradient * activated
        return gradient.copy_(backward(gradient * up, activated)), grad_up

    return Activation(forward, forward_and_vjp, vjp)


def gated_heads(activate: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]) -> Activation:
    """Return heads times activate(gate), where the gate has one number for each head."""

    def forward(gate: Tensor, heads: Tensor) -> Tensor:
        factor = activate(at_least_fp32(gate)).to(heads.dtype)
        return (heads.unflatten(-1, (gate.shape[-1], -1)) * factor.unsqueeze(-1)).flatten(-2)

    def vjp(gradient: Tensor, gate: Tensor, heads: Tensor) -> TensorTuple:
        products = (gradient * heads).unflatten(-1, (gate.shape[-1], -1))
        exact_gate = at_least_fp32(gate)
        grad_gate = products.sum(-1, dtype=exact_gate.dtype) * derivative(exact_gate)
        return grad_gate.to(gate.dtype), gradient.copy_(forward(gate, gradient))

    return Activation(forward, lambda *inputs: (forward(*inputs), lambda gradient: vjp(gradient, *inputs)), vjp)


def gelu(approximate: str) -> Activation:
    """Return GELU, exact ("none") or approximated by a hyperbolic tangent ("tanh")."""

    def forward(x: Tensor) -> Tensor:
        return F.gelu(x, approximate=approximate)

    def forward_and_vjp(x: Tensor) -> tuple[Tensor, Vjp]:
        return forward(x), lambda gradient: (GELU_BACKWARD(gradient, x, approximate=approximate, grad_input=gradient),)

    def vjp(gradient: Tensor, x: Tensor) -> TensorTuple:
        return (gradient.copy_(torch.ops.aten.gelu_backward(gradient, x, approximate=approximate)),)

    return Activation(forward, forward_and_vjp, vjp)


def limited_swiglu(limit: float) -> Activation:
    """Return silu(g) u, where silu(g) is at most `limit`, and u within it (Step 3.5)."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def vjp(gradient: Tensor, gate: Tensor, up: Tensor) -> TensorTuple:
        silu = F.silu(gate)
        grad_silu = up.clamp(-limit, limit).mul_(gradient).masked_fill_(silu > limit, 0)
        grad_up = silu.clamp_(max=limit).mul_(gradient).masked_fill_((up < -limit).logical_or_(up > limit), 0)
        return torch.ops.aten.silu_backward(grad_silu, gate), grad_up

    return of_several_kernels(forward, vjp)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Return g sigmoid(alpha g) (u + 1), where g is at most `limit`, and u within it (gpt-oss).

    Source: https://github.com/openai/gpt-oss, `swiglu` in gpt_oss/torch/model.py."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)

    def vjp(gradient: Tensor, gate: Tensor, up: Tensor) -> TensorTuple:
        g = gate.clamp(max=limit)
        sigmoid = torch.sigmoid(alpha * g)
        grad_g = gradient * (up.clamp(-limit, limit) + 1) * sigmoid * (1 + alpha * g * (1 - sigmoid))
        return grad_g.where(gate <= limit, 0), (gradient * g * sigmoid).where(up.abs() <= limit, 0)

    return of_several_kernels(forward, vjp)


def xielu() -> Activation:
    """Return a x^2 + x / 2 for positive x, and else b (e^x - 1 - x) + x / 2 (arXiv 2411.13010).

    a is the softplus of a trained number, and b - 1 / 2 that of another."""
    # Of larger negative numbers, e^x - 1 - x is inaccurate.
    largest_exponent = -1e-6

    def coefficients(alpha_p: Tensor, alpha_n: Tensor) -> TensorTuple:
        return F.softplus(at_least_fp32(alpha_p)), F.softplus(at_least_fp32(alpha_n)) + 0.5

    def forward(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        a, b = coefficients(alpha_p, alpha_n)
        out = x.new_empty(x.shape)
        for out_part, x_part in rows_at_once(out, x):
            exact = at_least_fp32(x_part)
            below = exact.clamp(max=largest_exponent).expm1_().sub_(exact).mul_(b)
            out_part.copy_(torch.where(exact > 0, exact.square().mul_(a), below).add_(exact, alpha=0.5))
        return out

    def vjp(gradient: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> TensorTuple:
        a, b = coefficients(alpha_p, alpha_n)
        grad_a = torch.zeros_like(a)
        grad_b = torch.zeros_like(b)
        for gradient_part, x_part in rows_at_once(gradient, x):
            exact = at_least_fp32(x_part)
            exact_gradient = at_least_fp32(gradient_part)
            above = exact.clamp(min=0)
            below = exact.clamp(max=largest_exponent).expm1_()
            grad_a += above.square().mul_(exact_gradient).sum()
            grad_b += (below - exact).masked_fill_(exact > 0, 0).mul_(exact_gradient).sum()
            slope = torch.where(exact > 0, above.mul_(2 * a), below.mul_(b)).add_(0.5)
            gradient_part.copy_(slope.mul_(exact_gradient))
        grad_alpha_p = (grad_a * at_least_fp32(alpha_p).sigmoid()).to(alpha_p.dtype)
        return gradient, grad_alpha_p, (grad_b * at_least_fp32(alpha_n).sigmoid()).to(alpha_n.dtype)

    return Activation(forward, lambda *inputs: (forward(*inputs), lambda gradient: vjp(gradient, *inputs)), vjp)


def of_several_kernels(forward: Callable[..., Tensor], vjp: Callable[..., TensorTuple]) -> Activation:
    """Return the activation of two functions, which compute in at least fp32.

    They are one kernel if compiled. Otherwise they are several, which compute a chunk of rows at a time."""

    def whole_forward(*inputs: Tensor) -> Tensor:
        out = inputs[0].new_empty(inputs[0].shape)
        for out_part, *parts in rows_at_once(out, *inputs):
            out_part.copy_(forward(*map(at_least_fp32, parts)))
        return out

    def whole_vjp(gradient: Tensor, *inputs: Tensor) -> TensorTuple:
        gradients = (gradient, *(x.new_empty(x.shape) for x in inputs[1:]))
        for parts in rows_at_once(*gradients, *inputs):
            results = vjp(*map(at_least_fp32, (parts[0], *parts[len(gradients) :])))
            for part, result in zip(parts, results, strict=False):
                part.copy_(result)
        return gradients

    def forward_and_vjp(*inputs: Tensor) -> tuple[Tensor, Vjp]:
        return whole_forward(*inputs), lambda gradient: whole_vjp(gradient, *inputs)

    return Activation(whole_forward, forward_and_vjp, whole_vjp)


def _relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (Primer, arXiv 2109.08668)."""
    return x.relu().square_()


def _relu_squared_vjp(gradient: Tensor, x: Tensor) -> TensorTuple:
    return (THRESHOLD_BACKWARD(gradient.mul_(x).mul_(2), x, 0, grad_input=gradient),)


RELU_SQUARED = Activation(
    _relu_squared, lambda x: (_relu_squared(x), lambda gradient: _relu_squared_vjp(gradient, x)), _relu_squared_vjp
)
IDENTITY = Activation(lambda x: x, lambda x: (x, lambda gradient: (gradient,)), vjp=lambda gradient, x: (gradient,))
ACTIVATIONS: dict[str, Callable[..., Activation]] = {
    "swiglu": lambda: gated(F.silu, torch.ops.aten.silu_backward),
    "geglu_tanh": lambda: gated(F.gelu, torch.ops.aten.gelu_backward, approximate="tanh"),
    "clamped_swiglu": clamped_swiglu,
    "limited_swiglu": limited_swiglu,
    "glu": gated_by_sigmoid,
    "head_glu": lambda: gated_heads(torch.sigmoid, lambda gate: gate.sigmoid() * (1 - gate.sigmoid())),
    "head_softplus": lambda: gated_heads(F.softplus, torch.sigmoid),
    "gelu": lambda: gelu("none"),
    "gelu_tanh": lambda: gelu("tanh"),
    "relu2": lambda: RELU_SQUARED,
    "xielu": xielu,
}
"""Functions of the numbers in a formula that return the activation, by its name (`spec.activations`)."""


@cache
def make_activation(name: str, *arguments: float) -> Activation:
    """Return an activation. Those with equal arguments are one object, which is compiled once."""
    return ACTIVATIONS[name](*arguments)


def declared_activation(part: Part) -> Activation:
    """Return the only activation of a part."""
    return make_activation(part.activation.function, *part.activation.arguments)


def dropped(activation: Activation, drop: Drop) -> Activation:
    """Return an activation of whose output numbers are dropped."""

    def forward_and_vjp(*inputs: Tensor) -> tuple[Tensor, Vjp]:
        output, vjp = activation.forward_and_vjp(*inputs)
        return drop(output), lambda gradient: vjp(drop(gradient))

    return Activation(
        lambda *inputs: drop(activation.forward(*inputs)),
        forward_and_vjp,
        lambda gradient, *inputs: activation.vjp(drop(gradient), *inputs),
    )


def compute_now(_: GradientEdge | None, gradient: Callable[[], Tensor]) -> Tensor:
    """Return the gradient of a weight."""
    return gradient()


@dataclass(frozen=True)
class Product:
    """x W^T and its gradients; layouts replace it by products that communicate or defer."""

    defer_or_compute: DeferOrCompute = compute_now
    linear: LinearFunction = F.linear
    """The product of rows and a weight, for the output and for the gradient of the rows."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product [..., O] of rows x [..., I] and the weight W [O, I], plus the bias [O]."""
        return self.linear(x, weight, bias)

    def receive_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's product from that of the output."""
        return gradient

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the rows."""
        return self.linear(gradient, weight.T)

    def weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight from that of the product, [..., O]."""
        return gradient.flatten(0, -2).T @ x.flatten(0, -2)

    def sum_over_columns(self, sums: Tensor) -> Tensor:
        """Return sums over the columns of the whole weight from those over this rank's, which it may overwrite."""
        return sums

    def weight_edge(self, weight: Tensor) -> GradientEdge | None:
        """Return where a deferred gradient enters the graph; None if gradients are not deferred.

        A recomputed forward pass would save the weight without it."""
        return get_gradient_edge(weight) if self.defer_or_compute is not compute_now and weight.requires_grad else None


LINEAR = Product()


class ProductLinear(nn.Linear):
    """A linear layer of a block, whose product layouts and precisions may replace, perhaps with an adapter."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.product = LINEAR
        self.adapter: Adapter | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer."""
        if self.product is not LINEAR or not self.weight.is_floating_point():
            return activated_linear(self, IDENTITY, input)
        output = super().forward(input)
        return output if self.adapter is None else self.adapter.add(self, output, self.adapter.forward(IDENTITY, input))


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter, s B A x (`spec.parts.adapter`). The part of the layer owns its products."""

    a: ProductLinear
    b: ProductLinear
    scale: float
    magnitudes: Magnitudes | None = None
    dropout: Dropout | None = None

    def add(self, layer: ProductLinear, output: Tensor, addend: Tensor) -> Tensor:
        """Return the output of a layer with that of its adapter."""
        output = output + addend
        if self.magnitudes is None:
            return output
        norms = adapted_row_norms(layer, self)
        return cast(Tensor, _ScaleRows.apply(output, self.magnitudes.weight, norms, layer.bias))

    def forward(self, activation: Activation, *inputs: Tensor) -> Tensor:
        """Return what the adapter adds to the product of activation(inputs)."""
        return cast(Tensor, self.b(self.inner(activation, *inputs)))

    def inner(self, activation: Activation, *inputs: Tensor) -> Tensor:
        """Return s A activation(inputs), of which training may drop some."""
        drop = None if self.dropout is None else self.dropout.of_tokens(inputs[0])
        if drop is not None:
            activation = dropped(activation, drop)
        if activation is IDENTITY:
            return cast(Tensor, self.a(*inputs)) * self.scale
        return activated_linear(self.a, activation, *inputs) * self.scale


class Magnitudes(nn.Module):
    """Trained norms of the rows of an adapted weight (`spec.parts.adapter`)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))


@torch.no_grad()
def adapted_row_norms(layer: ProductLinear, adapter: Adapter) -> Tensor:
    """Return |W_i + s B_i A| for each row i, in fp32 or fp64.

    Its square is |W_i|^2 + 2 s B_i (W_i A^T)^T + s^2 B_i A A^T B_i^T, for which B A, as large as W, is not computed.
    Ranks with some columns of the rows sum the squares."""
    a = at_least_fp32(adapter.a.weight) * adapter.scale
    b = at_least_fp32(adapter.b.weight)
    # A quantized matrix takes no more memory here than in its product.
    weight = dense(layer.weight, compute_dtype(adapter.a.weight))
    squares = b.new_empty(len(weight))
    for rows, square in cached_rows(weight, squares[:, None]):
        torch.sum(at_least_fp32(rows).square(), 1, keepdim=True, out=square)
    with torch.autocast(weight.device.type, enabled=False), uncounted_products():
        mixed = at_least_fp32(weight @ a.T.to(weight.dtype)).mul_(2).addmm_(b, a @ a.T)
    squares += mixed.mul_(b).sum(1)
    # A row of zeros has no direction.
    return layer.product.sum_over_columns(squares).clamp_(min=torch.finfo(squares.dtype).tiny).sqrt_()


class _ScaleRows(torch.autograd.Function):
    """(y - b) m / n + b, where y [..., O] is the output of a linear layer with the bias b, m trained and n constant."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, magnitude: Tensor, norms: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, magnitude, norms, bias)
        factor = at_least_fp32(magnitude) / norms
        out = torch.empty_like(y)
        for rows, out_rows in cached_rows(y, out):
            scaled = at_least_fp32(rows) * factor
            out_rows.copy_(scaled if bias is None else scaled.add_(bias * (1 - factor)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, magnitude, norms, bias = ctx.saved_tensors
        factor = at_least_fp32(magnitude) / norms
        grad_y = torch.empty_like(y)
        total, product = (torch.zeros_like(norms) for _ in range(2))
        for rows, gradient_rows, grad_rows in cached_rows(y, gradient, grad_y):
            exact = at_least_fp32(gradient_rows)
            product += (exact * at_least_fp32(rows)).sum(0)
            grad_rows.copy_(exact * factor)
            if bias is not None:
                total += exact.sum(0)
        if bias is not None:
            product -= total * bias
        grad_bias = (total * (1 - factor)).to(bias.dtype) if ctx.needs_input_grad[3] else None
        return grad_y, (product / norms).to(magnitude.dtype), None, grad_bias


def activated_product(
    product: Product, activation: Activation, weight: Tensor, *inputs: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return activation(inputs) W^T + b, in the dtype of autocast if it is enabled.

    The inputs of the activation are saved for the backward pass, and W, if quantized, as it is. They have the rows of
    the output, but for trained numbers of the formula, which are vectors and keep their precision."""
    weight, *operands = autocast_operands(weight, *(x for x in inputs if x.ndim > 1))
    operands += [x for x in inputs if x.ndim == 1]
    if bias is not None:
        (bias,) = autocast_operands(bias)
    if not torch.is_grad_enabled():
        x = activation.forward(*operands)
        return product.forward(x, dense(weight, x.dtype), bias)
    return cast(Tensor, _ActivatedProduct.apply(product, activation, weight, bias, *operands))


def activated_linear(layer: ProductLinear, activation: Activation, *inputs: Tensor) -> Tensor:
    """Return the output of a linear layer whose input is activation(inputs), of which the inputs are saved."""
    output = activated_product(layer.product, activation, layer.weight, *inputs, bias=layer.bias)
    if layer.adapter is None:
        return output
    return layer.adapter.add(layer, output, layer.adapter.forward(activation, *inputs))


def autocast_operands(*tensors: Tensor) -> TensorTuple:
    """Cast the operands of a product as autocast does, but for quantized ones."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


class _ActivatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Product, activation: Activation, weight: Tensor, bias: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        ctx.product = product
        ctx.activation = activation
        ctx.weight_edge = product.weight_edge(weight)
        is_input_needed = ctx.needs_input_grad[2] or activation is not IDENTITY
        ctx.save_for_backward(weight, *(inputs if is_input_needed else (None,)))
        x = activation.forward(*inputs)
        return product.forward(x, dense(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weight, *inputs = ctx.saved_tensors
        product: Product = ctx.product
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        gradient = product.receive_gradient(gradient)
        x, activation_vjp = ctx.activation.forward_and_vjp(*inputs)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = product.defer_or_compute(
                ctx.weight_edge, partial(product.weight_gradient, gradient, x.detach(), weight)
            )
        # Unless the weight's gradient is deferred, the peak has one tensor less.
        del x
        return (
            None,
            None,
            grad_weight,
            grad_bias,
            *activation_vjp(product.input_gradient(gradient, dense(weight, gradient.dtype))),
        )
