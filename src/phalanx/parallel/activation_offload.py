"""Offload of activations: recomputed blocks keep their inputs in CPU memory between the passes.

On a GPU a stream of its own copies a block's input to pinned memory while the block computes. The backward pass copies
it back one block ahead: while a block is recomputed, the input of the block before it is on its way. Streams wait for
each other by events, and each tensor stays referenced until the compute stream has waited for its copy, so freed memory
is reused in the order of the compute stream. On a CPU, copies are in the same memory and done at once.

The method is that of `cpu_checkpointing` in DeepSpeed and of `OffloadActivations` in torchtune."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from phalanx.parallel.comm.pinned_memory import pinned_zeros


class HostCopier:
    """Copies between a device and CPU memory. Their pinned buffers are reused."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream of copies; there is none on a CPU."""
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unused = defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]](list)

    def take_buffer(self, like: Tensor) -> Tensor:
        """Return CPU memory for a copy of a tensor."""
        if self.stream is None:
            return torch.empty_like(like)
        unused = self._unused[like.shape, like.dtype]
        return unused.pop() if unused else pinned_zeros(like.shape, like.dtype)

    def return_buffer(self, buffer: Tensor) -> None:
        """Let a later copy reuse a pinned buffer.

        Copies run in order, so those that still read the buffer come first."""
        if self.stream is not None:
            self._unused[buffer.shape, buffer.dtype].append(buffer)

    def start_copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start a copy after the current work of the compute stream, and return the event of its end."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def wait(self, end: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for a copy. The host does not wait."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)


@dataclass(eq=False, kw_only=True)
class StoredInput:
    """The input of a block for one micro-batch, in CPU memory until its backward pass."""

    copier: HostCopier
    host_copy: Tensor | None
    requires_grad: bool
    previous: StoredInput | None
    """The input of the preceding block, which the backward pass needs next."""
    fetched: Tensor | None = None
    fetch_end: torch.cuda.Event | None = None

    def start_fetch(self) -> None:
        """Start the copy back to the device, unless it has been started."""
        if self.host_copy is not None:
            self.fetched = torch.empty_like(self.host_copy, device=self.copier.device)
            self.fetch_end = self.copier.start_copy(self.host_copy, self.fetched)
            self.copier.return_buffer(self.host_copy)
            self.host_copy = None

    def take(self) -> Tensor:
        """Return the input on the device, and start to fetch the one that is needed next."""
        self.start_fetch()
        self.copier.wait(self.fetch_end)
        x, self.fetched = self.fetched, None
        assert x is not None, "the input of a block was recomputed twice"
        if self.previous is not None:
            self.previous.start_fetch()
        return x.requires_grad_(self.requires_grad)


class BlockOffload:
    """Checkpointing of a block that stores its input in CPU memory (the `checkpoint_fn` of a wrapper)."""

    def __init__(
        self, copier: HostCopier, checkpoint: Callable[..., Any], previous: BlockOffload | None = None
    ) -> None:
        """Create the offload of one block, with the copier of all blocks.

        `checkpoint` calls a function and recomputes it in the backward pass. The output of the `previous` block is this
        one's input."""
        self.copier = copier
        self.checkpoint = checkpoint
        self.previous = previous
        self.newest: Callable[[], StoredInput | None] = lambda: None
        """Returns the input that was stored last, as long as its backward pass still needs it."""

    def __call__(self, block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the block; the backward pass recomputes it from the stored input."""
        if not torch.is_grad_enabled():
            return block(x, *args, **kwargs)
        host_copy = self.copier.take_buffer(x)
        end = self.copier.start_copy(x, host_copy)
        previous = self.previous.newest() if self.previous is not None else None
        stored = StoredInput(copier=self.copier, host_copy=host_copy, requires_grad=x.requires_grad, previous=previous)
        self.newest = ref(stored)
        inputs = [x]

        def forward(*args: Any, **kwargs: Any) -> Any:
            return block(inputs.pop() if inputs else stored.take(), *args, **kwargs)

        outputs = self.checkpoint(forward, *args, **kwargs)
        # The block's own work hides the copy. From here on the caller may free x.
        self.copier.wait(end)
        return outputs
