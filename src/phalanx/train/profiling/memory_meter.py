"""Measurement of the memory of tensors, in total and by part.

Why: `docs/design/decisions/memory-by-tensor.md`."""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of operations whose tensors are communication buffers, unless `known` names them."""


@dataclass(kw_only=True)
class MemoryChange:
    """Change of the bytes of each part while some code runs."""

    peaks: Counter[str] = field(default_factory=Counter)
    """Peak of each part, relative to its bytes at the start."""
    peak_working: int = 0
    peak_total: int = 0
    net: Counter[str] = field(default_factory=Counter)
    """Change of each part from start to end."""
    moves: list[tuple[int, Counter[str]]] = field(default_factory=list)
    """The share of `net` that comes from tensors which moved to another part. Each entry has the number of the tensor's
    storage (`MemoryMeter.numbers`), and the bytes by part, negative for the part that it left."""


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that exist before it or are created inside it, until they are freed.

    Each storage counts once. The meter slows every operation, so it is for one or two steps. A tensor counts for the
    part that `known` names. Any other tensor counts as communication if a collective created it, and otherwise as
    activations, which therefore include temporary tensors of the passes."""

    def __init__(
        self,
        known: Callable[[], Mapping[str, Iterable[Tensor]]],
        elastic: Sequence[Sequence[Tensor]] = (),
        history: list[tuple[float, Mapping[str, int]]] | None = None,
        other_memory: Collection[str] = (),
        known_after_collectives: Callable[[], Mapping[str, Iterable[Tensor]]] | None = None,
    ) -> None:
        """Create the meter of the tensors by part that `known` returns.

        `elastic` are groups of communication buffers, such as FSDP2's gathered parameters, which are resized one after
        the other without an operation that the meter could see. The bytes by part are appended to `history` after each
        change, with the time by time.perf_counter(). Parts of `other_memory` are not in this device's memory.
        `known_after_collectives` returns those of `known` that a collective may create; by default all."""
        super().__init__()
        self.history = history
        self.other_memory = other_memory
        self.known = known
        self.known_after_collectives = known_after_collectives or known
        self._elastic = [[tensor.untyped_storage() for tensor in group] for group in elastic if group]
        # FSDP2 computes between the first and the last buffer of a group, if it copies shards of another dimension than
        # rows.
        self._elastic_ends = [storage for group in self._elastic for storage in (group[0], group[-1])]
        self._elastic_keys = {storage._cdata for group in self._elastic for storage in group}
        self.part_by_storage: dict[int, str] = {}
        self.bytes_by_storage: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        """Numbers of storages in memory, in the order in which they were first seen."""
        self.num_created = 0
        self.bytes_by_part: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        """Peak bytes of each part."""
        self.peak_working = 0
        """Peak bytes of activations and communication together."""
        self.peak_total = 0
        """Peak bytes of all parts of this device together."""
        self._known = defaultdict[str, dict[int, weakref.ref[Tensor]]](dict)
        """Tensors that `known` has named since the last `reclassify`, by part and id."""
        self.part_of_new = "activations"
        """The part of tensors that operations create, other than collectives."""
        self._elastic_bytes = 0
        self._elastic_end_bytes: list[int] | None = None
        """Bytes of the first and the last buffer of each elastic group when all of them were last counted."""
        self._changes: list[MemoryChange] = []
        """Changes that are being recorded, one inside the other."""
        self.reclassify()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        communicates = func.namespace in COMMUNICATION
        for leaf in tree_leaves((args, kwargs, out) if communicates else out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._track_storage(leaf, "communication" if communicates else self.part_of_new, moves=communicates)
        self.reclassify_after_collective() if communicates else self._update_peaks()
        return out

    def reclassify(self) -> None:
        """Update the part of each known tensor."""
        self._known.clear()  # a tensor's storage may have been replaced
        self._classify_tensors(self.known())

    def reclassify_after_collective(self) -> None:
        """Update the part of each new tensor that a collective may create: its result may be a gradient."""
        self._classify_tensors(self.known_after_collectives())

    def _classify_tensors(self, tensors_by_part: Mapping[str, Iterable[Tensor]]) -> None:
        for part, tensors in tensors_by_part.items():
            known_of_part = self._known[part]
            for tensor in tensors:
                before = known_of_part.get(id(tensor))
                if before is None or before() is not tensor:
                    known_of_part[id(tensor)] = weakref.ref(tensor)
                    self._track_storage(_local_shard(tensor), part, moves=True)
        self._update_peaks()

    def move(self, tensor: Tensor, part: str) -> None:
        """Count a tensor for a part from now on."""
        self._track_storage(tensor, part, moves=True)

    def _track_storage(self, tensor: Tensor, part: str, moves: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        previous_part = self.part_by_storage.get(key)
        if previous_part == part or key in self._elastic_keys:
            return
        if previous_part is None:
            if tensor.is_meta:
                return
            self.part_by_storage[key] = part
            self.bytes_by_storage[key] = storage.nbytes()
            self.bytes_by_part[part] += storage.nbytes()
            self.numbers[key] = self.num_created
            self.num_created += 1
            # No reference to this meter, which would keep it alive as long as the storage.
            weakref.finalize(
                storage, _release_storage, self.part_by_storage, self.bytes_by_storage, self.bytes_by_part, key
            )
            weakref.finalize(storage, self.numbers.pop, key)
        elif moves and (previous_part == "activations" or part != "communication"):
            self.part_by_storage[key] = part
            size_bytes = self.bytes_by_storage[key]
            moved = Counter({previous_part: -size_bytes, part: size_bytes})
            self.bytes_by_part.update(moved)
            for change in self._changes:
                change.moves.append((self.numbers[key], moved))

    def _update_peaks(self) -> None:
        end_bytes = [*map(torch.UntypedStorage.nbytes, self._elastic_ends)]
        # This runs after each operation, so only the ends of each group are read.
        if end_bytes != self._elastic_end_bytes:
            self._elastic_end_bytes = end_bytes
            size_bytes = sum(storage.nbytes() for group in self._elastic for storage in group)
            self.bytes_by_part["communication"] += size_bytes - self._elastic_bytes
            self._elastic_bytes = size_bytes
        if self.history is not None and (not self.history or self.history[-1][1] != self.bytes_by_part):
            self.history.append((time.perf_counter(), dict(self.bytes_by_part)))
        for part, size_bytes in self.bytes_by_part.items():
            self.peaks[part] = max(self.peaks[part], size_bytes)
        self.peak_working = max(self.peak_working, self._working_bytes)
        self.peak_total = max(self.peak_total, self._total_bytes)

    @property
    def _working_bytes(self) -> int:
        return self.bytes_by_part["activations"] + self.bytes_by_part["communication"]

    @property
    def _total_bytes(self) -> int:
        elsewhere = sum(self.bytes_by_part[part] for part in self.other_memory)
        return sum(self.bytes_by_part.values()) - elsewhere

    @contextmanager
    def recording_change(self) -> Iterator[MemoryChange]:
        """Record the change while the code inside runs; it is complete at the end."""
        self._update_peaks()
        before = self.peaks, self.peak_working, self.peak_total
        start = self.bytes_by_part.copy(), self._working_bytes, self._total_bytes
        self.peaks = start[0].copy()
        self.peak_working = start[1]
        self.peak_total = start[2]
        change = MemoryChange()
        num_outer = len(self._changes)
        self._changes.append(change)
        try:
            yield change
        finally:
            # Also remove inner changes that an error has left unfinished.
            del self._changes[num_outer:]
            self._update_peaks()
            change.peaks = _subtract_counts(self.peaks, start[0])
            change.peak_working = self.peak_working - start[1]
            change.peak_total = self.peak_total - start[2]
            change.net = _subtract_counts(self.bytes_by_part, start[0])
            self.peaks |= before[0]
            self.peak_working = max(self.peak_working, before[1])
            self.peak_total = max(self.peak_total, before[2])

    def repeat_change(self, change: MemoryChange) -> None:
        """Count a recorded change once more, as if its code had run again."""
        self._update_peaks()
        for part, added in change.peaks.items():
            self.peaks[part] = max(self.peaks[part], self.bytes_by_part[part] + added)
        self.peak_working = max(self.peak_working, self._working_bytes + change.peak_working)
        self.peak_total = max(self.peak_total, self._total_bytes + change.peak_total)
        for part, added in change.net.items():
            self.bytes_by_part[part] += added

    @contextmanager
    def tracking_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Count new gradients as gradients as soon as they exist."""

        def on_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._track_storage(_local_shard(parameter.grad), "gradients", moves=True)

        trained = (parameter for parameter in parameters if parameter.requires_grad)
        hooks = [parameter.register_post_accumulate_grad_hook(on_gradient) for parameter in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _subtract_counts(after: Counter[str], before: Counter[str]) -> Counter[str]:
    """Return the differences of either sign, whereas Counter's minus drops negative ones."""
    return Counter({part: after[part] - before[part] for part in after.keys() | before.keys()})


def _local_shard(tensor: Tensor) -> Tensor:
    # Not to_local(), which autograd records, at a hundred times the cost.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _release_storage(
    part_by_key: dict[int, str], bytes_by_key: dict[int, int], bytes_by_part: Counter[str], key: int
) -> None:
    bytes_by_part[part_by_key.pop(key)] -= bytes_by_key.pop(key)
