"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its scaled variants.

Shapes: B batch, T tokens, H heads, K head width, J = K / 2 frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.spec.model import RopeSpec, yarn_mscale

RotaryTable = tuple[Tensor, Tensor]


def frequencies(rope: RopeSpec, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Return the angle per token of each pair of channels, [J] fp64.

    The angle is theta**(-2j/K), scaled by `rope.scaling`. Without `device` the CPU computes; a copy from there would
    make the host wait for a GPU in every forward pass."""
    base_J = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    if rope.scaling == "linear":  # position interpolation, arXiv 2306.15595
        return base_J / rope.factor
    if rope.scaling == "proportional":
        base_J[int(rope.fraction * head_dim // 2) :] = 0
        return base_J / rope.factor
    if rope.scaling == "llama3":
        return _scale_llama3(rope, base_J)
    if rope.scaling == "yarn":
        return _scale_yarn(rope, base_J, head_dim)
    return base_J


def _scale_llama3(rope: RopeSpec, base_J: Tensor) -> Tensor:
    """Scale low frequencies and leave high ones (Llama 3.1, arXiv 2407.21783, its released code)."""
    turns_J = rope.original_context * base_J / (2 * math.pi)
    smooth_J = (turns_J - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth_J = smooth_J.clamp(0, 1)
    return smooth_J * base_J + (1 - smooth_J) * base_J / rope.factor


def _scale_yarn(rope: RopeSpec, base_J: Tensor, head_dim: int) -> Tensor:
    """Scale with a ramp over channels between beta_fast and beta_slow turns (YaRN, arXiv 2309.00071, 3.2)."""

    def channel(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = channel(rope.beta_fast)
    high = channel(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    ramp_J = (torch.arange(head_dim // 2, dtype=torch.float64, device=base_J.device) - low) / max(high - low, 0.001)
    stretch_J = ramp_J.clamp(0, 1)
    return stretch_J * base_J / rope.factor + (1 - stretch_J) * base_J


def rotary_table(rope: RopeSpec, head_dim: int, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
    """Return the cosine of each rotated channel's angle, and the sine that multiplies its partner, [..., T, 1, R] each.

    Angles are computed in fp64: in fp32 a position of 100,000 has an error of a hundredth of a radian. Positions, [...,
    T], are those of tokens in their documents."""
    angle = positions[..., None].double() * frequencies(rope, rope.width(head_dim), positions.device)
    angle = torch.cat((-angle, angle), dim=-1)[..., None, :]
    scale = rope.attention_factor or yarn_mscale(rope.factor) if rope.scaling == "yarn" else 1.0
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def apply_rotary(x_BTHK: Tensor, table: RotaryTable) -> Tensor:
    """Rotate channel j with channel j + R/2 by the position's angle (convention of Llama's HF weights).

    The table is for the first R channels; the others stay as they are."""
    cos, sin = table
    width = cos.shape[-1]
    rotated = x_BTHK[..., :width] if width < x_BTHK.shape[-1] else x_BTHK
    partner = rotated.roll(width // 2, dims=-1)
    rotated = (rotated * cos + partner * sin).to(x_BTHK.dtype)
    return rotated if width == x_BTHK.shape[-1] else torch.cat((rotated, x_BTHK[..., width:]), dim=-1)
