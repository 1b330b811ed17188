"""Bytes and memory of training over slow links, compared with published models and a tiny hand-counted model."""

import pytest

from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import RoundBytes, encoded_bytes, node_share, round_bytes, state_bytes
from phalanx.spec.files.load import load_model_spec
from tests.helpers.tiny_models import TINY_MOE


def both_ways(traffic: RoundBytes) -> float:
    return traffic.up + traffic.down


def test_swarm_bytes_match_hand_count_of_tiny_model():
    """66,880 shared parameters and 98,304 own ones of 460,096, with four bytes each."""
    diloco_share, spes_share = node_share(TINY_MOE, "diloco"), node_share(TINY_MOE, "spes", 2)
    assert (spes_share.shared, spes_share.trained_experts, spes_share.total) == (66_880, 98_304, 460_096)
    assert round_bytes(spes_share, "spes").up == 660_736
    assert round_bytes(diloco_share, "diloco").up == round_bytes(spes_share, "spes").down == 1_840_384
    ratio = both_ways(round_bytes(spes_share, "spes")) / both_ways(round_bytes(diloco_share, "diloco"))
    assert ratio == pytest.approx(0.6795, abs=5e-5)
    assert (state_bytes(spes_share), state_bytes(diloco_share)) == (3_822_592, 7_361_536)
    stepped_elsewhere = node_share(TINY_MOE, "ddp")  # the node has weights and gradients only
    assert (both_ways(round_bytes(stepped_elsewhere, "ddp")), state_bytes(stepped_elsewhere)) == (3_680_768, 3_680_768)


@pytest.mark.parametrize(
    ("name", "total", "experts", "saved"),
    [
        ("spes-1b", 1_167_423_744, 905_969_664, 0.291),
        ("spes-7b", 7_333_287_936, 6_442_450_944, 0.3294),
        ("spes-9b", 9_430_950_912, 8_455_716_864, 0.3362),
    ],
)
def test_spes_round_bytes_save_published_share_of_diloco(name, total, experts, saved):
    """Among four nodes, SPES saves a third of DiLoCo's traffic in both directions, and two thirds of its uploads."""
    model = load_model_spec(name)
    assert (count_parameters(model).total, count_parameters(model).experts) == (total, experts)
    assert model.moe is not None
    spes, diloco = (
        round_bytes(node_share(model, method, model.moe.num_experts // 4), method) for method in ("spes", "diloco")
    )
    assert 1 - both_ways(spes) / both_ways(diloco) == pytest.approx(saved, abs=5e-5)
    assert 1 - spes.up / diloco.up == pytest.approx(2 * (1 - both_ways(spes) / both_ways(diloco)))


@pytest.mark.parametrize(
    ("codec", "method", "gigabytes"),
    [
        ("fp32", "diloco", 58.67),
        ("fp32", "spes", 39.34),
        ("bf16", "spes+", 16.45),
        ("int8", "spes+", 8.35),
        ("int4", "spes+", 4.24),
    ],
)
def test_swarm_round_bytes_match_published_figures_of_spes_7b(codec, method, gigabytes):
    traffic = round_bytes(node_share(load_model_spec("spes-7b"), method, 8), method, codec)
    assert both_ways(traffic) / 1e9 == pytest.approx(gigabytes, abs=0.006)


@pytest.mark.parametrize(
    ("name", "trained_experts", "diloco", "spes", "bf16", "int8"),
    [
        ("spes-1b", 4, 18.7, 10.5, 9.2, 8.5),
        ("spes-7b", 8, 117.3, 59.4, 49.7, 45.0),
        ("spes-9b", 2, 150.9, 74.8, 62.1, 56.0),
    ],
)
def test_swarm_state_bytes_match_published_models(name, trained_experts, diloco, spes, bf16, int8):
    """GB per node. The source counts 3 % for the scales of int8, which have 1.6 %."""
    model = load_model_spec(name)
    node = node_share(model, "spes", trained_experts)
    node_states = (
        state_bytes(node_share(model, "diloco")),
        *(state_bytes(node, frozen) for frozen in ("fp32", "bf16", "int8")),
    )
    assert [node_bytes / 1e9 for node_bytes in node_states] == pytest.approx([diloco, spes, bf16, int8], abs=0.14)


def test_dense_model_has_no_trained_experts():
    dense = TINY_MOE.replace(moe=None)
    assert node_share(dense, "spes", 2).trained_experts == 0


def test_swarm_round_downloads_replicated_experts():
    node = node_share(TINY_MOE, "spes+", 4)
    one_copy, two_copies = (round_bytes(node, "spes+", "fp32", copies) for copies in (1, 2))
    assert (one_copy.down, two_copies.down) == (4 * (node.total - node.trained_experts), 4 * node.total)


def test_encoded_bytes_match_codec():
    assert [encoded_bytes(257, codec) for codec in ("fp32", "bf16", "int8", "int4")] == [1028, 514, 265, 137]
    assert encoded_bytes(0, "int8") == 0


def test_swarm_round_seconds_follow_upload_and_download_bandwidth():
    traffic = round_bytes(node_share(TINY_MOE, "spes", 2), "spes")
    assert traffic.seconds(100, 1000) == pytest.approx(6607.36 + 1840.384)
