"""Reader of run directories: complete, active, truncated, of an older version, or with ranks missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.plan.calibrate.measured_run import MIN_STEPS, WARM_UP_STEPS
from phalanx.runs.create import RUN_FILE
from phalanx.runs.events import describe_damaged_checkpoints, describe_failures, describe_rollbacks, read_events
from phalanx.runs.hang_dumps import describe_first_failure
from phalanx.runs.jsonl import JsonRecord, read_valid_jsonl
from phalanx.runs.lock import is_running
from phalanx.runs.measured import read_measured_since
from phalanx.runs.metrics import peak_from_mfu, read_metrics
from phalanx.runs.step_records import RankRecord, read_rank_records
from phalanx.runs.swarm_records import JOURNAL_FILE, ROUNDS_FILE, RoundRecord, read_rounds
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, load_run, with_last_used_layout
from phalanx.spec.result_tables import data_frame, html_table
from phalanx.spec.run import RunSpec

if TYPE_CHECKING:
    import pandas

STATE_DESCRIPTIONS = {
    True: "the run is still active",
    False: "the run has stopped",
    None: "the run is still active, or has stopped",
}
"""State of a run before its last step, by whether it is active."""


@dataclass(frozen=True, repr=False)
class RunData:
    """The content of a run directory.

    Example:
        >>> data = phalanx.read_run("runs/first")
        >>> [line["step"] for line in data.step_metrics] == list(range(1, 9))
        True
        >>> [line["step"] for line in data.evaluations]
        [8]
    """

    directory: Path
    run: RunSpec | None
    """The run specification, or None if run.toml has another version or its schedule does not exist."""
    world_size: int
    began_after: int = 0
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    """The records of the last start."""
    metrics: list[JsonRecord] = field(default_factory=list)
    """Records of metrics.jsonl: of steps and of evaluations."""
    measured: dict[int, JsonRecord] = field(default_factory=dict)
    """Measurements of one step by rank: memory, traffic and compute."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of missing and unreadable data."""
    failure: str | None = None
    """The failure of the rank that failed first."""
    in_progress: bool | None = None
    """True if the run is active, None if that is unknown."""
    rounds: list[RoundRecord] = field(default_factory=list)
    """Rounds of a swarm's node."""
    run_events: list[Mapping[str, Any]] = field(default_factory=list)
    """Starts, failures and ends of the run (`runs.events`)."""
    swarm_journal: list[JsonRecord] | None = None
    """The journal of a swarm's coordinator, which does not train; None for other runs."""

    @property
    def step(self) -> int:
        """The last finished step; for a coordinator, that of the nodes in the last round."""
        if self.swarm_journal is not None and self.run is not None and self.run.swarm is not None:
            return (
                len([None for event in self.swarm_journal if event["what"] == "committed"])
                * self.run.swarm.steps_per_round
            )
        return int(self.step_metrics[-1]["step"]) if self.step_metrics else 0

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run.name if self.run else self.directory.name

    @property
    def step_metrics(self) -> list[JsonRecord]:
        """The records of steps in `metrics`."""
        return [line for line in self.metrics if "step_seconds" in line]

    @property
    def evaluations(self) -> list[JsonRecord]:
        """The records of evaluations in `metrics`."""
        return [line for line in self.metrics if "held_out_loss" in line]

    def __repr__(self) -> str:
        return f"RunData({self.name!r}, {self.directory}, step {self.step}, {self.world_size} ranks)"

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the metrics of steps as a pandas DataFrame with one row per step.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame(self.step_metrics)

    def _repr_html_(self) -> str:
        last = self.step_metrics[-1] if self.step_metrics else {}
        return html_table(("metric", "last step"), list(last.items()), f"{self.name}: {self.directory}")

    @property
    def profiled_steps(self) -> list[int]:
        """The steps that every rank with records has profiled."""
        steps_per_rank = [{line["step"] for line in record.steps if "spans" in line} for record in self.ranks.values()]
        return sorted(set.intersection(*steps_per_rank)) if steps_per_rank else []


def read_run(run_dir: str | Path, machine: ClusterSpec | None = None) -> RunData:
    """Read a run directory, also of a run that is in progress, truncated or of an older version.

    Args:
        run_dir: The directory of the run.
        machine: The machine of the run, if its run file does not describe it.

    Returns:
        The metrics, records and events of the run. `problems` lists what is missing or cannot be read.

    Raises:
        UserError: `run_dir` is not a run directory.

    Example:
        >>> data = phalanx.read_run("runs/first")
        >>> data.step, data.world_size, data.failure
        (8, 1, None)
    """
    directory = Path(run_dir)
    _check_run_file(directory)
    problems: list[str] = []
    if (directory / JOURNAL_FILE).is_file():
        return _read_coordinator(directory, problems)
    metrics = read_metrics(directory, problems)
    rounds = read_rounds(directory, problems)
    is_node = (directory / ROUNDS_FILE).is_file()
    # Nodes of a swarm write no step records.
    ranks, world_size, began_after = read_rank_records(directory, [] if is_node else problems)
    steps = [line for line in metrics if "step_seconds" in line]
    if steps and not ranks:
        world_size = steps[-1].get("ranks", 0)
        began_after = steps[-1].get("resumed_at_step", 0)
    run = _read_run(directory / RUN_FILE, world_size, problems)
    if run is not None:
        if run.swarm is not None and not rounds:
            problems.append(f"no round has been written to {ROUNDS_FILE} yet")
        run = _on_measured_machine(run, machine, steps, world_size=world_size, ranks=ranks)
    failure = describe_first_failure(directory)
    is_active = is_running(directory)
    events = read_events(directory)
    problems += _describe_progress(run, steps, failure, is_active=is_active)
    problems += _describe_interruptions(events, failure)
    measured = read_measured_since(directory, began_after, world_size, problems=problems)
    return RunData(
        directory,
        run,
        world_size,
        began_after=began_after,
        ranks=ranks,
        metrics=metrics,
        measured=measured,
        problems=problems,
        failure=failure,
        in_progress=is_active,
        rounds=rounds,
        run_events=events,
    )


def _check_run_file(directory: Path) -> None:
    """Raise UserError if the directory has no run file."""
    if (directory / RUN_FILE).is_file():
        return
    problem = f"has no {RUN_FILE}" if directory.is_dir() else "is a file" if directory.exists() else "does not exist"
    raise UserError("run directory", str(directory), problem, fix="use a run directory of phalanx train: runs/NAME")


def _describe_progress(
    run: RunSpec | None, steps: Sequence[JsonRecord], failure: str | None, is_active: bool | None
) -> Iterator[str]:
    """Yield the failure or the progress of a run that has not finished."""
    if failure:
        yield failure
    elif not steps:
        yield "no step has been written yet"
    elif run is not None and steps[-1]["step"] < run.training.steps:
        yield f"step {steps[-1]['step']} of {run.training.steps_text}: {STATE_DESCRIPTIONS[is_active]}"


def _describe_interruptions(events: Sequence[Mapping[str, Any]], failure: str | None) -> Iterator[str]:
    """Yield how often a run failed, rolled back or had a damaged checkpoint."""
    if failures := describe_failures(events, exclude_last=failure is not None):
        count_text = "once" if len(failures) == 1 else f"{len(failures)} times"
        yield f"the run failed {count_text} and resumed, the last time at {failures[-1]}"
    if rollbacks := describe_rollbacks(events):
        count_text = "once" if len(rollbacks) == 1 else f"{len(rollbacks)} times"
        yield f"the run rolled back {count_text}, the last time at {rollbacks[-1]}"
    if damaged_checkpoints := describe_damaged_checkpoints(events):
        yield f"checkpoints were damaged, the last time at {damaged_checkpoints[-1]}"


def _read_coordinator(directory: Path, problems: list[str]) -> RunData:
    events = read_valid_jsonl(directory / JOURNAL_FILE, problems, {"what", "at"})
    run = _read_run(directory / RUN_FILE, 0, problems)
    is_active = is_running(directory)
    run_data = RunData(directory, run, 0, problems=problems, in_progress=is_active, swarm_journal=events)
    if run is not None and run_data.step < run.training.steps:
        problems.append(f"step {run_data.step} of {run.training.steps_text}: {STATE_DESCRIPTIONS[is_active]}")
    return run_data


def _read_run(file: Path, world_size: int, problems: list[str]) -> RunSpec | None:
    problem = "is not valid in this version"
    try:
        run = with_last_used_layout(load_run(file, environment={}), file.parent)
        if run.layout.pp > 1:
            problem = "names a schedule that does not exist"
            representative_schedule(run.layout)
        if world_size:
            problem = f"does not match the {world_size} ranks"
            check_layout(run, world_size)
    except UserError as error:
        first_line = str(error).partition("\n")[0]
        problems.append(f"run.toml {problem}, so there are no predictions: {first_line}")
        return None
    return run


def _on_measured_machine(
    run: RunSpec,
    machine: ClusterSpec | None,
    steps: Sequence[JsonRecord],
    world_size: int,
    ranks: dict[int, RankRecord],
) -> RunSpec:
    """Return the run on its machine, or the given one, with measured values."""
    if machine is not None:
        run = run.model_copy(update={"cluster": machine.model_copy(update={"nodes": run.cluster.nodes})})
    if not world_size:
        return run
    peak = measured_peak(run, steps, world_size)
    return run.model_copy(update={"cluster": _measured_machine(run.cluster, world_size, peak, ranks=ranks)})


def _measured_machine(
    cluster: ClusterSpec, world_size: int, peak_flops: float | None, ranks: dict[int, RankRecord]
) -> ClusterSpec:
    """Return the run's machine with measured values; an undescribed CPU gets the preset's values.

    Ranks that share cores each measure their share of the peak.
    """
    machine = cluster.model_copy(update={"nproc_per_node": max(1, world_size // cluster.nodes)})
    record = next(iter(ranks.values()), None)
    if record is not None:
        machine = machine.model_copy(update={"device": record.device})
    if cluster.preset is None and record is not None and record.device == "cpu":
        measured_fields = {
            "memory_bytes": cluster.memory_bytes or record.memory_bytes,
            "cores": cluster.cores or record.cores,
        }
        unchanged_fields = {
            name: getattr(machine, name) for name in ("nodes", "nproc_per_node", "peak_flops", "calibration")
        }
        machine = load_machine("cpu").model_copy(update=measured_fields | unchanged_fields)
    if cluster.peak_flops is None and peak_flops is not None:
        peak = peak_flops * machine.ranks_per_core
        machine = machine.model_copy(update={"peak_flops": peak, "matmul_flops": cluster.matmul_flops or peak})
    return machine


def measured_peak(run: RunSpec, steps: Sequence[JsonRecord], world_size: int) -> float | None:
    """Return the peak FLOP/s of a rank that was measured or known at the start of the run.

    Args:
        run: The run.
        steps: The records of steps in metrics.jsonl.
        world_size: The number of ranks, for steps that do not record it.
    """
    flops = training_flops_per_token(run.model, run.training.seq_len)
    peaks = (peak_from_mfu(record, flops, record.get("ranks", world_size)) for record in reversed(steps))
    peak = next((peak for peak in peaks if peak is not None), None)
    return None if peak is None else float(f"{peak:.6g}")  # equal for all steps


def steady_steps(records: Iterable[RankRecord], began_after: int) -> list[int]:
    """Return the steps that count: recorded by every rank, after the warm-up, and not profiled.

    Profiled steps take longer. If too few remain, only steps with memory samples are excluded.
    """
    lines = [[line for line in record.steps if line["step"] > began_after + WARM_UP_STEPS] for record in records]
    for slow_key in ("spans", "memory"):
        steps_per_rank = [{line["step"] for line in rank_lines if slow_key not in line} for rank_lines in lines]
        steps = sorted(set.intersection(*steps_per_rank)) if steps_per_rank else []
        if len(steps) >= MIN_STEPS:
            break
    return steps
