"""How fast this device multiplies matrices: the measured peak that MFU is a share of, where no data sheet is known."""

from __future__ import annotations

import time

import torch


def peak_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, rounds: int = 8) -> float:
    """Best speed in FLOP/s over a few square products [size, size] with the threads this process has."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best
