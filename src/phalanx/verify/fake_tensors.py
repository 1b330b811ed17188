"""Tensors with a shape, a dtype and a size, but no values, so that a program runs at any size.

They are PyTorch's fake tensors, with extensions for a full training step under any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_iter, tree_leaves

STRIDED_SHARD_FLAG = "_propagate_use_strided_shard_flag"
"""Function of PyTorch that 2.11 does not have yet."""
INTEGER_DTYPES = (torch.int32, torch.int64, torch.bool)
MAX_REAL_ELEMENTS = 2**20
"""Maximum number of elements of a tensor that keeps its values."""


@contextmanager
def shape_only_tensors() -> Iterator[None]:
    """Create tensors without values inside."""
    with ExitStack() as stack:
        # DTensor infers shapes with tensors of the full size. In a fake mode of its own, their bytes are not counted.
        stack.enter_context(mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None))
        if propagate := getattr(_sharding_prop, STRIDED_SHARD_FLAG, None):
            propagate_once = _skip_repeated_schemas(propagate)
            stack.enter_context(mock.patch.object(_sharding_prop, STRIDED_SHARD_FLAG, propagate_once))
        stack.enter_context(ShapeOnlyMode(allow_non_fake_inputs=True))
        yield


def _skip_repeated_schemas(propagate: Callable[[Any, OpSchema], None]) -> Callable[[Any, OpSchema], None]:
    """Return a function like `propagate` that inspects a schema without strided shards only once.

    PyTorch calls `propagate` for each operand of a fused optimizer step, and it reads all operands each time.
    """
    last_without: OpSchema | None = None

    def propagate_once(strategy: Any, schema: OpSchema) -> None:
        nonlocal last_without
        if schema is last_without:
            return
        if any(isinstance(placement, _StridedShard) for spec in schema.args_spec for placement in spec.placements):
            propagate(strategy, schema)
        else:
            last_without = schema

    return propagate_once


class ShapeOnlyMode(FakeTensorMode):
    """Mode in which operations create fake tensors, with two exceptions.

    Tensors on the meta device stay as they are, because they have no values anyway. Small integer tensors keep their
    values if they depend on no fake tensor, such as the ranks of a mesh, or the order of DDP's buckets.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _keeps_values(func, args, kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # PyTorch infers the shape of a grouped product only in bf16. The operands are either grouped rows and a
            # matrix per group, or grouped columns and grouped rows.
            a, b, offsets = args[:3]
            grouped = (a.shape[0], b.shape[2]) if b.ndim == 3 else (len(offsets), a.shape[0], b.shape[1])
            return a.new_empty(grouped)
        output = super().__torch_dispatch__(func, types, args, kwargs=kwargs)
        return _attach_tensors_to_work(args, output) if func.namespace == "c10d" else output


def _keeps_values(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    # Most operations have a fake tensor among their arguments. A search of all leaves takes longer.
    if any(isinstance(argument, FakeTensor) for argument in args):
        return False
    tensors = []
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, FakeTensor):
            return False
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    dtypes = [kwargs["dtype"]] if kwargs.get("dtype") is not None else [tensor.dtype for tensor in tensors]
    if not tensors:
        if func._overloadpacket is torch.ops.aten.arange:
            return all(isinstance(argument, int) and argument <= MAX_REAL_ELEMENTS for argument in args)
        shape = args[0] if args and isinstance(args[0], list | tuple) else ()
        return any(dtype in INTEGER_DTYPES for dtype in dtypes) and prod(shape) <= MAX_REAL_ELEMENTS
    if all(tensor.is_meta for tensor in tensors):
        return device is None
    if func._schema.is_mutable:
        largest = tensors[0].numel()
    else:
        # An upper bound of the elements of a result: of all operands, broadcast or in sequence.
        try:
            largest = prod(np.broadcast_shapes(*(tensor.shape for tensor in tensors)))
        except ValueError:
            largest = sum(tensor.numel() for tensor in tensors)
    all_integer = all(dtype in INTEGER_DTYPES for dtype in [*dtypes, *(tensor.dtype for tensor in tensors)])
    return all_integer and largest <= MAX_REAL_ELEMENTS


def _attach_tensors_to_work(args: Any, output: Any) -> Any:
    """Return a collective's output with a work object that contains the tensors, which DDP reads.

    The work objects of the fake process group contain no tensors.
    """
    if not any(isinstance(leaf, torch.ScriptObject) for leaf in tree_leaves(output)):
        return output
    is_single = isinstance(output, torch.ScriptObject)
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([leaf for leaf in tree_leaves(args if is_single else output) if isinstance(leaf, Tensor)])
    work = dist.Work.boxed(_create_work_from_future(future))
    return work if is_single else (*output[:-1], work)
