"""Number of keys that attention's queries see, with sliding windows."""

from __future__ import annotations

from phalanx.spec.model import ModelSpec


def attended_keys(spec: ModelSpec, layer: int, seq_len: int, causal: bool = True) -> float:
    """Return the mean number of keys that a query of a layer sees.

    Args:
        layer: Index of the layer.
        seq_len: T, tokens of a sequence.
        causal: Count the lower triangle of pairs, T / 2 keys, without those beyond the window. Otherwise count all T
            keys, or those of a full window.
    """
    window = min(spec.attention_window(layer) or seq_len, seq_len)
    return window - window**2 / (2 * seq_len) if causal else float(window)


def attended_fraction(spec: ModelSpec, seq_len: int) -> float:
    """Return the fraction of the causal pairs of queries and keys that windows leave, over all layers."""
    keys = sum(attended_keys(spec, layer, seq_len) for layer in range(spec.num_layers))
    return keys / (spec.num_layers * seq_len / 2)
