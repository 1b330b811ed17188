"""Reading what a device computed: the host waits for it there."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in CPU memory (those that are there already, themselves). The host waits for a GPU once, however
    many tensors there are."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors}:
        wait_for_host_copies(device)
    return copies


def wait_for_host_copies(device: torch.device) -> None:
    """Wait until copies from a device that did not block are in CPU memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
