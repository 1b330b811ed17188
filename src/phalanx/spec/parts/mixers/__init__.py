"""Mixers of tokens that layers may have in place of attention, each described in a file of its own.

The module of a mixer is the class of the same name in the file of the same name in `phalanx.model.mixers`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phalanx.spec.parts.mixers.gated_delta import GatedDelta
from phalanx.spec.parts.mixers.kimi_delta import KimiDelta
from phalanx.spec.parts.mixers.latent_attention import LatentAttention
from phalanx.spec.parts.mixers.mamba2 import Mamba2
from phalanx.spec.parts.mixers.short_convolution import ShortConvolution

__all__ = ["GatedDelta", "KimiDelta", "LatentAttention", "Mamba2", "MixerSpec", "ShortConvolution"]

MixerSpec = Annotated[ShortConvolution | LatentAttention | GatedDelta | KimiDelta | Mamba2, Field(discriminator="kind")]
"""Description of any mixer."""
