"""Fitted constants of hardware and software: efficiencies, latencies and memory passes.

The bounds of each constant are physically sensible. `benchmarks/fit_planner.py` fits within them, to all sources at
once, and writes `constants.toml`. No constant belongs to a single source of published runs.

Why: `docs/design/decisions/constants-of-kinds.md`.
"""

from __future__ import annotations

import tomllib
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from phalanx.cost.kinds import Column
from phalanx.spec.cluster import GENERATIONS


def bounded(low: float, high: float) -> Any:
    """Return a field for a constant with the bounds of its fit."""
    return field(metadata={"low": low, "high": high})


def bounds(constant: Field[Any]) -> tuple[float, float]:
    """Return the minimum and maximum that a fit may assign to a constant."""
    return constant.metadata["low"], constant.metadata["high"]


@dataclass(frozen=True, kw_only=True)
class TimeConstants:
    """Constants of step times.

    "Passes" are reads or writes of a tensor of 2-byte numbers. `of_generation` finds those of a device's generation.
    """

    gemm_0: float = bounded(0.75, 1.05)
    """Fraction of the maximum measured speed that large products reach in training (generation 0)."""
    gemm_1: float = bounded(0.70, 1.02)
    gemm_2: float = bounded(0.60, 1.02)
    low_precision: float = bounded(0.50, 1.0)
    """Fraction of the maximum measured 8-bit speed: scales must be computed and numbers cast."""
    wave_tail: float = bounded(0.55, 1.0)
    """Fraction of the last wave of tiles that is lost if it does not fill the multiprocessors."""
    depth: float = bounded(10, 400)
    """Steps along K that the start and end of a tile cost."""
    small_tile: float = bounded(0.70, 0.97)
    """Speed of a tile relative to the next larger one."""
    misaligned: float = bounded(0.05, 0.60)
    """Relative speed of a product whose rows are not a multiple of 16 bytes."""
    gap_seconds: float = bounded(1e-6, 10e-6)
    """Time between two kernels on the device."""
    launch_seconds: float = bounded(1e-6, 2e-5)
    """Host time per operation (generation 0)."""
    launch_1: float = bounded(0.1, 1.0)
    """Host time relative to `launch_seconds` in generation 1."""
    launch_2: float = bounded(0.1, 2.0)
    operations: float = bounded(20, 90)
    """Operations of a block's forward pass."""
    flash_1: float = bounded(0.15, 0.50)
    """Fraction of the peak that Flash Attention 1 reaches, forward."""
    flash_2: float = bounded(0.35, 0.75)
    """Fraction of the peak that Flash Attention 2 reaches (generation 0)."""
    flash_2_later: float = bounded(0.20, 0.50)
    """Fraction of the peak that Flash Attention 2 reaches on later devices (generation 1)."""
    flash_3: float = bounded(0.30, 0.75)
    """Fraction of the peak that kernels written for generation 1 reach."""
    flash_4: float = bounded(0.25, 0.80)
    """Fraction of the peak that kernels of generation 2 reach."""
    flash_backward: float = bounded(1.0, 1.8)
    """Time per FLOP of the backward pass relative to the forward pass."""
    flash_start: float = bounded(50, 3000)
    """Tokens of a sequence that attention's blocks on the diagonal cost."""
    score_passes: float = bounded(3, 10)
    """Forward passes of fused kernels over the scores that attention writes to memory."""
    score_separate: float = bounded(1.2, 4.0)
    """Score passes of separate kernels relative to fused kernels."""
    score_backward: float = bounded(0.7, 2.0)
    hbm_0: float = bounded(0.60, 0.88)
    """Fraction of the memory bandwidth that element-wise kernels reach (generation 0)."""
    hbm_1: float = bounded(0.40, 0.88)
    hbm_2: float = bounded(0.45, 0.88)
    width_passes: float = bounded(4, 40)
    """Forward passes over a block's residual stream: norms, residuals, dropout."""
    norm_passes: float = bounded(0.1, 100)
    """Additional width passes if RMSNorm runs as separate operations in fp32."""
    shared_passes: float = bounded(1, 30)
    """Passes over tensors that tensor-parallel ranks share between products: queries, keys, values, RoPE."""
    inner_passes: float = bounded(1, 12)
    """Passes over the MLP's inner width."""
    route_passes: float = bounded(0.2, 30)
    """Passes over the copies of tokens that go to experts and come back."""
    backward_passes: float = bounded(1.0, 3.0)
    """Memory passes of the backward pass relative to the forward pass."""
    compiled: float = bounded(0.2, 1.0)
    """Fraction of the memory passes that remain with torch.compile."""
    link: float = bounded(0.35, 0.95)
    """Fraction of a fast link's bandwidth that collectives reach (generations 0 and 1)."""
    link_2: float = bounded(0.30, 0.95)
    link_seconds: float = bounded(5e-6, 60e-6)
    """Minimum time of a collective over fast links."""
    hop_seconds: float = bounded(1e-6, 12e-6)
    """Time of each further rank on the ring."""
    network: float = bounded(0.40, 0.97)
    """Fraction of a network card's bandwidth that collectives reach."""
    network_seconds: float = bounded(5e-6, 100e-6)
    network_hop_seconds: float = bounded(1e-6, 20e-6)
    """Time of each further node on the ring, or of each level of the tree."""
    bucket_bytes: float = bounded(8e6, 500e6)
    """Bytes per data-parallel message during the backward pass."""
    overlap: float = bounded(0.3, 1.0)
    """Fraction of a micro-batch's backward and half its forward pass that can hide data parallelism."""
    overlap_leak: float = bounded(0.01, 0.40)
    """Fraction of a hidden exchange that still costs time, as it slows down what hides it."""
    exposed_p2p_fraction: float = bounded(0.02, 1.0)
    """Fraction of the time between two stages that the schedule waits for, if sends run ahead."""
    deepspeed: float = bounded(1.0, 1.3)
    """Time of a micro-batch under DeepSpeed's pipeline engine, relative to other engines."""
    optimizer_passes: float = bounded(4, 40)
    """Passes over 2 bytes per parameter that a rank updates."""
    step_seconds: float = bounded(0.001, 0.05)
    """Fixed time per step: clipping, logging."""
    straggler_factor: float = bounded(0.0005, 0.03)
    """Relative slowdown per doubling of the number of domains that wait for each other."""
    head_passes: float = bounded(1, 30)
    """Passes over the logits for softmax and loss, forward and backward."""

    def of_generation(self, name: str, generation: Column, oldest: float | None = None) -> Column:
        """Return the constant `name_0`, `name_1` and so on that applies to each device's generation.

        A generation without a constant of its own uses that of the generation before; `oldest` is that of the first.
        """
        values: list[Any] = [oldest]
        for number in range(len(GENERATIONS)):
            values.append(getattr(self, f"{name}_{number}", values[-1]))
        return np.choose(generation.astype(np.int64), values[1:])


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Constants of memory. Bytes are per token and element of the named tensor."""

    wide_bytes: float = bounded(8, 12)
    """Bytes per element of the residual stream's width: inputs and outputs of norms, dropout masks."""
    wide_gated_bytes: float = bounded(6, 10)
    """Bytes per element of the residual stream's width in models with gated MLPs, which have no dropout."""
    norm_bytes: float = bounded(0.1, 16)
    """Additional bytes if RMSNorm runs as separate operations in fp32."""
    gated_bytes: float = bounded(4, 7)
    """Bytes per element of a gated MLP's inner width, in fused kernels."""
    gated_separate_bytes: float = bounded(7, 10)
    plain_bytes: float = bounded(3.9, 5)
    """Bytes per element of the inner width of an MLP with two matrices."""
    score_bytes: float = bounded(4, 6)
    """Bytes per attention score, if scores are saved (arXiv 2205.05198, 4.1: 5).

    Softmax, the dropout mask and the dropout output.
    """
    score_separate: float = bounded(1, 3)
    operations_kept: float = bounded(0.3, 0.7)
    """Fraction of a block's activations that remain if every other product is recomputed."""
    logit_bytes: float = bounded(4, 14)
    """Bytes per logit, including the gradient of the loss."""
    logit_fused_bytes: float = bounded(4, 10)
    logit_gathered: float = bounded(1, 3)
    """Logit memory relative to the above if logits are gathered from ranks that share the vocabulary."""
    gathered_blocks: float = bounded(0.5, 2)
    """Blocks whose parameters and gradients ZeRO-3 has gathered, in addition to the current one."""
    working: float = bounded(0.2, 1.5)
    """Size of the temporary tensors of a block, in units of four tensors of the residual stream."""
    workspace_gib: float = bounded(0.1, 2)
    """Buffers of libraries and collectives."""
    scattered: float = bounded(0.05, 1)
    """Fraction of one micro-batch's activations that is unusable between those of other micro-batches."""
    fragmentation: float = bounded(1, 1.3)
    """Reserved bytes relative to temporarily allocated bytes."""
    context_gib: float = bounded(0.3, 4)
    """Device memory that is invisible to the allocator."""
    spread: float = bounded(0.01, 0.2)
    """Standard deviation of the logarithm of used / predicted memory."""


@dataclass(frozen=True, kw_only=True)
class IntervalConstants:
    """Half widths of the intervals that contain 80 % of runs, as a logarithm of the step time."""

    stated: float
    """Half width for dense models in 16 bits."""
    sharded: float
    """Half width for dense models in 16 bits with ZeRO-3, whose gathers may or may not hide."""
    small: float
    """Half width for models at most 2048 wide, in which the host and the gaps between kernels dominate."""
    experts: float
    low_precision: float


@lru_cache
def interval_constants() -> IntervalConstants:
    """Return the fitted constants of intervals."""
    return IntervalConstants(**_load_constants()["interval"])


@lru_cache
def time_constants() -> TimeConstants:
    """Return the fitted constants of step times."""
    return TimeConstants(**_load_constants()["time"])


@lru_cache
def memory_constants() -> MemoryConstants:
    """Return the fitted constants of memory."""
    return MemoryConstants(**_load_constants()["memory"])


def names(constants_class: type[TimeConstants] | type[MemoryConstants]) -> list[str]:
    """Return the names of all constants of a class."""
    return [constant.name for constant in fields(constants_class)]


def _load_constants() -> dict[str, dict[str, float]]:
    return tomllib.loads(files("phalanx.cost.estimate").joinpath("constants.toml").read_text())
