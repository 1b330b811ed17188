"""Peak speed of matrix products on this device, for MFU without a data sheet."""

from __future__ import annotations

import time
from typing import Literal

import torch

from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.spec.files.load import load_machine, preset_names
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.run import RunSpec

FIRST_SIZE = 128
ENOUGH_SECONDS = 0.001
"""Products grow from `FIRST_SIZE` until one takes this long.

A rank measures at its start, and a size of 1024 takes a second where bf16 is computed in software."""

MIN_BF16_SPEEDUP = 1.2
"""Minimum speedup of bf16 over fp32, which is more exact."""


def measure_peak_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, rounds: int = 8) -> float:
    """Return the maximum speed in FLOP/s of several square products [n, n] with this process's threads.

    A slow device uses an n less than `size`."""
    side = min(FIRST_SIZE, size)
    seconds = _measure_best_seconds(device, dtype, side, rounds)
    while seconds < ENOUGH_SECONDS and side < size:
        side = min(2 * side, size)
        seconds = _measure_best_seconds(device, dtype, side, rounds=rounds)
    return 2 * side**3 / seconds


def _measure_best_seconds(device: torch.device, dtype: torch.dtype, side: int, rounds: int) -> float:
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
    """Return whether the device has instructions or kernels for products in bf16.

    On CPUs without them (x86 before AVX-512) PyTorch computes the products element by element, about thirty times
    slower than in fp32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fastest_precision(device: torch.device) -> Literal["bf16", "fp32"]:
    """Return bf16 if this device has instructions for it, and if it is clearly faster on a CPU.

    A CPU is measured with one thread: the launcher's other processes import PyTorch meanwhile. Two threads that wait
    for each other next to them have made fp32 look slower than bf16 in software."""
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
    """Return the peak FLOP/s of one rank; None if unknown.

    It is the value of the run file, that of the GPU's preset, or a measurement on a CPU. For fp8, it is the peak of
    bf16, which is that of attention, of weight gradients and of the head."""
    bf16 = run.training.precision in BF16_PRECISIONS
    on_cpu = device.type == "cpu"
    cluster = run.cluster
    if cluster.peak_flops and cluster.calibration and cluster.calibration.precision == run.training.precision:
        # `phalanx calibrate` has measured it on this machine.
        return cluster.peak_flops / cluster.ranks_per_core
    if cluster.peak_flops and (not cluster.preset or (bf16 and not on_cpu)):
        return cluster.peak_flops
    if on_cpu:
        return measure_peak_flops(device, TORCH_DTYPES[run.training.precision])
    name_parts = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    presets = [name for name in preset_names("machines") if name.upper() in name_parts]
    # The presets describe the SXM cards, and other variants are slower.
    slower_variants = {"PCIE", "NVL"} & set(name_parts)
    return load_machine(presets[0]).peak_flops if presets and bf16 and not slower_variants else None
