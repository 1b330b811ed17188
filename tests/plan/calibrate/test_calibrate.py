"""Constants fitted to runs on a machine: recovered if the runs determine them, unchanged otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.cost.estimate.job_table import job_table
from phalanx.cost.estimate.step_time import StepTime, step_seconds
from phalanx.plan.calibrate.calibrate import calibrate, job_row, measured_targets, predict_run
from phalanx.plan.calibrate.measured_run import MeasuredRun
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.search import search_layouts
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.synthetic_machine import (
    MACHINE,
    SYNTHETIC_MACHINE,
    TRUE_BUFFER_SHARE,
    TRUE_CONSTANTS,
    TRUE_PROCESS_BYTES,
    make_run,
    synthesize_measured_run,
)

CALIBRATION_RUNS = [
    synthesize_measured_run(ranks, **layout)
    for ranks, layout in (
        (1, {"micro_batch_size": 4}),
        (2, {"micro_batch_size": 1}),
        (2, {"micro_batch_size": 8}),
        (2, {"data_parallel": "zero1", "micro_batch_size": 4}),
        (2, {"data_parallel": "zero3", "micro_batch_size": 4}),
        (2, {"tp": 2, "micro_batch_size": 4}),
        (2, {"tp": 2, "micro_batch_size": 16}),
        (2, {"cp": 2, "micro_batch_size": 4}),
        (4, {"pp": 4, "micro_batch_size": 2}),
        (4, {"tp": 4, "micro_batch_size": 4}),
        (4, {"micro_batch_size": 2}),
    )
]


@pytest.fixture(scope="module")
def calibration():
    return calibrate(CALIBRATION_RUNS, MACHINE)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"data_parallel": "zero2", "micro_batch_size": 2}),
        (2, {"pp": 2, "micro_batch_size": 2}),
        (4, {"tp": 2, "micro_batch_size": 2}),
        (4, {"data_parallel": "zero3", "micro_batch_size": 2}),
        (4, {"pp": 2, "tp": 2, "micro_batch_size": 4}),
        (1, {"activation_checkpointing": "full"}),
    ],
)
def test_calibrated_machine_predicts_unseen_layouts(calibration, ranks, layout):
    unseen_run = synthesize_measured_run(ranks, **layout)
    seconds, width, memory = predict_run(calibration.machine, unseen_run)
    assert seconds == pytest.approx(unseen_run.step_seconds, rel=0.03)
    assert memory == pytest.approx(unseen_run.memory_bytes, rel=0.01)
    assert 1 < width < 1.1


def test_calibration_reduces_error_on_calibration_runs(calibration):
    truth = np.array([run.step_seconds for run in CALIBRATION_RUNS])
    assert np.abs(calibration.before / truth - 1).mean() > 0.3
    np.testing.assert_allclose(calibration.after, truth, rtol=0.03)
    np.testing.assert_allclose(calibration.memory, [run.memory_bytes for run in CALIBRATION_RUNS], rtol=0.005)
    assert calibration.machine.calibration.baseline_process_bytes == pytest.approx(TRUE_PROCESS_BYTES, rel=0.02)
    assert calibration.machine.calibration.buffer_overhead == pytest.approx(TRUE_BUFFER_SHARE, rel=0.1)


def test_calibration_lists_only_constants_identified_by_runs(calibration):
    measured = calibration.machine.calibration
    assert "link" in measured.identified_constants
    # The initial value is 0.65.
    assert measured.time_constants["link"] == pytest.approx(TRUE_CONSTANTS["link"], rel=0.5)
    # No run has experts, the engine of DeepSpeed, or a device of another generation.
    for name in ("route_passes", "deepspeed", "gemm_2", "flash_4"):
        assert name not in measured.time_constants
        assert name not in measured.identified_constants


def test_calibrated_efficiencies_do_not_exceed_one(calibration):
    assert all(
        calibration.machine.calibration.time_constants.get(name, 0) <= 1.05
        for name in ("gemm_0", "hbm_0", "link", "overlap")
    )


def test_calibration_interval_widens_for_inconsistent_runs():
    run = CALIBRATION_RUNS[0]
    inconsistent_runs = [replace(run, step_seconds=run.step_seconds * times) for times in (0.8, 1.0, 1.25)]
    measured = calibrate(inconsistent_runs, MACHINE).machine.calibration
    assert np.exp(measured.log_half_width) > 1.15


def test_search_uses_constants_of_calibrated_machine(calibration):
    run = make_run(4)
    run = run.model_copy(update={"cluster": calibration.machine.model_copy(update={"nproc_per_node": 4})})
    best = search_layouts(ResolvedRun(run, 4)).layouts[0]
    best_run = MeasuredRun(
        name="best",
        run=run.model_copy(update={"layout": best.candidate.layout()}),
        ranks=4,
        step_seconds=1.0,
        memory_bytes=1.0,
        peak_flops=None,
    )
    seconds, width, memory = predict_run(calibration.machine, best_run)
    assert best.step_seconds == pytest.approx(seconds)
    assert best.high_seconds == pytest.approx(seconds * width)
    assert best.memory_bytes >= memory


def test_calibration_continues_from_calibrated_machine(calibration):
    repeated = calibrate(CALIBRATION_RUNS, calibration.machine)
    np.testing.assert_allclose(repeated.before, calibration.after)


def test_calibrate_rejects_mixed_precisions():
    other = replace(CALIBRATION_RUNS[0], run=make_run(1, precision="bf16"))
    with pytest.raises(UserError, match="differs between the runs"):
        calibrate([CALIBRATION_RUNS[0], other], MACHINE)


def test_calibrate_rejects_runs_in_fp8():
    with pytest.raises(UserError, match=r"training\.precision = 'fp8' is not supported by calibrations"):
        calibrate([replace(CALIBRATION_RUNS[0], run=make_run(1, precision="fp8"))], MACHINE)


def test_calibrate_rejects_runs_from_another_device_type():
    with pytest.raises(UserError, match=r'ran on device "cpu", but the machine .* has device "cuda"'):
        calibrate([replace(CALIBRATION_RUNS[0], device="cpu")], load_machine("h100"))


def test_calibration_interval_stays_wide_for_identical_runs():
    measured = calibrate([replace(CALIBRATION_RUNS[0], name=name) for name in "ab"], MACHINE).machine.calibration
    assert measured.log_half_width > 0.05


def test_search_rejects_unknown_calibration_constant(calibration):
    wrong = calibration.machine.calibration.model_copy(update={"time_constants": {"gemm_3": 1.0}})
    run = make_run(2)
    run = run.model_copy(
        update={"cluster": calibration.machine.model_copy(update={"nproc_per_node": 2, "calibration": wrong})}
    )
    with pytest.raises(UserError, match="did you mean 'gemm_"):
        search_layouts(ResolvedRun(run, 2))


def test_search_rejects_precision_other_than_calibrated(calibration):
    run = make_run(2, precision="bf16")
    run = run.model_copy(update={"cluster": calibration.machine.model_copy(update={"nproc_per_node": 2})})
    with pytest.raises(UserError, match=r'set training\.precision = "fp32"'):
        search_layouts(ResolvedRun(run, 2))


def test_calibrate_error_names_run_with_unsupported_layout():
    served = MeasuredRun(
        name="served",
        run=make_run(3, data_parallel="parameter_server"),
        ranks=3,
        step_seconds=1.0,
        memory_bytes=1.0,
        peak_flops=None,
    )
    with pytest.raises(UserError, match="served: layout"):
        calibrate([CALIBRATION_RUNS[0], served], MACHINE)


def test_calibrate_separates_compute_and_waiting_time():
    """Two runs have equal step times: one computes more, the other waits more."""
    layout = {"ranks": 2, "micro_batch_size": 4}
    run = synthesize_measured_run(**layout)
    busy, idle = (
        replace(run, computing_seconds=share * run.step_seconds, waiting_seconds=(0.95 - share) * run.step_seconds)
        for share in (0.9, 0.3)
    )
    busy_time, idle_time = (
        predict_step_time(calibrate([variant], MACHINE).machine, variant) for variant in (busy, idle)
    )
    assert busy_time.compute > 1.5 * idle_time.compute
    assert busy_time.data_parallel < idle_time.data_parallel


def test_calibrate_ignores_waiting_time_without_predicted_communication():
    run = synthesize_measured_run(2, pp=2, micro_batch_size=2)
    assert (
        predict_step_time(SYNTHETIC_MACHINE, run).exchange + predict_step_time(SYNTHETIC_MACHINE, run).data_parallel
        == 0
    )
    calibration = calibrate([replace(run, waiting_seconds=0.1 * run.step_seconds)], MACHINE)
    np.testing.assert_allclose(calibration.after, [run.step_seconds], rtol=0.05)


def predict_step_time(machine: ClusterSpec, run: MeasuredRun) -> StepTime:
    run_spec = run.run.model_copy(update={"cluster": machine.model_copy(update={"nproc_per_node": run.ranks})})
    return step_seconds(
        time_constants_for(machine),
        candidate_jobs(ResolvedRun(run_spec, run.ranks), [candidate_from_run(ResolvedRun(run_spec, run.ranks))]),
    )


def test_measured_targets_ignore_compute_time_when_ranks_share_cores():
    two_ranks, four_ranks = (
        replace(synthesize_measured_run(ranks, micro_batch_size=2), computing_seconds=0.5, waiting_seconds=0.4)
        for ranks in (2, 4)
    )
    targets = measured_targets(
        [two_ranks, four_ranks], job_table([job_row(run, SYNTHETIC_MACHINE) for run in (two_ranks, four_ranks)])
    )
    np.testing.assert_array_equal(targets.computing_seconds, [0.5, np.nan])
    np.testing.assert_array_equal(targets.waiting_seconds, [0.4, np.nan])
