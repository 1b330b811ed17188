"""Copies from a device to the host, which waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in CPU memory (without a copy if they are there already).

    The host waits for a GPU once, for any number of tensors."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors}:
        wait_for_host_copies(device)
    return copies


def wait_for_host_copies(device: torch.device) -> None:
    """Wait until non-blocking copies from a device are in CPU memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
