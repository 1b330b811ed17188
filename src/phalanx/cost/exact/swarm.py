"""Cost of training over slow links for a node: bytes per round, their time, and memory.

Formulas: DiLoCo, arXiv 2311.08105; SPES, arXiv 2602.11543. M is the number of parameters of a model: M_s shared by all
nodes, M_e of experts. There are N nodes, of which r train each expert. A node owns m experts of E, a fraction of M_e.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.model import ModelSpec
from phalanx.spec.swarm import CODEC_BLOCK_SIZE, EXPERT_SPLIT_METHODS, Codec, Method

BITS_PER_ELEMENT: dict[Codec, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of a number, without its block's scale."""
SCALED_CODECS = ("int8", "int4")
SCALE_BYTES = 4
WEIGHT_BYTES = GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
"""Bytes per parameter that a node updates: two moments of AdamW in fp32."""


def encoded_bytes(num_elements: int, codec: Codec) -> int:
    """Return the bytes of one tensor: its numbers, and a scale for each block (the last may be shorter)."""
    blocks = -(-num_elements // CODEC_BLOCK_SIZE) if codec in SCALED_CODECS else 0
    return -(-BITS_PER_ELEMENT[codec] * num_elements // 8) + SCALE_BYTES * blocks


@dataclass(frozen=True)
class NodeShare:
    """Parameters of a model by their role on a node: trained by all nodes, by this node, by other nodes."""

    shared: int
    trained_experts: int
    frozen_experts: int
    steps: bool = True
    """True if the node updates its parameters and has their moments; with ddp the coordinator does."""

    @property
    def total(self) -> int:
        """M, the number of parameters of the model."""
        return self.shared + self.trained_experts + self.frozen_experts

    @property
    def trained(self) -> int:
        """Number of parameters with gradients on the node."""
        return self.shared + self.trained_experts


def node_share(model: ModelSpec, method: Method, owned: int = 0) -> NodeShare:
    """Return the parameters on a node that owns `owned` experts of each layer.

    If the method does not split experts, all nodes train all of them.

    Args:
        method: Method of the swarm.
        owned: Experts of each layer that the node trains.
    """
    count = count_parameters(model)
    if method not in EXPERT_SPLIT_METHODS or model.moe is None:
        return NodeShare(count.total, 0, 0, steps=method != "ddp")
    owned_parameters = count.experts * owned // model.moe.num_experts
    return NodeShare(count.total - count.experts, owned_parameters, count.experts - owned_parameters)


@dataclass(frozen=True)
class RoundBytes:
    """Bytes that a node sends and receives in a round, without names and checksums."""

    up: float
    down: float

    def seconds(self, up_bytes_per_second: float, down_bytes_per_second: float) -> float:
        """Return the seconds on the wire.

        All nodes send before any node receives, because an update depends on all of them.
        """
        return self.up / up_bytes_per_second + self.down / down_bytes_per_second


def round_bytes(node: NodeShare, method: Method, codec: Codec = "fp32", replication: int = 1) -> RoundBytes:
    """Return the bytes of a round.

    SPES sends b (M_s + m M_e / E) up and b M down; the other methods send b M both ways. SPES+ does not send a node the
    parameters that only this node trains.

    Args:
        node: Parameters of the node.
        method: Method of the swarm.
        codec: Encoding of numbers, of b bytes each.
        replication: r, nodes that train each expert.
    """
    bytes_per_element = BITS_PER_ELEMENT[codec] / 8 + (SCALE_BYTES / CODEC_BLOCK_SIZE if codec in SCALED_CODECS else 0)
    unsent_parameters = node.trained_experts if method == "spes+" and replication == 1 else 0
    return RoundBytes(bytes_per_element * node.trained, bytes_per_element * (node.total - unsent_parameters))


def state_bytes(node: NodeShare, frozen: Codec = "fp32") -> int:
    """Return the bytes of a node's weights, gradients and AdamW moments, in fp32.

    The `frozen` codec encodes experts that the node does not train.
    """
    bytes_per_parameter = WEIGHT_BYTES + GRADIENT_BYTES + (MOMENTS_BYTES if node.steps else 0)
    return bytes_per_parameter * node.trained + encoded_bytes(node.frozen_experts, frozen)


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round on a node, if all nodes are equal."""

    training: float
    wire: float
    """Time of sending and then receiving."""
    hidden: float
    """Part of `wire` during which the node continues to train."""

    @property
    def total(self) -> float:
        """Seconds from one exchange to the next."""
        return self.training + self.wire - self.hidden

    @property
    def utilization(self) -> float:
        """Fraction of the time in which the node trains."""
        return self.training / self.total


def round_time(
    traffic: RoundBytes,
    up_bytes_per_second: float,
    down_bytes_per_second: float,
    steps: int,
    step_seconds: float,
    delay: int = 0,
) -> RoundTime:
    """Return the time of a round.

    Args:
        traffic: Bytes of the round.
        up_bytes_per_second: Upload speed of the node.
        down_bytes_per_second: Download speed of the node.
        steps: Steps per round.
        step_seconds: Time of a step.
        delay: Steps that a node trains while its update is in transit (Streaming DiLoCo, arXiv 2501.18512, section
            2.3).
    """
    wire_seconds = traffic.seconds(up_bytes_per_second, down_bytes_per_second)
    return RoundTime(steps * step_seconds, wire_seconds, min(wire_seconds, delay * step_seconds))
