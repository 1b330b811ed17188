"""Measurements of `phalanx bench`, and collectives of profiled steps, as evidence for constants."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.estimate.job_table import job_table
from phalanx.plan.calibrate.calibrate import calibrate, job_row, predict_run
from phalanx.plan.calibrate.microbenchmarks import (
    BenchmarkFile,
    CollectiveTiming,
    OperationTimings,
    benchmark_timings,
    collective_timings,
    read_benchmark_file,
)
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.spec.errors import UserError
from phalanx.spec.files.write import to_toml
from tests.helpers.synthetic_machine import MACHINE, SYNTHETIC_MACHINE, make_run, synthesize_measured_run

SHAPES = [(1, 1024, 768, 256), (1, 256, 768, 1024), (1, 1024, 2048, 256)]
SIZES = [2**power for power in range(12, 24, 2)]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")


def synthesize_benchmark_file(ranks: int = 2, noise: float = 0.0) -> BenchmarkFile:
    """Return the file that `phalanx bench` would write on the synthetic machine."""
    exchanges = tuple(
        CollectiveTiming(operation=kind, ranks=ranks, stride=1, size_bytes=size, seconds=1.0)
        for kind in OPERATIONS
        for size in SIZES
    )
    blank = BenchmarkFile(
        name="measured.json",
        run=make_run(ranks, pp=ranks, micro_batch_size=4),
        ranks=ranks,
        products=np.array([(*shape, 1.0, 8) for shape in SHAPES], float),
        attention_seconds=np.ones(2),
        passes=np.array([(2**26, 1.0)]),
        exchanges=exchanges,
    )
    times, chance = time_constants_for(SYNTHETIC_MACHINE), np.random.default_rng(0)
    seconds_by_kind = {
        timings.kind: timings.predicted(times, np.arange(len(timings.seconds)))
        * np.exp(noise * chance.standard_normal(len(timings.seconds)))
        for timings in benchmark_timings(blank, job_table([job_row(blank, SYNTHETIC_MACHINE)]))
    }
    products = blank.products.copy()
    products[:, 4] = seconds_by_kind["matrix products"]
    return replace(
        blank,
        products=products,
        attention_seconds=seconds_by_kind["attention"],
        passes=np.array([(2**26, *seconds_by_kind["memory"])]),
        exchanges=tuple(replace(e, seconds=s) for e, s in zip(exchanges, seconds_by_kind["collectives"], strict=True)),
    )


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_calibrate_with_benchmark_file_predicts_unseen_collectives(noise):
    """No run has shown the collectives of these layouts."""
    single_rank_run = synthesize_measured_run(1, micro_batch_size=4)
    machine = MACHINE.model_copy(update={"nproc_per_node": 2})
    before, after = (
        calibrate([single_rank_run], machine, sweeps).machine
        for sweeps in ([], [synthesize_benchmark_file(noise=noise)])
    )
    for layout in (
        {"tp": 2, "micro_batch_size": 2},
        {"cp": 2, "micro_batch_size": 4},
        {"data_parallel": "zero1", "micro_batch_size": 8},
    ):
        truth = synthesize_measured_run(2, **layout)
        error_before, error_after = (
            abs(np.log(predict_run(calibrated, truth)[0] / truth.step_seconds)) for calibrated in (before, after)
        )
        assert error_after < 0.12
        assert error_after < error_before


def test_calibrate_reduces_error_on_benchmark_timings():
    calibration = calibrate([synthesize_measured_run(1, micro_batch_size=4)], MACHINE, [synthesize_benchmark_file()])
    assert {operation.kind: operation.count for operation in calibration.operations} == {
        "collectives": len(OPERATIONS) * len(SIZES),
        "matrix products": 3,
        "attention": 2,
        "memory": 1,
    }
    for operation in calibration.operations:
        assert operation.after < max(0.15, operation.before / 2), operation
    assert calibration.machine.calibration.time_constants["link"] == pytest.approx(0.1, rel=0.2)


def test_calibrate_uses_collectives_of_profiled_steps():
    machine = MACHINE.model_copy(update={"nproc_per_node": 2})
    run = replace(synthesize_measured_run(1, micro_batch_size=4), exchanges=synthesize_benchmark_file().exchanges)
    (collectives,) = calibrate([run], machine).operations
    assert (collectives.of, collectives.count) == (run.name, len(synthesize_benchmark_file().exchanges))
    assert collectives.after < 0.1 < collectives.before


def test_collective_timings_use_formula_of_each_operation():
    """An all-reduce moves its bytes twice. All-to-alls leave a node by the NIC of each rank. The
    planner has no formula for parameter servers."""
    machine = SYNTHETIC_MACHINE.model_copy(update={"link_bytes_per_second": 100e9, "network_bytes_per_second": 1e9})
    jobs = job_table([{**job_row(synthesize_benchmark_file(2), machine), "pp": 1.0, "fast_link_domain": 2.0}])
    kinds = ("all_reduce", "all_gather", "all_to_all", "broadcast")
    near, far = (
        collective_timings(
            "x",
            [CollectiveTiming(operation=kind, ranks=n, stride=1, size_bytes=1e9, seconds=1.0) for kind in kinds],
            jobs,
        )
        for n in (2, 4)
    )
    constants = time_constants_for(machine)
    assert len(near.seconds) == 3
    reduced, gathered, context = near.predicted(constants, np.arange(3))
    assert reduced == pytest.approx(2 * gathered, rel=1e-3)
    assert context == pytest.approx(gathered, rel=1e-3)
    _, gathered, context = far.predicted(constants, np.arange(3))
    card = float(jobs.network_bytes_per_second[0]) * constants.network
    assert gathered == pytest.approx(3 / 4 * 1e9 / (2 * card), rel=1e-2)
    assert context == pytest.approx(2 / 4 * 1e9 / card, rel=1e-2)


def test_operation_timings_compute_geometric_mean_error():
    double = OperationTimings(
        source="x",
        kind="y",
        seconds=np.array([1.0, 1.0]),
        shares=np.array([0.25, 0.75]),
        predicted=lambda c, indices: np.array([2.0, 0.5])[indices],
    )
    assert double.geometric_mean_error(time_constants()) == pytest.approx(1.0)
    errors = double.errors(time_constants(), points=2)
    assert errors.shape == (2, 2)
    np.testing.assert_allclose(errors[0], errors[1])


# -- files -------------------------------------------------------------------------------------------------------------


def make_benchmark_document(**changes: object) -> dict[str, object]:
    collective = {
        "operation": "all_reduce",
        "groups": [[0, 2], [1, 3]],
        "sizes": [{"size_bytes": 64, "calls": 0, "seconds": 0.5}],
    }
    product = {"batch": 1, "m": 2, "n": 3, "k": 4, "count": 5}
    times = {"forward_seconds": 1.0, "inputs_seconds": 2.0, "weights_seconds": 3.0}
    ring = [
        {"causal": causal, "count": count, "forward_seconds": 1.0, "backward_seconds": 2.0}
        for causal, count in ((True, 4), (False, 8))
    ]
    document = {
        "run_file": to_toml(make_run(4)),
        "world_size": 4,
        "collectives": [collective],
        "matmul": [product | times],
    }
    return {**document, "attention": ring, "bandwidth": [{"moved_bytes": 8, "seconds": 2.0}], **changes}


def write_benchmark_document(path: Path, content: object) -> Path:
    file = path / "measured.json"
    file.write_text(json.dumps(content))
    return file


def test_read_benchmark_file_parses_all_parts(tmp_path):
    benchmark = read_benchmark_file(write_benchmark_document(tmp_path, make_benchmark_document()))
    assert (benchmark.name, benchmark.ranks, benchmark.run.cluster.nproc_per_node) == ("measured.json", 4, 4)
    np.testing.assert_array_equal(benchmark.products[:, 1:5], [[2, 3, 4, 1], [2, 4, 3, 2], [4, 3, 2, 3]])
    # Count per layer: its own tokens once, and those of other ranks twice.
    np.testing.assert_array_equal(benchmark.attention_seconds, [3, 6])
    np.testing.assert_array_equal(benchmark.passes, [[8, 2]])
    assert benchmark.exchanges == (
        CollectiveTiming(operation="all_reduce", ranks=2, stride=2, size_bytes=64, seconds=0.5),
    )


def test_benchmark_file_may_contain_attention_only(tmp_path):
    only = {
        name: value
        for name, value in make_benchmark_document().items()
        if name in ("run_file", "world_size", "attention")
    }
    sweep = read_benchmark_file(write_benchmark_document(tmp_path, only))
    (timings,) = benchmark_timings(sweep, job_table([job_row(sweep, SYNTHETIC_MACHINE)]))
    assert timings.kind == "attention"


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        3,
        make_benchmark_document(world_size="x"),
        make_benchmark_document(run_file=4),
        make_benchmark_document(run_file="= 3"),
        make_benchmark_document(matmul=[{}]),
        make_benchmark_document(collectives=[{"groups": []}]),
        make_benchmark_document(bandwidth=3),
        make_benchmark_document(matmul=[{"batch": []}]),
    ],
)
def test_read_benchmark_file_rejects_invalid_content(tmp_path, content):
    with pytest.raises(UserError, match="is not a file of phalanx bench"):
        read_benchmark_file(write_benchmark_document(tmp_path, content))


def test_read_benchmark_file_rejects_missing_file():
    with pytest.raises(UserError, match="cannot be read"):
        read_benchmark_file(Path("nowhere.json"))
