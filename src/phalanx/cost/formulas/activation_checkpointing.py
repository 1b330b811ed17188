"""Rules of thumb for recomputation: the number of checkpoints and the cost in compute.

`cost.exact.activation_memory` counts what Phalanx itself saves, which is the input of every block.
"""

from __future__ import annotations

from math import ceil, sqrt


def peak_saved_layers(layers: int, checkpoints: int) -> int:
    """Return the peak number of layers whose activations are in memory.

    The count is one input per checkpoint, plus all activations of the layers between two checkpoints (Chen et al.,
    arXiv 1604.06174, section 4.1, which takes inputs and activations to have equal size).
    """
    return checkpoints + ceil(layers / checkpoints)


def optimal_num_checkpoints(layers: int) -> int:
    """Return the number of checkpoints with the lowest peak memory.

    It is sqrt(layers), or the nearest of several optima. The peak is about twice that number of layers.
    """

    def cost(checkpoints: int) -> tuple[int, float]:
        return peak_saved_layers(layers, checkpoints), abs(checkpoints - sqrt(layers))

    return min(range(1, layers + 1), key=cost)


def recompute_overhead(extra_forwards: float = 1.0, backward: float = 2.0) -> float:
    """Return the compute that recomputation adds to a step, as a fraction of the step.

    Args:
        extra_forwards: Number of recomputed forward passes.
        backward: Time of a backward pass in forward passes. With the defaults, the result is a third.
    """
    return extra_forwards / (1 + backward)
