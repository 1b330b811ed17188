"""Copies from a device to the host, which waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class PendingCopies:
    """Copies of tensors to CPU memory, in the order of the device's other work.

    The host continues until it calls `wait`."""

    def __init__(self, *tensors: Tensor) -> None:
        """Start the copies. Tensors in CPU memory are not copied."""
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._events = []
        for device in {tensor.device for tensor in tensors}:
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    def wait(self) -> list[Tensor]:
        """Return the copies, after the device has made them. The host waits once for any number of tensors."""
        while self._events:
            self._events.pop().synchronize()
        return self._copies


def copy_to_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in CPU memory (without a copy if they are there already).

    The host waits for a GPU once, for any number of tensors."""
    return PendingCopies(*tensors).wait()


def wait_for_host_copies(device: torch.device) -> None:
    """Wait until non-blocking copies from a device are in CPU memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
