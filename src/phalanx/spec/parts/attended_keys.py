"""Number of keys that attention's queries see, with sliding windows or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.spec.model import ModelSpec


def attended_keys(window: int | None, seq_len: int, causal: bool = True, chunk: int | None = None) -> float:
    """Return the mean number of keys that a query sees.

    Args:
        window: Keys that it sees at most; None: no limit.
        seq_len: T, tokens of a sequence.
        causal: Count the lower triangle of pairs, T / 2 keys, without those beyond the window. Otherwise count all T
            keys, or those of a full window.
        chunk: Tokens that see each other only; None: all of the sequence.
    """
    if chunk is not None and chunk < seq_len:
        full_chunks, rest = divmod(seq_len, chunk)
        return (full_chunks * chunk**2 + rest**2) / seq_len / (2 if causal else 1)
    window = min(window or seq_len, seq_len)
    return window - window**2 / (2 * seq_len) if causal else float(window)


def attended_fraction(layers: Sequence[ModelSpec], seq_len: int) -> float:
    """Return the fraction of the causal pairs of queries and keys that windows and chunks leave, over layers."""
    keys = (
        attended_keys(layer.sliding_window, seq_len, chunk=layer.attention_chunk) for layer in layers if layer.attends
    )
    return sum(keys) / (len(layers) * seq_len / 2)
