"""How fast this device multiplies matrices: the measured peak that MFU is a share of, where no data sheet is known."""

from __future__ import annotations

import time
from typing import Literal

import torch

from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.spec.files.load import load_machine, preset_names
from phalanx.spec.run import RunSpec

FIRST_SIZE = 128
ENOUGH_SECONDS = 0.001
"""Products grow from this size until one takes so long: a rank begins with this, and 1024 take a second where bf16 is
computed in software."""

MIN_BF16_SPEEDUP = 1.2
"""By which bf16 must be faster than fp32, which is more exact."""


def measure_peak_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, rounds: int = 8) -> float:
    """Best speed in FLOP/s over a few square products [n, n] with the threads this process has; n is `size`, or less
    on a device that is slow."""
    side = min(FIRST_SIZE, size)
    while (seconds := _best_seconds(device, dtype, side, rounds=rounds)) < ENOUGH_SECONDS and side < size:
        side = min(2 * side, size)
    return 2 * side**3 / seconds


def _best_seconds(device: torch.device, dtype: torch.dtype, side: int, rounds: int) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(rounds):
        started_at = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started_at)
    return best


def has_fast_bf16(device: torch.device) -> bool:
    """Whether products in bf16 have instructions or kernels of their own there. On CPUs without (x86 before AVX-512)
    PyTorch computes them number by number, some thirty times slower than in fp32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fastest_precision(device: torch.device) -> Literal["bf16", "fp32"]:
    """Return bf16 where this device has instructions for it, and a CPU multiplies matrices clearly faster in it.

    A CPU is measured with one thread: the launcher's other processes import PyTorch meanwhile, and two threads that
    wait for each other beside them have made fp32 look slower than bf16 in software.
    """
    if device.type != "cpu":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if not has_fast_bf16(device):
        return "fp32"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bf16, fp32 = (measure_peak_flops(device, TORCH_DTYPES[name]) for name in ("bf16", "fp32"))
    finally:
        torch.set_num_threads(num_threads)
    return "bf16" if bf16 > MIN_BF16_SPEEDUP * fp32 else "fp32"


def rank_peak_flops(run: RunSpec, device: torch.device) -> float | None:
    """Peak FLOP/s of one rank: as the run file says, of the GPU's preset, or measured on a CPU; None if unknown."""
    bf16 = run.training.precision == "bf16"
    on_cpu = device.type == "cpu"
    cluster = run.cluster
    if cluster.peak_flops and cluster.calibration and cluster.calibration.precision == run.training.precision:
        return cluster.peak_flops / cluster.ranks_per_core  # of this machine, by `phalanx calibrate`
    if cluster.peak_flops and (not cluster.preset or (bf16 and not on_cpu)):
        return cluster.peak_flops
    if on_cpu:
        return measure_peak_flops(device, TORCH_DTYPES[run.training.precision])
    name_parts = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    presets = [name for name in preset_names("machines") if name.upper() in name_parts]
    slower_variants = {"PCIE", "NVL"} & set(name_parts)  # the presets are the SXM cards
    return load_machine(presets[0]).peak_flops if presets and bf16 and not slower_variants else None
