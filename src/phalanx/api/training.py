"""Train a run from Python, and read its result.

`train_run` starts `phalanx train` and follows its output, without torch in this process. `run_rank` is one rank.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from phalanx.api.components import Components, with_components
from phalanx.api.run_results import Report, report_run
from phalanx.report.run_data import read_run
from phalanx.runs.checkpoints import split_checkpoint_path
from phalanx.runs.create import RUN_FILE, run_directory
from phalanx.runs.metrics import losses_by_source
from phalanx.spec.errors import (
    ERROR_FILE_VARIABLE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    KUBEFLOW_EXIT_CODES,
    UserError,
    error_from_record,
)
from phalanx.spec.files.load import ENVIRONMENT_PREFIX, load_run
from phalanx.spec.files.write import to_toml
from phalanx.spec.log import LEVELS_VARIABLE, level_name, log_to_stderr
from phalanx.spec.result_tables import html_table
from phalanx.spec.run import RunSpec

ExitReason = Literal["finished", "stopped", "failed"]
STOPPED_CODES = EXIT_STOPPED, EXIT_INTERRUPTED, KUBEFLOW_EXIT_CODES[EXIT_STOPPED]
EXIT_REASONS: dict[int, ExitReason] = {0: "finished", **dict.fromkeys(STOPPED_CODES, "stopped")}
MAX_KEPT_LINES = 50
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The end of a training run.

    Example:
        >>> result = phalanx.train_run(phalanx.load_run("run.toml", ["name=short", "training.steps=2"]), quiet=True)
        >>> result.exit_reason, result.run_dir.name, result.metrics["step"]
        ('finished', 'short', 2)
    """

    run_dir: Path
    exit_reason: ExitReason
    """finished: the last step is done. stopped: a signal stopped the run, after a checkpoint. failed: see `failure`."""
    exit_code: int
    """The exit code of `phalanx train`."""
    metrics: Mapping[str, Any]
    """The metrics of the last step, as in metrics.jsonl; empty if no step was done."""
    held_out_loss: float | None
    """The loss of the last evaluation in nats per token; None if there was no evaluation."""
    held_out_loss_by_source: Mapping[str, float]
    """The same for each source of a mixture (`data.source`), by its name; empty for other runs."""
    failure: str | None
    """The first failure of a rank; None if there was none."""

    def report(self) -> Report:
        """Return the report of the run, as `report_run` does."""
        return report_run(self.run_dir)

    def _repr_html_(self) -> str:
        return html_table(("metric", "last step"), self.metrics.items(), f"{self.exit_reason}: {self.run_dir}")


def train_run(
    run: RunSpec | str | Path,
    *,
    nproc: int | None = None,
    resume: bool = False,
    step: int | Literal["best"] | None = None,
    profile_memory: bool = False,
    profile_steps: tuple[int, int] | None = None,
    quiet: bool = False,
    trust: bool = False,
    **components: Unpack[Components],
) -> TrainResult:
    """Train a run, with the launcher of `phalanx train` in a process of its own.

    The launcher starts the ranks, restarts them after failures, and writes the run directory. An interrupt (Ctrl-C)
    stops the run with a checkpoint, and is then raised here.

    Args:
        run: The run; or the path of a run file; or the directory of a run, to continue it with `resume`.
        nproc: The number of ranks on this machine. By default `cluster.nproc_per_node`, one per GPU, or one.
        resume: Continue from the latest checkpoint, if there is one.
        step: With `resume`: go back to the checkpoint of this step, or to the best.
        profile_memory: Measure memory and traffic of an early step on each rank, for the report.
        profile_steps: Record every pass and collective from the first to the second of these steps.
        quiet: Do not print the output of the run.
        trust: Import the components that a run directory names. It runs code: read that of others before.
        components: Your own model, loss, optimizer, lr_schedule, data and callbacks (`Components`).

    Returns:
        The run directory, why the run ended, and the metrics of its last step.

    Raises:
        UserError: The run cannot start: a field of the run, the data or the machine must be fixed first.

    Example:
        >>> run = phalanx.load_run("run.toml", ["training.steps=3", "name=three"])
        >>> result = phalanx.train_run(run, nproc=1, quiet=True)
        >>> result.exit_reason, result.metrics["step"]
        ('finished', 3)
        >>> sorted(path.name for path in result.run_dir.glob("metrics.jsonl"))
        ['metrics.jsonl']
    """
    run = with_components(run, components)
    with _provide_run_argument(run) as (argument, directory), tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        error_file = Path(folder) / "error.json"
        options: dict[str, object] = {"--nproc": nproc, "--resume": resume, "--step": step, "--trust": trust}
        options["--profile-memory"] = profile_memory
        if profile_steps is not None:
            options["--profile-steps"] = "{}:{}".format(*profile_steps)
        command = [sys.executable, "-P", "-m", "phalanx", "train", argument, *_format_options(options)]
        environment = {**_launcher_environment(run), ERROR_FILE_VARIABLE: str(error_file)}
        exit_code, last_lines = _follow_output(command, environment, quiet)
        # A command that a callback ran may have written the file too.
        if exit_code == 2 and error_file.exists():
            raise error_from_record(json.loads(error_file.read_text(encoding="utf-8")))
    if not (directory / RUN_FILE).is_file():
        problem = f"exited with code {exit_code} before the run began: {''.join(last_lines[-1:]).strip()}"
        raise UserError("phalanx train", None, problem, fix="read its output")
    return _read_result(directory, exit_code)


def run_rank(
    run: RunSpec | str | Path,
    *,
    resume: bool = False,
    step: int | Literal["best"] | None = None,
    force: bool = False,
    trust: bool = False,
    **components: Unpack[Components],
) -> TrainResult:
    """Train a run on this process, which is one of the ranks that another program has started.

    The program may be torchrun, srun or mpirun, or a library whose workers are the ranks, such as Ray Train or Monarch.
    All ranks make this call. A process group that exists is used; otherwise one is initialized by the variables that
    the program has set, and destroyed at the end. Off the main thread, signals are not handled.

    Args:
        run: The run; or the path of a run file, which rank 0 reads; or the directory of a run, to continue it.
        resume: Continue from the latest checkpoint, if there is one.
        step: With `resume`: go back to the checkpoint of this step, or to the best.
        force: Start even if the plan exceeds the machine's memory.
        trust: Import the components that a run directory names. It runs code: read that of others before.
        components: Your own model, loss, optimizer, lr_schedule, data and callbacks (`Components`).

    Returns:
        The run directory, why the run ended, and the metrics of its last step; the same on all ranks.

    Raises:
        UserError: The run cannot start: a field of the run, the data or the machine must be fixed first. All ranks
            raise the error of rank 0. Errors during training are raised as they are.

    Example:
        >>> result = phalanx.run_rank(phalanx.load_run("run.toml", ["training.steps=3", "name=rank"]))
        held-out loss...
        >>> result.exit_reason, result.metrics["step"]
        ('finished', 3)
    """
    from phalanx.launch.process import leaving_process_group
    from phalanx.train.rank_options import RankOptions
    from phalanx.train.worker import RankSession

    # Setting the variable asks for messages. Otherwise, logging is left to the program.
    if LEVELS_VARIABLE in os.environ:
        log_to_stderr()
    run = with_components(run, components)
    source = run if isinstance(run, RunSpec) else Path(run)
    session = RankSession(source, RankOptions(resume=resume, step=step, force=force, trust=trust))
    with leaving_process_group():
        session.run()
    return _read_result(session.directory, session.exit_code)


def _read_result(directory: Path, exit_code: int) -> TrainResult:
    """Return the result of a run that has ended."""
    run_data = read_run(directory)
    evaluation = run_data.evaluations[-1] if run_data.evaluations else {}
    return TrainResult(
        run_dir=directory,
        exit_reason=EXIT_REASONS.get(exit_code, "failed"),
        exit_code=exit_code,
        metrics=run_data.step_metrics[-1] if run_data.step_metrics else {},
        held_out_loss=evaluation.get("held_out_loss"),
        held_out_loss_by_source=losses_by_source(evaluation, "held_out_loss"),
        failure=run_data.failure,
    )


def _format_options(options: Mapping[str, object]) -> Iterator[str]:
    """Yield options of a command: flags that are True, and other values that are not None."""
    for name, value in options.items():
        if value is not None and value is not False:
            yield name
            if value is not True:
                yield str(value)


@contextmanager
def _provide_run_argument(run: RunSpec | str | Path) -> Iterator[tuple[str, Path]]:
    """Yield the argument of `phalanx train` and the run directory. A RunSpec is written to a temporary file."""
    if isinstance(run, RunSpec):
        with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
            file = Path(folder) / "run.toml"
            file.write_text(to_toml(run))
            yield str(file), run_directory(run)
    else:
        path = Path(run)
        directory, _ = split_checkpoint_path(path)
        yield str(path), directory if directory.is_dir() else run_directory(load_run(path))


def _launcher_environment(run: RunSpec | str | Path) -> dict[str, str]:
    """Return the environment of the launcher, which imports this phalanx.

    Variables that set fields apply to run files, not to a RunSpec.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # A level that the program has set for its logger applies to the run too.
    if level := logging.getLogger("phalanx").level:
        environment.setdefault(LEVELS_VARIABLE, level_name(level))
    # A checkout may be on sys.path in ways that a new process does not know.
    if PACKAGE_ROOT.name != "site-packages":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    if isinstance(run, RunSpec):
        return {
            name: value
            for name, value in environment.items()
            if not (name.startswith(ENVIRONMENT_PREFIX) and "__" in name)
        }
    return environment


def _follow_output(command: Sequence[str], environment: dict[str, str], quiet: bool) -> tuple[int, list[str]]:
    """Run a command and print its output line by line; return its exit code and its last lines."""
    last_lines: deque[str] = deque(maxlen=MAX_KEPT_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last_lines.append(line)
                if not quiet:
                    print(line, end="", flush=True)  # noqa: T201 -- the output of the run
        except BaseException:
            process.send_signal(signal.SIGTERM)  # the ranks save a checkpoint, then end
            process.communicate()
            raise
    return process.returncode, list(last_lines)
