"""Reader of run directories: complete, active, truncated, of an older version, or with ranks missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.plan.calibrate.measured_run import MIN_STEPS, WARM_UP_STEPS
from phalanx.report.formatting import STATE_DESCRIPTIONS, format_times
from phalanx.report.measured_machine import on_measured_machine
from phalanx.runs.create import RUN_FILE, require_run
from phalanx.runs.events import (
    FINISHED,
    describe_damaged_checkpoints,
    describe_failed_uploads,
    describe_failures,
    describe_rollbacks,
    read_events,
)
from phalanx.runs.hang_dumps import describe_first_failure
from phalanx.runs.jsonl import JsonRecord, read_valid_jsonl
from phalanx.runs.lock import is_running
from phalanx.runs.measured import read_measured_since
from phalanx.runs.metrics import METRICS_FILE, have_same_held_out_text, losses_by_source, read_metrics
from phalanx.runs.step_records import MAX_STEP_LAG, RankRecord, read_rank_records
from phalanx.runs.swarm_records import JOURNAL_FILE, ROUNDS_FILE, RoundRecord, decode_journal_event, read_rounds
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, with_last_used_layout
from phalanx.spec.files.teacher import with_kept_teacher
from phalanx.spec.phases import describe_phases, phase_at, phases_of
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.result_tables import data_frame, html_table
from phalanx.spec.run import RunSpec

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True, repr=False)
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
    """The run with the settings of its last step; None if run.toml has another version or its schedule does not exist.
    """
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the whole run, with its phases."""
    phases: list[str] = field(default_factory=list)
    """A line on each `[[phase]]`."""
    began_after: int = 0
    """The step after which the last start, or the phase of the last step, began."""
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    """The records of the last start."""
    metrics: list[JsonRecord] = field(default_factory=list)
    """Records of metrics.jsonl: of steps and of evaluations."""
    measured: dict[int, JsonRecord] = field(default_factory=dict)
    """Measurements of one step by rank: memory, traffic and compute."""
    problems: list[str] = field(default_factory=list)
    """Missing and unreadable data, and what kept the run from finishing."""
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

    @cached_property
    def resolved(self) -> ResolvedRun | None:
        """The run on its ranks; None if either is unknown."""
        return ResolvedRun(self.run, self.world_size) if self.run is not None and self.world_size else None

    @property
    def step(self) -> int:
        """The last finished step; for a coordinator, that of the nodes in the last round."""
        if self.swarm_journal is not None and self.run is not None and self.run.swarm is not None:
            num_rounds: int = sum(event["kind"] == "committed" for event in self.swarm_journal)
            return num_rounds * self.run.swarm.steps_per_round
        return int(self.step_metrics[-1]["step"]) if self.step_metrics else 0

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run.name if self.run else self.directory.name

    @property
    def finish_reason(self) -> str | None:
        """Why the run ended before the steps that were planned; None if it did not."""
        last = self.run_events[-1] if self.run_events else {}
        return last.get("reason") if last.get("kind") == FINISHED else None

    @property
    def step_metrics(self) -> list[JsonRecord]:
        """The records of steps in `metrics`."""
        return step_records(self.metrics)

    @property
    def evaluations(self) -> list[JsonRecord]:
        """The records of evaluations in `metrics`."""
        return [line for line in self.metrics if "held_out_loss" in line]

    @property
    def source_losses(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """The losses of each source of a mixture: lists `loss` and `held_out_loss` of steps and losses, by its name.

        Held-out losses are those on the text of the last evaluation; others are not comparable with them."""
        same_text = [line for line in self.evaluations if have_same_held_out_text(line, self.evaluations[-1])]
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        kinds: tuple[tuple[Literal["loss", "held_out_loss"], list[JsonRecord]], ...]
        kinds = (("loss", self.step_metrics), ("held_out_loss", same_text))
        for kind, lines in kinds:
            for line in lines:
                for name, loss in losses_by_source(line, kind).items():
                    curves.setdefault(name, {"loss": [], "held_out_loss": []})[kind].append((line["step"], loss))
        return curves

    def __repr__(self) -> str:
        return f"RunData({self.name!r}, {self.directory}, step {self.step}, {self.world_size} ranks)"

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the metrics of steps as a pandas DataFrame with one row per step.

        Raises UserError if pandas is not installed.
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
    require_run(directory)
    is_coordinator = (directory / JOURNAL_FILE).is_file()
    return _read_coordinator(directory) if is_coordinator else _read_training(directory, machine)


def _read_coordinator(directory: Path) -> RunData:
    """Read the directory of a swarm's coordinator."""
    problems: list[str] = []
    journal = read_valid_jsonl(directory / JOURNAL_FILE, problems, decode_journal_event)
    run = _read_run_file(directory, 0, problems)
    is_active = is_running(directory)
    run_data = RunData(
        directory=directory, run=run, world_size=0, problems=problems, in_progress=is_active, swarm_journal=journal
    )
    if run is not None and run_data.step < run.training.steps:
        problems.append(_describe_progress(run, run_data.step, is_active))
    return run_data


def _read_training(directory: Path, machine: ClusterSpec | None) -> RunData:
    """Read the directory of a run that trains: a run of its own, or a node of a swarm."""
    problems: list[str] = []
    metrics = read_metrics(directory, problems)
    steps = step_records(metrics)
    rounds = read_rounds(directory, problems)
    is_node = (directory / ROUNDS_FILE).is_file()  # nodes of a swarm write no step records
    ranks, world_size, began_after = read_rank_records(directory, [] if is_node else problems)
    if steps and not ranks:
        world_size = steps[-1].get("ranks", 0)
        began_after = steps[-1].get("resumed_at_step", 0)
    run = _read_run_file(directory, world_size, problems)
    settings = run.settings if run is not None else {}
    phases = list(describe_phases(run).values()) if run is not None and run.phase else []
    if run is not None and run.phase and steps:
        phase = phase_at(phases_of(run), steps[-1]["step"] - 1)
        run = phase.run
        began_after = max(began_after, phase.first_step)
    if run is not None and run.swarm is not None and not rounds:
        problems.append(f"no round has been written to {ROUNDS_FILE} yet")
    if run is not None:
        try:
            run = on_measured_machine(run, machine, steps, world_size, ranks)
        except UserError as error:
            first_line = str(error).partition("\n")[0]
            problems.append(f"the recorded machine is not valid, so predictions use that of run.toml: {first_line}")
    failure = describe_first_failure(directory, problems)
    is_active = is_running(directory)
    events = read_events(directory, problems)
    finished = events[-1]["step"] if events and events[-1]["kind"] == FINISHED else 0
    recorded = max((record.steps[-1]["step"] for record in ranks.values() if record.steps), default=0)
    problems += _find_unfinished(run, steps, failure, max(finished, recorded - MAX_STEP_LAG), is_active)
    problems += _find_interruptions(events, failure)
    return RunData(
        directory=directory,
        run=run,
        settings=settings,
        phases=phases,
        world_size=world_size,
        began_after=began_after,
        ranks=ranks,
        metrics=metrics,
        run_events=events,
        measured=read_measured_since(directory, began_after, world_size, problems),
        problems=problems,
        failure=failure,
        in_progress=is_active,
        rounds=rounds,
    )


def _read_run_file(directory: Path, world_size: int, problems: list[str]) -> RunSpec | None:
    """Return run.toml, which must fit the number of ranks if that is known (not 0)."""
    reason = "is not valid in this version"
    try:
        run = with_last_used_layout(load_run(directory / RUN_FILE, environment={}), directory)
        run = with_kept_teacher(run, directory)
        if run.layout.pp > 1:
            reason = "names a schedule that does not exist"
            representative_schedule(run.layout)
        if world_size:
            reason = f"does not match the {world_size} ranks"
            check_layout(ResolvedRun(run, world_size))
    except UserError as error:
        first_line = str(error).partition("\n")[0]
        problems.append(f"run.toml {reason}, so there are no predictions: {first_line}")
        return None
    return run


def _find_unfinished(
    run: RunSpec | None, steps: Sequence[JsonRecord], failure: str | None, reached: int, is_active: bool | None
) -> Iterator[str]:
    """Yield the failure or the progress of a run that has not finished, and whether metrics.jsonl lacks last steps.

    The run has certainly finished step `reached`, by its last event and the records of its ranks.
    """
    last_step = int(steps[-1]["step"]) if steps else 0
    expected = reached
    if run is not None and reached < run.training.steps:
        expected -= reached % run.metrics.every
    if last_step < expected and not is_active:  # a run that resumes from an earlier step rewrites them
        yield f"{METRICS_FILE} ends at step {last_step}, but step {reached} was reached: its last lines are lost"
    if failure:
        yield failure
    elif (last_step >= expected or is_active) and not steps:
        yield "no step has been written yet"
    elif (last_step >= expected or is_active) and run is not None and last_step < run.training.steps:
        yield _describe_progress(run, last_step, is_active)


def _describe_progress(run: RunSpec, step: int, is_active: bool | None) -> str:
    return f"step {step} of {run.training.steps_text}: {STATE_DESCRIPTIONS[is_active]}"


def _find_interruptions(events: Sequence[Mapping[str, Any]], failure: str | None) -> Iterator[str]:
    """Yield how often a run failed, rolled back, had a damaged checkpoint, or could not upload one."""
    failures = describe_failures(events, exclude_last=failure is not None)
    if failures:
        yield f"the run failed {format_times(len(failures))} and resumed, the last time at {failures[-1]}"
    rollbacks = describe_rollbacks(events)
    if rollbacks:
        yield f"the run rolled back {format_times(len(rollbacks))}, the last time at {rollbacks[-1]}"
    damaged_checkpoints = describe_damaged_checkpoints(events)
    if damaged_checkpoints:
        yield f"checkpoints were damaged, the last time at {damaged_checkpoints[-1]}"
    failed_uploads = describe_failed_uploads(events)
    if failed_uploads:
        times = format_times(len(failed_uploads))
        yield f"uploads of checkpoints failed {times}, the last time at {failed_uploads[-1]}"


def step_records(metrics: Iterable[JsonRecord]) -> list[JsonRecord]:
    """Return the records of steps among those of metrics.jsonl."""
    return [record for record in metrics if "step_seconds" in record]


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
