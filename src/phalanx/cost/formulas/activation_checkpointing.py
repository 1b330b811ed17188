"""Recomputation by rule of thumb: how many checkpoints, and what computing again costs. What Phalanx itself keeps (the
input of every block) is counted in `cost.exact.activation_memory`."""

from __future__ import annotations

from math import ceil, sqrt


def peak_saved_layers(layers: int, checkpoints: int) -> int:
    """Layers' worth held at the peak: one input for each of so many checkpoints, and all activations of the layers
    between two of them (Chen et al., arXiv 1604.06174, section 4.1, which takes the two to be of one size)."""
    return checkpoints + ceil(layers / checkpoints)


def optimal_num_checkpoints(layers: int) -> int:
    """As many checkpoints as hold least: sqrt(layers), or of several the nearest to it; about twice as many layers'
    worth are held."""

    def cost(checkpoints: int) -> tuple[int, float]:
        return peak_saved_layers(layers, checkpoints), abs(checkpoints - sqrt(layers))

    return min(range(1, layers + 1), key=cost)


def recompute_overhead(extra_forwards: float = 1.0, backward: float = 2.0) -> float:
    """Compute that is added to a step, as a share of it: `extra_forwards` passes more, where a backward pass takes as
    long as `backward` of them. Of one forward pass: a third."""
    return extra_forwards / (1 + backward)
