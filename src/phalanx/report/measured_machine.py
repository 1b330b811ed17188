"""Machine of a run with the values that the run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.runs.jsonl import JsonRecord
from phalanx.runs.metrics import peak_from_mfu
from phalanx.runs.step_records import RankRecord
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.files.load import load_machine
from phalanx.spec.run import RunSpec


def on_measured_machine(
    run: RunSpec,
    machine: ClusterSpec | None,
    steps: Sequence[JsonRecord],
    world_size: int,
    ranks: Mapping[int, RankRecord],
) -> RunSpec:
    """Return the run with measured values, on its machine or on `machine` if that is given.

    `steps` are the records of steps in metrics.jsonl; `world_size` is 0 if it is unknown.
    """
    if machine is not None:
        run = run.replace(cluster=machine.replace(nodes=run.cluster.nodes))
    if not world_size:
        return run
    peak = measured_peak(run, steps, world_size)
    return run.replace(cluster=_apply_measurements(run.cluster, world_size, peak, ranks))


def _apply_measurements(
    cluster: ClusterSpec, world_size: int, peak_flops: float | None, ranks: Mapping[int, RankRecord]
) -> ClusterSpec:
    """Return the run's machine with measured values; an undescribed CPU gets the preset's values.

    Ranks that share cores each measure their share of the peak.
    """
    machine = cluster.replace(nproc_per_node=max(1, world_size // cluster.nodes))
    record = next(iter(ranks.values()), None)
    if record is not None:
        machine = machine.replace(device=record.device)
    if cluster.preset is None and record is not None and record.device == "cpu":
        fields = {name: getattr(machine, name) for name in ("nodes", "nproc_per_node", "peak_flops", "calibration")}
        fields["memory_bytes"] = cluster.memory_bytes or record.memory_bytes
        fields["cores"] = cluster.cores or record.cores
        machine = load_machine("cpu").replace(**fields)
    if cluster.peak_flops is None and peak_flops is not None:
        peak = peak_flops * machine.ranks_per_core
        machine = machine.replace(peak_flops=peak, matmul_flops=cluster.matmul_flops or peak)
    return machine


def measured_peak(run: RunSpec, steps: Sequence[JsonRecord], world_size: int) -> float | None:
    """Return the peak FLOP/s of a rank that was measured or known at the start of the run.

    `steps` are the records of steps in metrics.jsonl; `world_size` counts for those that do not record it.
    """
    flops = training_flops_per_token(run.model, run.training.seq_len)
    peaks = (peak_from_mfu(record, flops, record.get("ranks", world_size)) for record in reversed(steps))
    peak = next((peak for peak in peaks if peak is not None), None)
    return None if peak is None else float(f"{peak:.6g}")  # equal for all steps
