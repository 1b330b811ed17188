"""What training over slow links costs a node: bytes that it sends and receives in a round, how long that takes, and
memory. Formulas: DiLoCo, arXiv 2311.08105; SPES, arXiv 2602.11543.

M parameters of a model, M_s of them shared by all nodes, M_e of experts; N nodes, r that train each expert; a node owns
m experts of E, a share of M_e."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.model import ModelSpec
from phalanx.spec.swarm import CODEC_BLOCK_SIZE, EXPERT_SPLIT_METHODS, Codec, Method

BITS_PER_ELEMENT: dict[Codec, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Of a number, without its block's scale."""
SCALED_CODECS = ("int8", "int4")
SCALE_BYTES = 4
WEIGHT_BYTES = GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
"""Of each parameter that a node steps: two moments of AdamW in fp32."""


def encoded_bytes(num_elements: int, codec: Codec) -> int:
    """Of one tensor: its numbers, and a scale for each block of them, the last of which may be shorter."""
    blocks = -(-num_elements // CODEC_BLOCK_SIZE) if codec in SCALED_CODECS else 0
    return -(-BITS_PER_ELEMENT[codec] * num_elements // 8) + SCALE_BYTES * blocks


@dataclass(frozen=True)
class NodeShare:
    """What a node has of a model: parameters that all nodes train, those of its experts, and those of the others'."""

    shared: int
    trained_experts: int
    frozen_experts: int
    steps: bool = True
    """Whether it steps what it trains, and has moments of that; of ddp the coordinator does."""

    @property
    def total(self) -> int:
        """M."""
        return self.shared + self.trained_experts + self.frozen_experts

    @property
    def trained(self) -> int:
        """What it has gradients of."""
        return self.shared + self.trained_experts


def node_share(model: ModelSpec, method: Method, owned: int = 0) -> NodeShare:
    """A node that owns so many experts of each layer; where nodes do not split them all are everybody's."""
    count = count_parameters(model)
    if method not in EXPERT_SPLIT_METHODS or model.moe is None:
        return NodeShare(count.total, 0, 0, steps=method != "ddp")
    owned_parameters = count.experts * owned // model.moe.num_experts
    return NodeShare(count.total - count.experts, owned_parameters, count.experts - owned_parameters)


@dataclass(frozen=True)
class RoundBytes:
    """What a node sends and receives in a round, names and checksums apart."""

    up: float
    down: float

    def seconds(self, up_bytes_per_second: float, down_bytes_per_second: float) -> float:
        """On the wire, where everybody sends before anybody receives: an update is made of all."""
        return self.up / up_bytes_per_second + self.down / down_bytes_per_second


def round_bytes(node: NodeShare, method: Method, codec: Codec = "fp32", replication: int = 1) -> RoundBytes:
    """Of SPES up b (M_s + m M_e / E) and down b M; of the others b M both ways. SPES+ does not send a node what it
    alone trains."""
    bytes_per_element = BITS_PER_ELEMENT[codec] / 8 + (SCALE_BYTES / CODEC_BLOCK_SIZE if codec in SCALED_CODECS else 0)
    unsent_parameters = node.trained_experts if method == "spes+" and replication == 1 else 0
    return RoundBytes(bytes_per_element * node.trained, bytes_per_element * (node.total - unsent_parameters))


def state_bytes(node: NodeShare, frozen: Codec = "fp32") -> int:
    """Of weights, gradients and moments of AdamW on a node, in fp32; experts that it does not train may rest in fewer
    bits."""
    bytes_per_parameter = WEIGHT_BYTES + GRADIENT_BYTES + (MOMENTS_BYTES if node.steps else 0)
    return bytes_per_parameter * node.trained + encoded_bytes(node.frozen_experts, frozen)


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round on a node, if all nodes are alike."""

    training: float
    wire: float
    """Sending, and then receiving."""
    hidden: float
    """Of that, what runs while the node learns on."""

    @property
    def total(self) -> float:
        """From one exchange to the next."""
        return self.training + self.wire - self.hidden

    @property
    def utilisation(self) -> float:
        """The part of the time in which the node learns."""
        return self.training / self.total


def round_time(
    traffic: RoundBytes,
    up_bytes_per_second: float,
    down_bytes_per_second: float,
    steps: int,
    step_seconds: float,
    delay: int = 0,
) -> RoundTime:
    """Of `steps`, of which a node does `delay` while its update is under way (Streaming DiLoCo, arXiv 2501.18512,
    section 2.3)."""
    wire_seconds = traffic.seconds(up_bytes_per_second, down_bytes_per_second)
    return RoundTime(steps * step_seconds, wire_seconds, min(wire_seconds, delay * step_seconds))
