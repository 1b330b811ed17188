"""The result of a round: means, updates of expert owners, and the weights that all nodes receive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.cost.exact.swarm import encoded_bytes, node_share, round_bytes
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.swarm import Codec
from phalanx.swarm.aggregation.aggregate import (
    AggregationConfig,
    ModelState,
    NodeUpdate,
    aggregate,
    encode_broadcast,
    robust_mean,
)
from phalanx.swarm.aggregation.expert_merging import merge_experts
from phalanx.swarm.aggregation.outer_optimizer import OuterSGD
from phalanx.swarm.expert_ownership import Owners, assign_experts, experts_of
from phalanx.swarm.pieces import ModelPiece, model_pieces, pieces_sent_by
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Feedback, decode_piece, write_update
from tests.helpers.quantization import quantization_error_bound
from tests.helpers.tiny_models import TINY_MOE

NODES = ("a", "b", "c", "d")
ITEMS = model_pieces(TINY_MOE)
EXPERTS = [item for item in ITEMS if item.expert is not None]
SHARED = [item for item in ITEMS if item.expert is None]


def random_weights(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {item.key: scale * torch.randn(item.shape, generator=generator) for item in ITEMS}


class AggregationHarness:
    """The files of a round: the coordinator's state, and updates of nodes with random weights."""

    def __init__(self, folder: Path, codec: Codec = "fp32", owners: Owners | None = None, **rules: Any) -> None:
        self.folder, self.rules, self.owners = folder, AggregationConfig(codec=codec, **rules), owners
        self.state = self.new_state("0")
        self.base = random_weights(0)
        for item in ITEMS:
            self.state.base.write(item, self.base[item.key])
        self.feedback: dict[str, Feedback] = {node: {} for node in NODES}
        self.number = 0

    def new_state(self, name: str) -> ModelState:
        def file(kind: str) -> TensorFile:
            return TensorFile.create(self.folder / f"{kind}-{name}", parameter_shapes(TINY_MOE))

        outer = not self.rules.outer.is_plain_mean
        return ModelState(base=file("base"), error_feedback=file("left"), velocity=file("velocity") if outer else None)

    def send_update(self, node: str, weights: dict[str, Tensor], tokens: int = 100) -> NodeUpdate:
        items = pieces_sent_by(ITEMS, self.owners, node)
        path = self.folder / f"{node}-{self.number}"
        file = write_update(
            path, items, self.rules.codec, lambda item: weights[item.key], self.state.base.read, self.feedback[node]
        )
        return NodeUpdate(node, tokens, file)

    def run_round(self, updates: list[NodeUpdate]) -> tuple[dict[str, str], TensorFile]:
        self.number += 1
        new = self.new_state(str(self.number))
        piece_senders = aggregate(ITEMS, updates, self.rules, self.state, new)
        shapes = {
            item.key: (encoded_bytes(item.num_elements, self.rules.codec),)
            for item in ITEMS
            if item.key in piece_senders
        }
        down = TensorFile.create(self.folder / f"down-{self.number}", shapes, "U8")
        encode_broadcast(ITEMS, updates, piece_senders, self.rules.codec, self.state, new, down)
        self.before, self.state = self.state, new
        return piece_senders, down

    def decode_received(self, down: TensorFile, item: ModelPiece) -> Tensor:
        """Return the weights that a node decodes from the broadcast."""
        return decode_piece(item, down.raw(item.key), self.rules.codec, self.before.base.read)


def even_owners() -> Owners:
    return assign_experts(8, dict.fromkeys(NODES, 1.0))


CODECS: list[Codec] = ["fp32", "bf16", "int8", "int4"]


@pytest.mark.parametrize("codec", CODECS)
def test_aggregate_gives_coordinator_and_nodes_equal_weights(tmp_path, codec):
    """A node with the only update of a piece has the same weights bit for bit, although the piece is not sent to it."""
    swarm = AggregationHarness(tmp_path, codec, even_owners())
    for seed in (1, 5):
        updates = [swarm.send_update(node, random_weights(seed + index)) for index, node in enumerate(NODES)]
        piece_senders, down = swarm.run_round(updates)
        for item in ITEMS:
            assert torch.equal(swarm.decode_received(down, item), swarm.state.base.read(item))
            if sender := piece_senders[item.key]:
                file = next(update.file for update in updates if update.node == sender)
                sender_weights = decode_piece(item, file.raw(item.key), codec, swarm.before.base.read)
                assert torch.equal(sender_weights, swarm.state.base.read(item))


def test_aggregate_averages_shared_parameters_and_copies_owners_experts(tmp_path):
    swarm = AggregationHarness(tmp_path, "fp32", even_owners())
    weights = [random_weights(seed) for seed in range(1, 5)]
    swarm.run_round([swarm.send_update(node, node_weights) for node, node_weights in zip(NODES, weights, strict=True)])
    for item in SHARED:
        mean = torch.stack([node_weights[item.key].double() for node_weights in weights]).mean(0).float()
        assert torch.equal(swarm.state.base.read(item), mean)
    for item in EXPERTS:
        assert torch.equal(swarm.state.base.read(item), weights[item.expert // 2][item.key])


@pytest.mark.parametrize("codec", CODECS)
def test_update_and_broadcast_sizes_match_round_bytes_formula(tmp_path, codec):
    """Without headers, fp32 has 660,736 bytes up and 1,840,384 down."""
    swarm = AggregationHarness(tmp_path, codec, even_owners())
    updates = [swarm.send_update(node, random_weights(1)) for node in NODES]
    _, down = swarm.run_round(updates)
    expected, node = round_bytes(node_share(TINY_MOE, "spes", 2), "spes", codec), node_share(TINY_MOE, "spes", 2)
    sizes = [sum(update.file.locate(key)[1] for key in update.file.shapes) for update in updates]
    own_bytes = sum(
        down.locate(item.key)[1] for item in pieces_sent_by(ITEMS, swarm.owners, "a") if item.expert is not None
    )
    broadcast_bytes = sum(down.locate(key)[1] for key in down.shapes)
    if codec == "fp32":
        assert (sizes, broadcast_bytes) == ([660_736] * 4, 1_840_384)
    # The last block of a tensor may be short, and has a scale of its own.
    assert sizes == [pytest.approx(expected.up, rel=2e-3)] * 4
    assert broadcast_bytes == pytest.approx(expected.down, rel=2e-3)
    assert broadcast_bytes - own_bytes == pytest.approx(round_bytes(node, "spes+", codec).down, rel=2e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_aggregate_is_independent_of_update_order(tmp_path, codec):
    results = []
    for order in (NODES, NODES[::-1], ("c", "a", "d", "b")):
        (tmp_path / "".join(order)).mkdir()
        swarm = AggregationHarness(tmp_path / "".join(order), codec, even_owners())
        updates = {node: swarm.send_update(node, random_weights(index)) for index, node in enumerate(NODES)}
        swarm.run_round([updates[node] for node in order])
        results.append([swarm.state.base.read(item) for item in ITEMS])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_aggregate_returns_single_node_fp32_update_unchanged(tmp_path):
    swarm, weights = AggregationHarness(tmp_path), random_weights(1)
    _, down = swarm.run_round([swarm.send_update("a", weights)])
    assert all(torch.equal(swarm.decode_received(down, item), weights[item.key]) for item in ITEMS)


def test_robust_mean_weights_updates_by_token_count():
    values = [torch.tensor([1.0]), torch.tensor([5.0])]
    assert robust_mean(values, [300, 100], "none") == 2


def test_aggregate_excludes_missing_node_and_leaves_its_experts_unchanged(tmp_path):
    """The mean is over the nodes that sent an update; experts of the missing node stay, and are not sent."""
    swarm = AggregationHarness(tmp_path, "fp32", even_owners())
    weights = [random_weights(seed) for seed in range(1, 4)]
    piece_senders, down = swarm.run_round(
        [swarm.send_update(node, node_weights) for node, node_weights in zip(NODES, weights, strict=False)]
    )
    first = SHARED[0]
    mean = torch.stack([node_weights[first.key].double() for node_weights in weights]).mean(0).float()
    torch.testing.assert_close(swarm.state.base.read(first), mean, rtol=1e-6, atol=1e-7)
    lost_experts = [item for item in EXPERTS if item.expert in experts_of(even_owners(), "d")]
    assert lost_experts
    for item in lost_experts:
        assert torch.equal(swarm.state.base.read(item), swarm.base[item.key])
        assert item.key not in piece_senders
        assert item.key not in down.shapes


def test_aggregate_averages_experts_with_two_owners(tmp_path):
    swarm = AggregationHarness(tmp_path, "fp32", assign_experts(8, dict.fromkeys(NODES, 1.0), 2))
    weights = dict(zip(NODES, map(random_weights, range(1, 5)), strict=True))
    piece_senders, _ = swarm.run_round([swarm.send_update(node, weights[node]) for node in NODES])
    for item in EXPERTS:
        holders = swarm.owners[item.expert]
        mean = torch.stack([weights[node][item.key].double() for node in holders]).mean(0).float()
        assert torch.equal(swarm.state.base.read(item), mean)
        assert not piece_senders[item.key]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_aggregate_error_feedback_bounds_quantization_error_over_rounds(tmp_path, codec):
    """Each node starts every round from the common weights and takes a fixed step: they move by the mean step per
    round, up to the errors of the last encodings of updates and broadcast."""
    swarm, rounds = AggregationHarness(tmp_path, codec, even_owners()), 12
    steps = dict(zip(NODES, map(random_weights, range(1, 5)), strict=True))
    for _ in range(rounds):
        base = {item.key: swarm.state.base.read(item) for item in ITEMS}
        updates = [
            swarm.send_update(node, {key: base[key] + step for key, step in steps[node].items()}) for node in NODES
        ]
        piece_senders, down = swarm.run_round(updates)
    for item in ITEMS:
        piece_updates = [update for update in updates if item.key in update.file.shapes]
        mean = torch.stack([steps[update.node][item.key] for update in piece_updates]).mean(0)
        error = (swarm.state.base.read(item) - swarm.base[item.key] - rounds * mean).abs()
        bound = torch.stack(
            [quantization_error_bound(update.file.raw(item.key), item, codec) for update in piece_updates]
        ).mean(0)
        if not piece_senders[item.key]:
            bound += quantization_error_bound(down.raw(item.key), item, codec)
        assert (error <= bound + 1e-4).all()  # rounding of sums in fp32


def test_aggregate_with_outer_optimizer_matches_torch_sgd(tmp_path):
    outer = OuterSGD(0.7, 0.9)
    swarm = AggregationHarness(tmp_path, "fp32", outer=outer)
    theta = {key: torch.nn.Parameter(value.clone()) for key, value in swarm.base.items()}
    reference = torch.optim.SGD(theta.values(), lr=0.7, momentum=0.9, nesterov=True)
    for seed in range(1, 4):
        weights = [random_weights(10 * seed + index) for index in range(4)]
        swarm.run_round(
            [swarm.send_update(node, node_weights) for node, node_weights in zip(NODES, weights, strict=True)]
        )
        for key, parameter in theta.items():
            parameter.grad = (
                parameter.detach()
                - torch.stack([node_weights[key].double() for node_weights in weights]).mean(0).float()
            )
        reference.step()
        for item in ITEMS:
            torch.testing.assert_close(swarm.state.base.read(item), theta[item.key].detach())


def test_aggregate_applies_expert_merging_to_owners_updates(tmp_path):
    swarm = AggregationHarness(tmp_path, "fp32", even_owners(), merge_alpha=0.05, merge_nearest=4)
    weights = [random_weights(seed) for seed in range(1, 5)]
    piece_senders, _ = swarm.run_round(
        [swarm.send_update(node, node_weights) for node, node_weights in zip(NODES, weights, strict=True)]
    )
    for layer in range(2):
        names = {kind: f"blocks.{layer}.mlp.experts.{kind}" for kind in ("gate", "up", "down")}
        stacked = {
            kind: torch.stack([weights[expert // 2][f"{name}[{expert}]"] for expert in range(8)])
            for kind, name in names.items()
        }
        merge_experts(stacked, 0.05, 4)
        for kind, name in names.items():
            for expert in range(8):
                item = next(item for item in EXPERTS if item.key == f"{name}[{expert}]")
                assert torch.equal(swarm.state.base.read(item), stacked[kind][expert])
                assert not piece_senders[item.key]  # its owner receives it too


@pytest.mark.parametrize("outlier", [1e30, -1e6, float("nan")])
def test_robust_mean_trimmed_stays_within_range_of_honest_updates(outlier):
    honest = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    mean = robust_mean([*honest, torch.full((50,), outlier)], [1] * 5, "trimmed")
    stacked = torch.stack(honest)
    assert (mean >= stacked.min(0).values).all()
    assert (mean <= stacked.max(0).values).all()


def test_robust_mean_trimmed_equals_plain_mean_of_two_updates():
    assert robust_mean([torch.zeros(1), torch.ones(1)], [1, 1], "trimmed") == 0.5
