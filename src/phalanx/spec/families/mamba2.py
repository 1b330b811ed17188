"""Mamba-2, and what families with it have in common."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.spec.families.family import Field, Rows, StoredTensors, Table, any_value
from phalanx.spec.families.forms import LayerKind
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers import Mamba2

MAMBA_MIXER = "kinds.mamba.mixer"
"""Table of the dials of a family's layers with Mamba-2."""


def mamba_kind(**dials: object) -> LayerKind:
    """Return the kind of layers with Mamba-2, with further dials."""
    return LayerKind(
        "mamba",
        lambda layer: layer.mixer is not None and layer.mixer.kind == "mamba2",
        {"mixer.kind": "mamba2", **dials},
    )


@dataclass(frozen=True)
class StepLimits(Field):
    """Limits of the steps of Mamba-2, of which the upper one may be infinite."""

    mixer: str = MAMBA_MIXER
    """Table of the dials of the mixer."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of the limits."""
        return any_value(f"{self.mixer}.min_step", f"{self.mixer}.max_step")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the limits. transformers writes infinity as a table."""
        lower, upper = config.get(name) or (0.0, math.inf)
        upper = math.inf if isinstance(upper, dict) else upper
        return {f"{self.mixer}.min_step": lower, f"{self.mixer}.max_step": None if upper == math.inf else upper}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both limits."""
        mixers = (mixer for layer in layer_specs(spec) for mixer in (layer.mixer, layer.side_mixer))
        mixer = next((mixer for mixer in mixers if isinstance(mixer, Mamba2)), None)
        if mixer is None:
            return {}
        return {name: [mixer.min_step, math.inf if mixer.max_step is None else mixer.max_step]}


def mamba_tensors(prefix: str, part: str = "attention") -> StoredTensors:
    """Return the tensors of Mamba-2, whose names start with a prefix, by the parameters of a part.

    Gates, values, keys, queries and steps are one product; values, keys and queries are one convolution."""
    convolved = ("value", "key", "query")
    return {
        **{
            f"{prefix}.in_proj.{leaf}": Rows(
                *(f"{part}.{name}.{leaf}" for name in ("gate", "values", "keys", "queries", "steps"))
            )
            for leaf in ("weight", "bias")
        },
        f"{prefix}.conv1d.weight": Rows(*(f"{part}.{name}_taps" for name in convolved), unit_axes=(1,)),
        f"{prefix}.conv1d.bias": Rows(*(f"{part}.{name}_bias" for name in convolved)),
        f"{prefix}.A_log": f"{part}.log_rate",
        f"{prefix}.D": f"{part}.skip",
        f"{prefix}.dt_bias": f"{part}.step_bias",
        f"{prefix}.norm.weight": f"{part}.norm.weight",
        f"{prefix}.out_proj.weight": f"{part}.out.weight",
        f"{prefix}.out_proj.bias": f"{part}.out.bias",
    }
