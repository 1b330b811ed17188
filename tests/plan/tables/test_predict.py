"""Rows of a table: stated values, missing values and errors."""

import json
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.tables.csv_rows import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, read_rows
from phalanx.plan.tables.predict import Prediction, PredictionFailure, predict_rows
from tests.helpers.published_rows import L40S_ROW, MEGATRON_22B_ROW


@cache
def predict_row(**changes: str) -> Prediction:
    (prediction,) = predict_rows([{**MEGATRON_22B_ROW, **changes}])
    assert isinstance(prediction, Prediction), prediction
    return prediction


def test_predict_rows_matches_published_megatron_run():
    prediction = predict_row()
    assert prediction.step_time_s == pytest.approx(1.42, rel=0.1)
    assert prediction.step_time_low_s < prediction.step_time_s < prediction.step_time_high_s
    assert prediction.assumed == []
    assert prediction.p_oom < 0.01
    assert prediction.tflops_per_gpu == pytest.approx(prediction.mfu / 100 * 312)


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
    """Recomputation repeats the forward pass of blocks: 24 h^2 + 4 h s per token and layer. The model has three
    times this, and the head 2 h V / L (arXiv 2205.05198, appendix A): h = 6144, s = 2048, V = 51200, L = 48."""
    prediction = predict_row(**changes)
    assert prediction.hfu / prediction.mfu - 1 == pytest.approx(recomputed_fraction, rel=0.01, abs=1e-9)


def test_predict_rows_ignores_result_columns():
    results = {
        "step_time_s": "99",
        "tflops_per_gpu": "1",
        "mfu": "1",
        "memory_gib": ">80",
        "notes": "flash ZB-V",
        "source": "DeepSpeed",
    }
    assert predict_row(**results) == predict_row()
    row_without_results = {column: text for column, text in MEGATRON_22B_ROW.items() if column not in results}
    assert predict_rows([row_without_results]) == [predict_row()]


def test_predict_rows_offload_fact_increases_time_and_reduces_memory():
    row = {"tp": "1", "dp": "8", "zero": "3", "micro_batch": "1", "global_batch": "8", "schedule": "FSDP"}
    unstated, stated_off, offloaded = (
        predict_row(**row, facts=facts) for facts in ("", "offload=False", "flash; offload=True")
    )
    assert unstated == stated_off
    assert offloaded.step_time_s > unstated.step_time_s
    assert unstated.memory_gib - offloaded.memory_gib == pytest.approx(16 * 22e9 / 8 / 2**30, rel=0.03)


def test_predict_rows_corrects_and_reports_inconsistent_degrees():
    assert predict_row(tp="4", dp="3", global_batch="8").assumed == ["dp = 2, from the other degrees"]


def test_predict_rows_chooses_and_reports_missing_values():
    prediction = predict_row(micro_batch="", recompute="", global_batch="16")
    assert prediction.assumed == ["micro-batch", "recompute"]
    assert prediction.p_oom < 0.5
    complete = [predict_row(micro_batch=size, recompute="full", global_batch="16") for size in ("1", "2", "4", "8")]
    assert prediction.step_time_s <= min(row.step_time_s for row in complete if row.p_oom < 0.5)
    width = prediction.step_time_high_s / prediction.step_time_s
    assert width > predict_row().step_time_high_s / predict_row().step_time_s


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": ""}, "layers is required"),
        ({"layers": "many"}, "layers = 'many' is not a number"),
        ({"gpus": "-8"}, "gpus = '-8' must be above 0"),
        ({"gpu_type": "A1000"}, "gpu_type = 'A1000' is not a known device;  fix: did you mean 'a100'?"),
        ({"gpu_type": "V100"}, "did you mean 'v100-16gb' or 'v100-32gb'?"),
        ({"global_batch": ""}, "global_batch is required"),
        ({"kv_heads": "7"}, "kv_heads"),
    ],
)
def test_predict_rows_reports_reason_for_unpredictable_row(changes, reason):
    (prediction, valid) = predict_rows([{**MEGATRON_22B_ROW, **changes}, MEGATRON_22B_ROW])
    assert isinstance(prediction, PredictionFailure)
    assert reason in prediction.reason
    assert valid == predict_row()
    json.dumps(prediction.reason)


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
    """For any content of a cell, the row has a prediction or an error."""
    spoiled = {**MEGATRON_22B_ROW, column: text, "pp": other} if column != "pp" else {**MEGATRON_22B_ROW, column: text}
    prediction, next_prediction = predict_rows([spoiled, MEGATRON_22B_ROW])
    assert next_prediction == predict_row()
    if isinstance(prediction, Prediction):
        assert 0 < prediction.step_time_low_s < prediction.step_time_s < prediction.step_time_high_s < math.inf
        assert 0 <= prediction.p_oom <= 1
        assert prediction.memory_gib > 0
    else:
        assert prediction.reason


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
        (prediction,) = predict_rows([{name: text for name, text in MEGATRON_22B_ROW.items() if name != column}])
        assert isinstance(prediction, PredictionFailure) == (column in REQUIRED_COLUMNS), column


@pytest.mark.parametrize(
    ("zero", "ranks", "gigabytes"),
    [(0, 1, 120), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.88), (1, 16, 35.6), (3, 4, 30)],
)
def test_predict_rows_matches_zero_paper_for_model_state_only_rows(zero, ranks, gigabytes):
    """ZeRO (arXiv 1910.02054), table 1: 7.5 B parameters."""
    row = {"id": "z", "params_b": "7.5", "dp": str(ranks), "zero": str(zero), "facts": "activations excluded"}
    (prediction,) = predict_rows([row])
    assert isinstance(prediction, PredictionFailure)
    assert prediction.memory_gib == pytest.approx(gigabytes, rel=0.005)


def test_predict_rows_predicts_devices_without_fast_links():
    (prediction,) = predict_rows([L40S_ROW])
    assert isinstance(prediction, Prediction)
