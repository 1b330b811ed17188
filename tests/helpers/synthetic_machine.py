"""Machine with known constants, and the durations of runs on it."""

from __future__ import annotations

from dataclasses import replace

from phalanx.plan.calibrate.calibrate import predict_run
from phalanx.plan.calibrate.measured_run import MeasuredRun
from phalanx.spec.cluster import CalibrationSpec
from phalanx.spec.files.load import load_machine, run_from_table
from phalanx.spec.run import RunSpec

TRUE_CONSTANTS = {
    "gemm_0": 0.6,
    "hbm_0": 0.3,
    "link": 0.1,
    "overlap": 0.4,
    "optimizer_passes": 30.0,
    "step_seconds": 0.02,
}
"""Constants of a synthetic machine."""
MACHINE = load_machine("cpu").model_copy(update={"cores": 2})
TRUE_PROCESS_BYTES, TRUE_MEMORY_SHARE, TRUE_BUFFER_SHARE = 400 * 2**20, 1.1, 0.7
SYNTHETIC_MACHINE = MACHINE.model_copy(
    update={
        "calibration": CalibrationSpec(
            runs=1,
            precision="fp32",
            time_constants=TRUE_CONSTANTS,
            identified_constants=[],
            log_half_width=0.1,
            baseline_process_bytes=TRUE_PROCESS_BYTES,
            bytes_per_counted_byte=TRUE_MEMORY_SHARE,
            buffer_overhead=TRUE_BUFFER_SHARE,
        )
    }
)


def make_run(ranks: int, precision: str = "fp32", **layout: object) -> RunSpec:
    model = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_layers": 8,
        "num_heads": 8,
        "ffn_hidden_size": 768,
        "max_seq_len": 256,
    }
    training = {"seq_len": 256, "tokens_per_step": 4096, "precision": precision}
    return run_from_table(
        {"model": model, "training": training, "layout": layout, "cluster": {"nproc_per_node": ranks}}
    )


def synthesize_measured_run(ranks: int, **layout: object) -> MeasuredRun:
    """Return a measured run as the planner's formulas predict it with the synthetic constants."""
    blank = MeasuredRun(
        name=str(layout),
        run=make_run(ranks, **layout),
        ranks=ranks,
        step_seconds=1.0,
        memory_bytes=1.0,
        peak_flops=None,
    )
    seconds, _, memory = predict_run(SYNTHETIC_MACHINE, blank)
    return replace(blank, step_seconds=seconds, memory_bytes=memory)
