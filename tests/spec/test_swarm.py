"""Valid descriptions of a swarm, and errors that name the invalid field."""

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec

MODEL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 128,
    "max_seq_len": 64,
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 128},
}


def swarm_run(swarm: dict[str, object], **sections: object) -> RunSpec:
    training = {"steps": 200, "seq_len": 64, "tokens_per_step": 1024}
    return run_from_table({"model": MODEL, "training": training, "swarm": swarm, **sections})


def test_swarm_spec_methods_default_to_published_settings():
    specs = {method: swarm_run({"method": method}).swarm for method in ("fedavg", "diloco", "spes", "spes+")}
    assert [swarm.effective_codec for swarm in specs.values()] == ["fp32", "fp32", "fp32", "int8"]
    outers = [(swarm.outer_optimizer.learning_rate, swarm.outer_optimizer.momentum) for swarm in specs.values()]
    assert outers == [(1.0, 0.0), (0.7, 0.9), (1.0, 0.0), (1.0, 0.0)]


def test_balance_spec_ratio_rises_linearly_to_one():
    """SPES decays its auxiliary loss: the ratio rises from 0.7 to 1 in the first 20 % of 1000 steps."""
    balance = swarm_run({"balance": {"local_expert_weight": 0.7}}).swarm.balance
    ratios = [balance.ratio(step, 1000) for step in (0, 50, 100, 199, 200, 999)]
    assert ratios == pytest.approx([0.7, 0.775, 0.85, 0.9985, 1.0, 1.0])
    assert ratios[-2:] == [1.0, 1.0]
    assert swarm_run({}).swarm.balance.ratio(0, 1000) == 1.0


@pytest.mark.parametrize(
    ("swarm", "other_tables", "message"),
    [
        ({"fragments": 3}, {}, r"swarm\.fragments = 3 does not divide swarm.every \(100\)"),
        ({}, {"training": {"precision": "fp8"}}, r"training\.precision = 'fp8' is not supported in a swarm"),
        ({"delay": 100}, {}, r"swarm\.delay = 100 must be less than the 100 steps"),
        ({"delay": 50, "fragments": 2}, {}, r"swarm\.delay = 50 must be less than the 50 steps"),
        ({"mixing": 0.5}, {}, r"swarm\.mixing = 0\.5 cannot be combined with swarm.delay = 0"),
        ({"merge": {"every": 150}}, {}, r"merge\.every = 150 is not a multiple of swarm.every \(100\)"),
        ({"method": "diloco", "replication": 2}, {}, "replication.*cannot be combined with diloco"),
        ({"method": "fedavg", "frozen_expert_codec": "bf16"}, {}, "frozen.*cannot be combined with fedavg"),
        (
            {"method": "diloco", "balance": {"local_expert_weight": 0.7}},
            {},
            "balance.local_expert_weight.*cannot be combined with diloco",
        ),
        ({"method": "ddp"}, {}, r"swarm\.every = 100 must be 1 for ddp, which exchanges gradients after every step"),
        ({"method": "ddp", "every": 1, "outer": {}}, {}, "outer.*cannot be combined with ddp"),
        ({"method": "ddp", "every": 1, "delay": 1}, {}, r"swarm\.delay = 1 must be less than the 1 steps"),
        ({"method": "ddp", "every": 1, "fragments": 2}, {}, r"swarm\.fragments = 2 does not divide swarm.every \(1\)"),
        ({"method": "ddp", "every": 1, "merge": {"every": 1}}, {}, "merge.every.*cannot be combined with ddp"),
        ({"method": "ddp", "every": 1}, {"optimizer": {"name": "muon"}}, r"optimizer\.name = 'muon' .* runs AdamW"),
        ({"every": 30}, {}, r"training\.steps = 200 is not a multiple of the 30 steps of a round\n.*use 210"),
        (
            {},
            {"layout": {"ep": 2, "data_parallel": "zero3"}},
            r"layout\.data_parallel = 'zero3' cannot be combined with layout\.ep = 2",
        ),
        ({}, {"layout": {"data_parallel": "parameter_server"}}, "is not supported inside a node"),
        ({}, {"model": {**MODEL, "moe": None}}, "distributes experts over nodes, but the model has no experts"),
        ({}, {"model": {**MODEL, "moe": {**MODEL["moe"], "bias_update_rate": 0.1}}}, "bias_update_rate = 0.1"),
        ({}, {"model": {**MODEL, "moe": {**MODEL["moe"], "choice_bias": True}}}, "choice_bias = True"),
        ({"methd": "spes"}, {}, "did you mean 'method'"),
    ],
)
def test_swarm_spec_rejects_invalid_combinations(swarm, other_tables, message):
    with pytest.raises(UserError, match=message):
        swarm_run(swarm, **other_tables)


def test_swarm_spec_accepts_dense_model_for_diloco():
    assert swarm_run({"method": "diloco"}, model={**MODEL, "moe": None}).swarm.method == "diloco"
    assert swarm_run({"method": "diloco"}, layout={"tp": 2}).swarm.method == "diloco"
