"""A machine whose constants are known, and what runs would take on it."""

from __future__ import annotations

from dataclasses import replace

from phalanx.plan.calibrate.calibrate import predict_run
from phalanx.plan.calibrate.measured_run import MeasuredRun
from phalanx.spec.cluster import CalibrationSpec
from phalanx.spec.files.load import load_machine, run_from_table
from phalanx.spec.run import RunSpec

TRUTH = {"gemm_0": 0.6, "hbm_0": 0.3, "link": 0.1, "overlap": 0.4, "optimizer_passes": 30.0, "step_seconds": 0.02}
"""What the constants are on an imagined machine."""
MACHINE = load_machine("cpu").model_copy(update={"cores": 2})
PROCESS, SHARE, BUFFERS = 400 * 2**20, 1.1, 0.7
IMAGINED = MACHINE.model_copy(
    update={
        "calibration": CalibrationSpec(
            runs=1,
            precision="fp32",
            time_constants=TRUTH,
            identified_constants=[],
            log_half_width=0.1,
            baseline_process_bytes=PROCESS,
            bytes_per_counted_byte=SHARE,
            buffer_overhead=BUFFERS,
        )
    }
)


def described(ranks: int, precision: str = "fp32", **layout: object) -> RunSpec:
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


def imagined(ranks: int, **layout: object) -> MeasuredRun:
    """A run as the model has it with the imagined constants."""
    blank = MeasuredRun(str(layout), described(ranks, **layout), ranks, 1.0, 1.0, None)
    seconds, _, memory = predict_run(IMAGINED, blank)
    return replace(blank, step_seconds=seconds, memory_bytes=memory)
