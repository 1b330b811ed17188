"""Recomputation of the outputs of a block's norms in the backward pass.

Matrix products save their input for the gradient of their weight. If the input is the output of a norm, the norm has
saved its own input too, from which the output is recomputed: one elementwise operation instead of a tensor as wide as
the residual stream. Products and attention are never repeated, and gradients are bitwise the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from phalanx.model.part import PartModule, Reader, multiply_each
from phalanx.model.products import autocast_operands

PackedOutput = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a saved tensor that has the elements of the norm's output."""


class NormCall:
    """Output of one call of a norm, which products save without its memory."""

    def __init__(self, norm: Callable[[Tensor], Tensor], x: Tensor, output: Tensor, num_readers: int) -> None:
        """Create the call. `norm` reads the parameters that are gathered then; `num_readers` parts read its output."""
        self.norm = norm
        self.x = x.detach()
        self.output: Tensor | None = output
        """The output; None after the last reader has run."""
        self.operand = output
        """The output as products save it: in the dtype of autocast once a reader has cast it."""
        self.pending_readers = num_readers
        self.pending_uses = 0
        self.recomputed: Tensor | None = None

    def read(self, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        """Return the result of a part that reads the output, without saving the output.

        `x` is the output, perhaps as another tensor of the same memory."""
        with saved_tensors_hooks(self._pack_saved_tensor, self._unpack_saved_tensor):
            result = function(x)
        self.pending_readers -= 1
        if self.pending_readers == 0:
            del self.operand
            self.output = None
        return result

    def cast_operand(self, x: Tensor) -> Tensor:
        """Return a tensor in the dtype of autocast; all readers of the output share the memory of its cast."""
        if x is not self.output:
            return x
        if self.operand is x:
            (self.operand,) = autocast_operands(x.detach())
        return x if self.operand.dtype == x.dtype else cast(Tensor, _SharedCast.apply(x, self.operand))

    def _pack_saved_tensor(self, tensor: Tensor) -> Tensor | PackedOutput:
        saved = self.operand
        # Storages and not addresses: tensors without values (`phalanx.verify`) have none.
        if tensor.untyped_storage()._cdata != saved.untyped_storage()._cdata or tensor.dtype != saved.dtype:
            return tensor
        if tensor.storage_offset() != saved.storage_offset() or tensor.numel() != saved.numel():
            return tensor
        if not (tensor.is_contiguous() and saved.is_contiguous()):
            return tensor
        self.pending_uses += 1
        return tensor.shape, tensor.dtype

    def _unpack_saved_tensor(self, packed: Tensor | PackedOutput) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, dtype = packed
        if self.recomputed is None:
            with torch.no_grad():
                self.recomputed = self.norm(self.x).to(dtype)
        value = self.recomputed
        self.pending_uses -= 1
        # Another backward pass of a retained graph makes the number negative.
        if self.pending_uses <= 0:
            self.recomputed = None
        return value.view(shape)


class _SharedCast(torch.autograd.Function):
    """A cast whose result has been computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class RecomputedNorm:
    """A norm and the parts of sublayers that read its output."""

    def __init__(self, norm: nn.Module, *sublayers: nn.Module) -> None:
        """Change the norm and the sublayers in place."""
        self.norm: Callable[[Tensor], Tensor] = norm.forward
        self.call: NormCall | None = None
        self.num_readers = 0
        norm.forward = self._apply_norm
        for submodule in chain.from_iterable(sublayer.modules() for sublayer in sublayers):
            if isinstance(submodule, nn.Linear):
                submodule.register_forward_pre_hook(self._cast_input)
            if isinstance(submodule, PartModule) and submodule.part.reads_input:
                # A product that is sharded over ranks casts the input once, for all layers.
                casts_once = submodule.multiply_columns is not multiply_each
                submodule.read_input = self._read_cast if casts_once else self._read
                self.num_readers += 1

    def _apply_norm(self, x: Tensor) -> Tensor:
        output = self.norm(x)
        is_read = self.num_readers > 0 and torch.is_grad_enabled()
        self.call = NormCall(self.norm, x, output, self.num_readers) if is_read else None
        return output

    def _read(self, reader: Reader, x: Tensor) -> Any:
        call = self.call
        if call is None:
            return reader(x)
        result = call.read(reader, x)
        if call.output is None:
            self.call = None
        return result

    def _read_cast(self, reader: Reader, x: Tensor) -> Any:
        call = self.call
        return self._read(reader if call is None else lambda x: reader(call.cast_operand(x)), x)

    def _cast_input(self, _: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
        return None if self.call is None else self.call.cast_operand(inputs[0])
