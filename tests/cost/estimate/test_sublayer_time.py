"""Low-rank adapters: their time is that of memory accesses, and steps with them are as much faster as measured."""

import numpy as np
import pytest

import phalanx
from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.estimate.kernel_time import memory_pass_seconds
from phalanx.cost.estimate.step_time import layer_seconds
from phalanx.cost.estimate.sublayer_time import adapter_times
from phalanx.plan.tables.job_columns import model_columns
from phalanx.spec.files.load import load_model_spec, run_from_table
from phalanx.spec.tuning import AdapterSpec, TuningSpec
from tests.helpers.job_tables import make_job_row, make_job_table

TIME_CONSTANTS = time_constants()
LLAMA = load_model_spec("llama3-8b")
QUERIES_AND_VALUES = ("wq", "wv")


def adapted_row(targets="linear", tokens=4096, **options):
    adapter = AdapterSpec(rank=16, alpha=32.0, targets=targets, **options)
    spec = LLAMA.model_copy(update={"tuning": TuningSpec(adapter=adapter)})
    return make_job_row(**model_columns(spec, tokens), compiled=0)


def total_seconds(row):
    times = adapter_times(TIME_CONSTANTS, make_job_table(row))
    return float((times.forward + times.input_grad + times.weight_grad)[0])


def test_adapters_take_the_time_of_six_passes_over_inputs_and_outputs():
    """A reads x, B writes the output, which is added (3 passes); backward, both gradients of products with A and B read
    or write each once, and the gradient of x is added (3 passes)."""
    row = adapted_row()
    inputs = 6 * 4096 + 14336
    outputs = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    assert (row["adapted_products"], row["adapted_inputs"], row["adapted_outputs"]) == (7, inputs, outputs)
    passes = memory_pass_seconds(TIME_CONSTANTS, make_job_table(row), np.array([2.0 * 4096 * 6 * (inputs + outputs)]))
    assert total_seconds(row) == pytest.approx(float(passes[0]), rel=0.25)
    assert total_seconds(adapted_row(QUERIES_AND_VALUES)) < total_seconds(row) / 4
    assert total_seconds(adapted_row(dora=True)) > total_seconds(row) * 1.2
    assert total_seconds(make_job_row()) == 0


def test_frozen_head_and_products_have_no_weight_gradients():
    full, adapted = make_job_row(), adapted_row(QUERIES_AND_VALUES)
    assert (full["weight_gradient_share"], adapted["weight_gradient_share"]) == (1, 0)
    heads = layer_seconds(TIME_CONSTANTS, make_job_table(full, adapted)).head.forward_backward
    assert heads[1] < 0.75 * heads[0]


def test_lora_on_a_cpu_is_as_much_faster_than_full_tuning_as_measured():
    """Measured: 987 and 1,053 tokens per second (docs/results/benchmarks/tuning.md)."""
    sizes = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2}
    table = {
        "model": {**sizes, "ffn_hidden_size": 1024, "max_seq_len": 1024},
        "training": {"seq_len": 1024, "tokens_per_step": 2048, "precision": "fp32"},
        "layout": {"micro_batch_size": 2},
        "cluster": {"preset": "cpu", "nodes": 1},
    }
    full, lora = (
        phalanx.predict(run, 1, run.layout).step_seconds
        for run in map(run_from_table, (table, {**table, "adapter": {"rank": 16, "alpha": 32.0}}))
    )
    assert full / lora == pytest.approx(1053 / 987, abs=0.03)
