"""Modules of the mixers of tokens: attention, and one file for each kind in `spec.parts.mixers`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from phalanx.model.attention import Attention
from phalanx.model.part import PartModule
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import Part


def make_mixer(layer: ModelSpec, part: Part) -> PartModule:
    """Return the module of a layer's mixer (`spec.layers`): the class that has the name of its description."""
    mixer = layer.side_mixer if part.name == "side_mixer" else layer.mixer
    if mixer is None:
        return Attention(layer, part)
    module = import_module(f"{__package__}.{mixer.kind}")
    return cast(PartModule, getattr(module, type(mixer).__name__)(layer.model_copy(update={"mixer": mixer}), part))
