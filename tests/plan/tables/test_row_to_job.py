"""Jobs from rows of a table: devices, schedules and parameters by their common names."""

from __future__ import annotations

import pytest

from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.tables.row_to_job import job_from_row
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, load_model_spec, preset_names
from tests.helpers.published_rows import L40S_ROW, MEGATRON_22B_ROW


def test_job_from_row_recognizes_device_names():
    for name, memory in (
        ("A100-40GB-SXM", 40),
        ("H200-141GB-SXM", 141),
        ("H100-96GB-HBM2e(500W)", 96),
        ("V100-32GB", 32),
        ("V100-SXM2-32GB", 32),
        ("NVIDIA H100 80GB HBM3", 80),
    ):
        choice = job_from_row({**MEGATRON_22B_ROW, "gpu_type": name}).choices[0]
        assert choice["memory_bytes"] == pytest.approx(memory * 2**30, rel=0.01)
    for preset in preset_names("machines"):
        assert job_from_row({**MEGATRON_22B_ROW, "gpu_type": preset.upper()}).choices[0]["peak_flops"] > 0
    with pytest.raises(UserError, match="known device"):
        job_from_row({**MEGATRON_22B_ROW, "gpu_type": ""})


@pytest.mark.parametrize(("name", "preset"), [("H100-80GB-PCIe", "h100-pcie"), ("A100-80GB-PCIe", "a100-pcie")])
def test_job_from_row_distinguishes_pcie_cards_from_sxm_modules(name, preset):
    """PCIe cards are slower, and joined in pairs if a row has no links."""
    unstated = {**MEGATRON_22B_ROW, "gpu_type": name, "intra_bw": ""}
    choice, machine = job_from_row(unstated).choices[0], load_machine(preset)
    assert (choice["hbm_bytes_per_second"], choice["fast_link_domain"]) == (machine.hbm_bytes_per_second, 2)
    assert job_from_row({**unstated, "intra_bw": "300"}).choices[0]["fast_link_domain"] == 8
    assert job_from_row({**unstated, "gpu_type": "A100-40GB-PCIe"}).assumed == ["links of a100-40gb"]


def test_job_from_row_joins_l40s_of_a_node_by_pcie():
    (choice,) = job_from_row(L40S_ROW).choices
    assert (choice["fast_link_domain"], choice["link_bytes_per_second"], choice["shard_group_size"]) == (8, 31.5e9, 8)
    sixteen = {**L40S_ROW, "gpus": "16", "dp": "16", "global_batch": "64", "schedule": "HSDP"}
    assert job_from_row(sixteen).choices[0]["shard_group_size"] == 8  # shards are within a node


def test_job_from_row_counts_mi250x_gcds_as_devices():
    module, gcd = (job_from_row({**MEGATRON_22B_ROW, "gpu_type": name}) for name in ("MI250X", "MI250X-GCD"))
    assert module.choices == gcd.choices
    assert (module.assumed, gcd.assumed) == (["gpus counts GCDs; an MI250X has two"], [])


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "gpt3-175b", "mixtral-8x7b"])
def test_job_from_row_parameters_match_presets(name):
    """A row with the numbers of a preset has the parameters of the preset, without learned positions."""
    spec = load_model_spec(name)
    count = count_parameters(spec).total
    experts = {"experts": str(spec.moe.num_experts), "topk": str(spec.moe.top_k)} if spec.moe else {}
    row = {
        **MEGATRON_22B_ROW,
        "model": name,
        "params_b": str(count / 1e9),
        "layers": str(spec.num_layers),
        "hidden": str(spec.hidden_size),
        "heads": str(spec.num_heads),
        "kv_heads": str(spec.num_kv_heads),
        "vocab": str(spec.vocab_size),
        "ffn": str(spec.moe.expert_ffn_size if spec.moe else spec.ffn_hidden_size),
        **experts,
    }
    assert job_from_row(row).choices[0]["parameters"] == pytest.approx(count, rel=0.003)


def test_job_from_row_recognizes_deepseek_v3_by_name():
    """DeepSeek-V3: 671 B parameters (arXiv 2412.19437)."""
    row = {
        **MEGATRON_22B_ROW,
        "model": "deepseek-v3",
        "params_b": "671",
        "layers": "61",
        "hidden": "7168",
        "heads": "128",
        "kv_heads": "128",
        "ffn": "18432",
        "vocab": "129280",
        "experts": "256",
        "topk": "8",
        "tp": "1",
        "ep": "8",
        "dp": "8",
    }
    assert job_from_row(row).choices[0]["parameters"] == pytest.approx(671e9, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "order"),
    [
        ("no-pipeline", "1", "", "none"),
        ("1f1b", "4", "1", "1f1b"),
        ("ZB-1p", "4", "1", "zb-h1"),
        ("ZB-2p*", "4", "1", "zb-h2"),
        ("ZB-V", "4", "2", "zb-v"),
        ("interleaved-1f1b", "4", "3", "interleaved"),
        ("GPipe", "4", "", "gpipe"),
    ],
)
def test_job_from_row_recognizes_schedule_names(schedule, pp, vpp, order):
    choices = job_from_row({**MEGATRON_22B_ROW, "tp": "2", "pp": pp, "vpp": vpp, "schedule": schedule}).choices
    assert {choice["schedule"] for choice in choices} == {order}


def test_job_from_row_recognizes_recompute_names():
    methods = {"full": "full", "selective": "attention core", "selective-op": "operations", "none": "none"}
    for text, method in methods.items():
        (choice,) = job_from_row({**MEGATRON_22B_ROW, "recompute": text}).choices
        assert choice["recompute"] == method
    older = {"none", "attention core", "full"}
    assert {choice["recompute"] for choice in job_from_row({**MEGATRON_22B_ROW, "recompute": ""}).choices} == older
