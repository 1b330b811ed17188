"""Mamba-2, and what families with it have in common."""

from __future__ import annotations

from phalanx.spec.families.family import Rows, StoredTensors
from phalanx.spec.families.forms import LayerKind

MAMBA_MIXER = "kinds.mamba.mixer"
"""Table of the dials of a family's layers with Mamba-2."""


def mamba_kind(**dials: object) -> LayerKind:
    """Return the kind of layers with Mamba-2, with further dials."""
    return LayerKind(
        "mamba",
        lambda layer: layer.mixer is not None and layer.mixer.kind == "mamba2",
        {"mixer.kind": "mamba2", **dials},
    )


def mamba_tensors(prefix: str) -> StoredTensors:
    """Return the tensors of Mamba-2, whose names start with a prefix.

    Gates, values, keys, queries and steps are one product; values, keys and queries are one convolution."""
    convolved = ("value", "key", "query")
    return {
        **{
            f"{prefix}.in_proj.{leaf}": Rows(
                *(f"attention.{name}.{leaf}" for name in ("gate", "values", "keys", "queries", "steps"))
            )
            for leaf in ("weight", "bias")
        },
        f"{prefix}.conv1d.weight": Rows(*(f"attention.{name}_taps" for name in convolved), unit_axes=(1,)),
        f"{prefix}.conv1d.bias": Rows(*(f"attention.{name}_bias" for name in convolved)),
        f"{prefix}.A_log": "attention.log_rate",
        f"{prefix}.D": "attention.skip",
        f"{prefix}.dt_bias": "attention.step_bias",
        f"{prefix}.norm.weight": "attention.norm.weight",
        f"{prefix}.out_proj.weight": "attention.out.weight",
        f"{prefix}.out_proj.bias": "attention.out.bias",
    }
