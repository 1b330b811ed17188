"""Meters of the memory of tensors: storages that a forward pass saves, and the peak of all that are alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.model.sequence_context import Documents
from phalanx.parallel.recomputed_norms import NormCall


class SavedStorages(dict[int, torch.UntypedStorage]):
    """Storages of saved tensors by address, without those of the model. Noted storages stay alive."""

    def __init__(self, model: nn.Module) -> None:
        self.owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def exclude(self, *tensors: Tensor) -> None:
        """Leave out tensors that blocks share."""
        self.owned |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def exclude_bounds(self, documents: Documents | None) -> None:
        """Leave out the bounds of documents, whose number depends on the data."""
        if documents is not None:
            self.exclude(documents.bounds)

    def record(self, tensor: Tensor) -> Tensor:
        """Note a tensor, and return it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.owned:
            self.setdefault(storage.data_ptr(), storage)
        return tensor

    @contextmanager
    def record_saved_tensors(self, autocast: bool) -> Iterator[None]:
        """Note the tensors that a forward pass saves."""
        keeping = saved_tensors_hooks(self.record, lambda tensor: tensor)
        pack = NormCall._pack_saved_tensor

        def pack_and_record(call: NormCall, tensor: Tensor) -> Any:  # of nested hooks, only the inner ones are called
            packed = pack(call, tensor)
            return self.record(packed) if isinstance(packed, Tensor) else packed

        recording = mock.patch.object(NormCall, "_pack_saved_tensor", pack_and_record)
        with keeping, recording, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            yield

    @property
    def bytes(self) -> int:
        """Bytes of all noted storages."""
        return sum(storage.nbytes() for storage in self.values())


class PeakLiveBytes(TorchDispatchMode):
    """Peak bytes of all live tensors that are created while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.bytes = 0
        """Bytes of these storages, some of which may have been freed."""
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        input_storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(outputs):
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            if tensor.untyped_storage()._cdata not in input_storages:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.bytes += storage.nbytes() - self.sizes.get(reference, 0)
                self.sizes[reference] = storage.nbytes()
        # Without freed storages these may be a new peak: looking for them after each call would take most of the time.
        if self.bytes > self.peak:
            self.sizes = {reference: size for reference, size in self.sizes.items() if not reference.expired()}
            self.bytes = sum(self.sizes.values())
            self.peak = max(self.peak, self.bytes)
        return outputs


def find_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors that functions keep in their arguments and closures."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, partial):
        yield from find_tensors([value.func, *value.args, *value.keywords.values()])
    elif isinstance(value, FunctionType):
        yield from find_tensors([cell.cell_contents for cell in value.__closure__ or ()])
    elif hasattr(value, "cache_info"):
        yield from find_tensors(value.__wrapped__)  # type: ignore[attr-defined]
