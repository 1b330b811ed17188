"""Rows of a table: what they state, what they leave open, and what is wrong with them."""

import json
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.kinds import ActivationCheckpointing, AttentionKernel, ScheduleKind
from phalanx.plan.tables.csv_rows import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, read_rows
from phalanx.plan.tables.job_columns import trainer_behaviour
from phalanx.plan.tables.predict import Prediction, PredictionFailure, predict_rows
from phalanx.plan.tables.row_to_job import job_from_row
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, load_model, preset_names
from tests.helpers.published_rows import MEGATRON_22B_ROW


@cache
def predict_row(**changes: str) -> Prediction:
    (found,) = predict_rows([{**MEGATRON_22B_ROW, **changes}])
    assert isinstance(found, Prediction), found
    return found


def test_predict_rows_matches_published_megatron_run():
    found = predict_row()
    assert found.step_time_s == pytest.approx(1.42, rel=0.1)
    assert found.step_time_low_s < found.step_time_s < found.step_time_high_s
    assert found.assumed == []
    assert found.p_oom < 0.01
    assert found.tflops_per_gpu == pytest.approx(found.mfu / 100 * 312)


@pytest.mark.parametrize(
    ("changes", "recomputed_fraction"),
    [
        ({"recompute": "none"}, 0.0),
        ({"recompute": "full"}, 0.328),
        ({"recompute": "selective"}, 0.0173),
        ({"recompute": "selective", "facts": "flash attention"}, 0.0),
    ],
)
def test_predict_rows_hfu_includes_recomputed_flops(changes, recomputed_fraction):
    """Of a forward pass of blocks, 24 h^2 + 4 h s for each token and layer, with the head's 2 h V / L of three times as
    much (arXiv 2205.05198, appendix A): h = 6144, s = 2048, V = 51200, L = 48."""
    found = predict_row(**changes)
    assert found.hfu / found.mfu - 1 == pytest.approx(recomputed_fraction, rel=0.01, abs=1e-9)


def test_predict_rows_ignores_result_columns():
    answers = {
        "step_time_s": "99",
        "tflops_per_gpu": "1",
        "mfu": "1",
        "memory_gib": ">80",
        "notes": "flash ZB-V",
        "source": "DeepSpeed",
    }
    assert predict_row(**answers) == predict_row()
    without = {column: text for column, text in MEGATRON_22B_ROW.items() if column not in answers}
    assert predict_rows([without]) == [predict_row()]


def test_predict_rows_offload_fact_increases_time_and_reduces_memory():
    row = {"tp": "1", "dp": "8", "zero": "3", "micro_batch": "1", "global_batch": "8", "schedule": "FSDP"}
    kept, said, away = (predict_row(**row, facts=facts) for facts in ("", "offload=False", "flash; offload=True"))
    assert kept == said
    assert away.step_time_s > kept.step_time_s
    assert kept.memory_gib - away.memory_gib == pytest.approx(16 * 22e9 / 8 / 2**30, rel=0.03)


def test_predict_rows_corrects_and_reports_inconsistent_degrees():
    assert predict_row(tp="4", dp="3", global_batch="8").assumed == ["dp = 2, which the other degrees leave"]


def test_predict_rows_chooses_and_reports_missing_values():
    found = predict_row(micro_batch="", recompute="", global_batch="16")
    assert found.assumed == ["micro-batch", "recompute"]
    assert found.p_oom < 0.5
    stated = [predict_row(micro_batch=size, recompute="full", global_batch="16") for size in ("1", "2", "4", "8")]
    assert found.step_time_s <= min(row.step_time_s for row in stated if row.p_oom < 0.5)
    width = found.step_time_high_s / found.step_time_s
    assert width > predict_row().step_time_high_s / predict_row().step_time_s


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": ""}, "layers: is needed"),
        ({"layers": "many"}, "layers = 'many': is not a number"),
        ({"gpus": "-8"}, "gpus = '-8': must be above 0"),
        ({"gpu_type": "A1000"}, "gpu_type = 'A1000': is not a known device;  fix: did you mean 'a100'?"),
        ({"gpu_type": "V100"}, "did you mean 'v100-16gb' or 'v100-32gb'?"),
        ({"global_batch": ""}, "global_batch: is needed"),
        ({"kv_heads": "7"}, "kv_heads"),
    ],
)
def test_predict_rows_reports_reason_for_unpredictable_row(changes, reason):
    (found, other) = predict_rows([{**MEGATRON_22B_ROW, **changes}, MEGATRON_22B_ROW])
    assert isinstance(found, PredictionFailure)
    assert reason in found.reason
    assert other == predict_row()
    json.dumps(found.reason)


@settings(max_examples=300, deadline=None)
@given(
    column=st.sampled_from([*MEGATRON_22B_ROW, "experts", "topk", "ep"]),
    text=st.one_of(
        st.sampled_from(["", "0", "-1", "nan", "inf", "1e300", "0.5", "3", "7", "x", "full", "fp8", "\x00", "1,5"]),
        st.text(),
    ),
    other=st.sampled_from(["", "2", "8", "none"]),
)
def test_predict_rows_continues_after_invalid_row(column, text, other):
    """Whatever a cell holds, the row is predicted, or says why not."""
    spoiled = {**MEGATRON_22B_ROW, column: text, "pp": other} if column != "pp" else {**MEGATRON_22B_ROW, column: text}
    found, after = predict_rows([spoiled, MEGATRON_22B_ROW])
    assert after == predict_row()
    if isinstance(found, Prediction):
        assert 0 < found.step_time_low_s < found.step_time_s < found.step_time_high_s < math.inf
        assert 0 <= found.p_oom <= 1
        assert found.memory_gib > 0
    else:
        assert found.reason


def test_read_rows_rejects_invalid_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    path = tmp_path / "table.csv"
    path.write_bytes(b"")
    with pytest.raises(
        UserError, match=f"--batch = .*table.csv': is empty\n  fix: .*needed are {REQUIRED_COLUMNS[0]}, "
    ):
        read_rows(path)
    path.write_text('[model]\npreset = "llama3-8b"\n')
    with pytest.raises(
        UserError, match=f"lacks the columns {', '.join(REQUIRED_COLUMNS)}\n  fix: .*also read are id, model, "
    ):
        read_rows(path)
    path.write_text(",".join(column for column in MEGATRON_22B_ROW if column not in ("tp", "gpu_type")))
    with pytest.raises(UserError, match="lacks the columns gpu_type, tp\n"):
        read_rows(path)


def test_read_rows_pads_short_rows_and_truncates_long_rows(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text(
        "\ufeff" + ",".join(REQUIRED_COLUMNS) + ",id\n" + "2\n" + "1," * len(REQUIRED_COLUMNS) + "b,9\n",
        encoding="utf-8",
    )
    empty = dict.fromkeys(REQUIRED_COLUMNS, "")
    assert read_rows(path) == [{**empty, "layers": "2", "id": ""}, {**dict.fromkeys(REQUIRED_COLUMNS, "1"), "id": "b"}]
    assert all(isinstance(row, PredictionFailure) for row in predict_rows(read_rows(path)))


def test_predict_rows_needs_exactly_the_required_columns():
    assert {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS} == {*MEGATRON_22B_ROW, "experts", "topk", "ep"}
    for column in MEGATRON_22B_ROW:
        (found,) = predict_rows([{name: text for name, text in MEGATRON_22B_ROW.items() if name != column}])
        assert isinstance(found, PredictionFailure) == (column in REQUIRED_COLUMNS), column


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
    """They are slower, and joined in pairs where a row states no links."""
    unstated = {**MEGATRON_22B_ROW, "gpu_type": name, "intra_bw": ""}
    choice, machine = job_from_row(unstated).choices[0], load_machine(preset)
    assert (choice["hbm_bytes_per_second"], choice["fast_link_domain"]) == (machine.hbm_bytes_per_second, 2)
    assert job_from_row({**unstated, "intra_bw": "300"}).choices[0]["fast_link_domain"] == 8
    assert job_from_row({**unstated, "gpu_type": "A100-40GB-PCIe"}).assumed == ["links of a100-40gb"]


def test_job_from_row_has_no_fast_link_domain_for_l40s():
    row = {
        **MEGATRON_22B_ROW,
        "gpu_type": "L40S",
        "intra_bw": "",
        "tp": "1",
        "dp": "8",
        "zero": "3",
        "global_batch": "32",
    }
    (alone,) = job_from_row(row).choices
    assert (alone["fast_link_domain"], alone["shard_group_size"]) == (1, 8)
    sixteen = {**row, "gpus": "16", "dp": "16", "global_batch": "64", "schedule": "HSDP"}
    assert job_from_row(sixteen).choices[0]["shard_group_size"] == 8  # a node's
    assert isinstance(predict_rows([row])[0], Prediction)


def test_job_from_row_counts_mi250x_gcds_as_devices():
    whole, half = (job_from_row({**MEGATRON_22B_ROW, "gpu_type": name}) for name in ("MI250X", "MI250X-GCD"))
    assert whole.choices == half.choices
    assert (whole.assumed, half.assumed) == (["gpus are GCDs, of which an MI250X has two"], [])


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "gpt3-175b", "mixtral-8x7b"])
def test_job_from_row_parameters_match_presets(name):
    """A row with a preset's numbers has the preset's parameters (learned positions are not in tables)."""
    spec = load_model(name)
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
        ("no-pipeline", "1", "", ScheduleKind.NONE),
        ("1f1b", "4", "1", ScheduleKind.ONE_F_ONE_B),
        ("ZB-1p", "4", "1", ScheduleKind.ZB_H1),
        ("ZB-2p*", "4", "1", ScheduleKind.ZB_H2),
        ("ZB-V", "4", "2", ScheduleKind.ZB_V),
        ("interleaved-1f1b", "4", "3", ScheduleKind.INTERLEAVED),
        ("GPipe", "4", "", ScheduleKind.GPIPE),
    ],
)
def test_job_from_row_recognizes_schedule_names(schedule, pp, vpp, order):
    choices = job_from_row({**MEGATRON_22B_ROW, "tp": "2", "pp": pp, "vpp": vpp, "schedule": schedule}).choices
    assert {choice["schedule"] for choice in choices} == {order}


def test_job_from_row_recognizes_recompute_names():
    for said, kind in (("full", 3), ("selective", 1), ("selective-op", 2), ("none", 0)):
        assert [choice["recompute"] for choice in job_from_row({**MEGATRON_22B_ROW, "recompute": said}).choices] == [
            kind
        ]
    older = {ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL}
    assert {choice["recompute"] for choice in job_from_row({**MEGATRON_22B_ROW, "recompute": ""}).choices} == older


def test_trainer_behaviour_follows_trainer_name_and_facts():
    old = trainer_behaviour("1f1b", "fp16", 0, 0)
    assert (old["attention"], old["overlap_grad_reduce"], old["gradient_bytes"], old["fused_elementwise"]) == (
        AttentionKernel.FUSED,
        0,
        2,
        1,
    )
    fsdp = trainer_behaviour("FSDP2; torch.compile", "bf16", 1, 3)
    assert (fsdp["attention"], fsdp["overlap_grad_reduce"], fsdp["parameter_bytes"], fsdp["compiled"]) == (
        AttentionKernel.FLASH_2,
        1,
        4,
        1,
    )
    megatron = trainer_behaviour("interleaved-1f1b; distributed optimizer", "bf16", 1, 1)
    assert (megatron["attention"], megatron["overlap_grad_reduce"], megatron["gradient_bytes"]) == (
        AttentionKernel.FLASH_3,
        1,
        4,
    )
    named = trainer_behaviour("1f1b; attention kernel=torch", "bf16", 0, 1)
    assert (named["attention"], named["fused_elementwise"], named["gathers_logits"]) == (AttentionKernel.SEPARATE, 0, 1)
    assert trainer_behaviour("comm overlap disabled", "bf16", 2, 1)["overlap_grad_reduce"] == 0
    nanotron = trainer_behaviour("1f1b; nanotron", "bf16", 1, 1)
    assert (nanotron["scatter_gather_p2p"], nanotron["overlap_param_gather"]) == (0, 0)
    assert (megatron["scatter_gather_p2p"], megatron["overlap_param_gather"]) == (1, 1)
    assert trainer_behaviour("1f1b (DeepSpeed)", "fp16", 0, 1)["deepspeed"] == 1
    assert trainer_behaviour("1f1b; Megatron-DeepSpeed", "fp16", 0, 1)["deepspeed"] == 0


@pytest.mark.parametrize(
    ("zero", "ranks", "gigabytes"),
    [(0, 1, 120), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.88), (1, 16, 35.6), (3, 4, 30)],
)
def test_predict_rows_matches_zero_paper_for_model_state_only_rows(zero, ranks, gigabytes):
    """ZeRO (arXiv 1910.02054), table 1: 7.5 B parameters."""
    row = {"id": "z", "params_b": "7.5", "dp": str(ranks), "zero": str(zero), "facts": "activations excluded"}
    (found,) = predict_rows([row])
    assert isinstance(found, PredictionFailure)
    assert found.memory_gib == pytest.approx(gigabytes, rel=0.005)
