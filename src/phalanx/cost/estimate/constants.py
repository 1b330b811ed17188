"""What hardware and software make of a formula: efficiencies, latencies and passes over memory, fitted to runs.

The bounds are what is physically sensible; `benchmarks/fit_planner.py` fits within them, to all sources at once, and
writes `constants.toml`. None belongs to one source of the published runs."""

from __future__ import annotations

import tomllib
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any


def bounded(low: float, high: float) -> Any:
    """A constant and the bounds of its fit."""
    return field(metadata={"low": low, "high": high})


def bounds(constant: Field[Any]) -> tuple[float, float]:
    """Lowest and highest value that a fit may give a constant."""
    return constant.metadata["low"], constant.metadata["high"]


@dataclass(frozen=True)
class TimeConstants:
    """Constants of step times.

    "Passes" are reads or writes of a tensor of 2-byte numbers; eras are those of `JobTable.hardware_generation`.
    """

    gemm_0: float = bounded(0.75, 1.05)
    """Of the most that a matrix product was seen to reach, what large products reach in training (era 0)."""
    gemm_1: float = bounded(0.70, 1.02)
    gemm_2: float = bounded(0.60, 1.02)
    low_precision: float = bounded(0.50, 1.0)
    """Of the most that products in 8 bits were seen to reach: scales must be found and numbers cast."""
    wave_tail: float = bounded(0.55, 1.0)
    """Part of the last wave of tiles that is lost when it does not fill the multiprocessors."""
    depth: float = bounded(10, 400)
    """Steps along K that it costs to begin and to end a tile."""
    small_tile: float = bounded(0.70, 0.97)
    """Speed of a tile beside the next larger one."""
    misaligned: float = bounded(0.05, 0.60)
    """Speed of a product whose rows are no multiple of 16 bytes."""
    gap_seconds: float = bounded(1e-6, 10e-6)
    """Between one kernel and the next on the device."""
    launch_seconds: float = bounded(1e-6, 2e-5)
    """Of the host for one operation (era 0)."""
    launch_1: float = bounded(0.1, 1.0)
    """Of that, what it takes in the second era."""
    launch_2: float = bounded(0.1, 2.0)
    operations: float = bounded(20, 90)
    """Operations of a block's forward pass."""
    flash_1: float = bounded(0.15, 0.50)
    """Share of the peak of Flash Attention's first version, forward."""
    flash_2: float = bounded(0.35, 0.75)
    """Of its second version (era 0)."""
    flash_2_later: float = bounded(0.20, 0.50)
    """Of its second version on devices that it was not written for (era 1)."""
    flash_3: float = bounded(0.30, 0.75)
    """Of kernels written for era 1."""
    flash_4: float = bounded(0.25, 0.80)
    """Of kernels of era 2."""
    flash_backward: float = bounded(1.0, 1.8)
    """Time per FLOP of the backward pass beside the forward pass."""
    flash_start: float = bounded(50, 3000)
    """Tokens of a sequence that its blocks on the diagonal cost."""
    score_passes: float = bounded(3, 10)
    """Over the scores that attention writes to memory, forward, by fused kernels."""
    score_separate: float = bounded(1.2, 4.0)
    """Times as many by separate ones."""
    score_backward: float = bounded(0.7, 2.0)
    hbm_0: float = bounded(0.60, 0.88)
    """Of a memory's bandwidth, what element-wise kernels reach (era 0)."""
    hbm_1: float = bounded(0.40, 0.88)
    hbm_2: float = bounded(0.45, 0.88)
    width_passes: float = bounded(4, 40)
    """Over a block's residual stream, forward: norms, residuals, dropout."""
    norm_passes: float = bounded(0.1, 100)
    """As many more where RMSNorm is written as separate operations in fp32."""
    shared_passes: float = bounded(1, 30)
    """Over what tensor-parallel ranks share between products: queries, keys, values, their rotation."""
    inner_passes: float = bounded(1, 12)
    """Over the MLP's inner width."""
    route_passes: float = bounded(0.2, 30)
    """Over each token's copies that go to experts and come back."""
    backward_passes: float = bounded(1.0, 3.0)
    """Passes of the backward pass beside the forward pass."""
    compiled: float = bounded(0.2, 1.0)
    """Of the passes, those that remain when they are compiled."""
    link: float = bounded(0.35, 0.95)
    """Of a fast link's bandwidth, what collectives reach (eras 0 and 1)."""
    link_2: float = bounded(0.30, 0.95)
    link_seconds: float = bounded(5e-6, 60e-6)
    """Of a collective over fast links, however small."""
    hop_seconds: float = bounded(1e-6, 12e-6)
    """Of each further rank on the ring."""
    network: float = bounded(0.40, 0.97)
    """Of a network card's bandwidth, what collectives reach."""
    network_seconds: float = bounded(5e-6, 100e-6)
    network_hop_seconds: float = bounded(1e-6, 20e-6)
    """Of each further node on the ring, or of each level of the tree."""
    bucket_bytes: float = bounded(8e6, 500e6)
    """Sent at once by data-parallel ranks while the backward pass goes on."""
    overlap: float = bounded(0.3, 1.0)
    """Part of a micro-batch's backward pass (and half of its forward pass) that data-parallel exchanges can hide in."""
    overlap_leak: float = bounded(0.01, 0.40)
    """Of a hidden exchange, what it still costs by slowing what it hides in."""
    exposed_p2p_fraction: float = bounded(0.02, 1.0)
    """Of the time between two stages, what the schedule waits for where sends run ahead."""
    deepspeed: float = bounded(1.0, 1.3)
    """Times as long as a micro-batch takes under DeepSpeed's pipeline engine."""
    optimizer_passes: float = bounded(4, 40)
    """Over 2 bytes for each parameter that a rank updates."""
    step_seconds: float = bounded(0.001, 0.05)
    """Of every step: clipping, logging."""
    straggler_factor: float = bounded(0.0005, 0.03)
    """Slower, for each doubling of the domains that wait for one another."""
    head_passes: float = bounded(1, 30)
    """Over the logits, for softmax and loss, forward and backward."""


@dataclass(frozen=True)
class MemoryConstants:
    """Of memory. Bytes are per token and element of the tensor named."""

    wide_bytes: float = bounded(8, 12)
    """Of the residual stream's width: norms' inputs and outputs, dropout masks."""
    wide_gated_bytes: float = bounded(6, 10)
    """The same in models with gated MLPs, which have no dropout."""
    norm_bytes: float = bounded(0.1, 16)
    """More, where RMSNorm is written as separate operations in fp32."""
    gated_bytes: float = bounded(4, 7)
    """Of a gated MLP's inner width, in fused kernels."""
    gated_separate_bytes: float = bounded(7, 10)
    plain_bytes: float = bounded(3.9, 5)
    """Of the inner width of an MLP with two matrices."""
    score_bytes: float = bounded(4, 6)
    """Of attention's scores where they are kept: softmax, dropout's mask, its output (arXiv 2205.05198, 4.1: 5)."""
    score_separate: float = bounded(1, 3)
    operations_kept: float = bounded(0.3, 0.7)
    """Of a block's activations, what recomputing every other product keeps."""
    logit_bytes: float = bounded(4, 14)
    """Of the logits, with the loss's gradient."""
    logit_fused_bytes: float = bounded(4, 10)
    logit_gathered: float = bounded(1, 3)
    """Times as many where they are gathered from ranks that share the vocabulary."""
    gathered_blocks: float = bounded(0.5, 2)
    """Blocks whose parameters and gradients ZeRO-3 has whole, beside the one at work."""
    working: float = bounded(0.2, 1.5)
    """Of four tensors of the residual stream: what comes and goes within a block."""
    workspace_gib: float = bounded(0.1, 2)
    """Libraries' and collectives' buffers."""
    scattered: float = bounded(0.05, 1)
    """Of one micro-batch's activations, what cannot be used again while others' are kept around it."""
    fragmentation: float = bounded(1, 1.3)
    """Reserved, for what comes and goes."""
    context_gib: float = bounded(0.3, 4)
    """Of the device's memory, what no allocator sees."""
    spread: float = bounded(0.01, 0.2)
    """Standard deviation of the logarithm of what is used, about the prediction."""


@dataclass(frozen=True)
class IntervalConstants:
    """Of the intervals that hold 80 % of runs: half their width, as a logarithm of the step time."""

    stated: float
    """Dense models in 16 bits."""
    sharded: float
    """The same under ZeRO-3, whose gathers may or may not hide."""
    small: float
    """Models at most 2048 wide, where the host and the gaps between kernels decide."""
    experts: float
    low_precision: float


@lru_cache
def interval_constants() -> IntervalConstants:
    """Those that were fitted."""
    return IntervalConstants(**_load_constants()["interval"])


@lru_cache
def time_constants() -> TimeConstants:
    """Those that were fitted."""
    return TimeConstants(**_load_constants()["time"])


@lru_cache
def memory_constants() -> MemoryConstants:
    """Those that were fitted."""
    return MemoryConstants(**_load_constants()["memory"])


def names(constants_class: type[TimeConstants] | type[MemoryConstants]) -> list[str]:
    """Of all constants of a kind."""
    return [constant.name for constant in fields(constants_class)]


def _load_constants() -> dict[str, dict[str, float]]:
    return tomllib.loads(files("phalanx.cost.estimate").joinpath("constants.toml").read_text())
