"""`phalanx train`: the options, and the run that they describe."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.commands.train_start import (
    StartOptions,
    decide_and_check,
    resolve_rendezvous,
    run_on_nodes,
    run_on_one_machine,
)
from phalanx.cli.common.options import STEP_OPTION, Trust
from phalanx.launch.jobs.job import parse_nodes
from phalanx.launch.starters import kubeflow_options, set_rank_variables
from phalanx.runs.checkpoint_store import list_in_run_directory
from phalanx.runs.checkpoints import require_valid_checkpoint, split_checkpoint_path, step_of
from phalanx.runs.create import RUN_FILE, completed_steps, is_run_directory, require_run, run_directory
from phalanx.runs.step_records import parse_step_range
from phalanx.spec.base import require
from phalanx.spec.components import named_components, require_trusted
from phalanx.spec.errors import EXIT_STOPPED, LocalNodeError, UserError
from phalanx.spec.files.load import load_run, require_run_file
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)


def _parse_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a valid number of ranks: write a whole number above 0")
    return int(text)


def train(
    run: Annotated[
        Path, Argument(help="A run file, or the directory of a run or checkpoint to continue.", metavar="RUN.toml")
    ],
    nproc: Annotated[
        int | None,
        Option(
            help="Ranks on this machine; default: cluster.nproc_per_node, one per GPU, or one.",
            parser=_parse_ranks,
            metavar="N",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        Option(help='Machine for layout = "auto": a preset, or a file by `phalanx calibrate`.', metavar="NAME"),
    ] = None,
    nodes: Annotated[
        str | None,
        Option(
            help="Number of nodes, or minimum and maximum: the run continues with fewer nodes if one is lost, and "
            "with more if one joins. Default: cluster.nodes.",
            metavar="N|LEAST:MOST",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        Option(help="Rendezvous of the nodes: the address of one of them, and a free port there.", metavar="HOST:PORT"),
    ] = None,
    set_: Annotated[
        list[str] | None, Option("--set", help="Override a field, e.g. training.steps=200.", metavar="KEY=VALUE")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the newest checkpoint, if there is one.")] = False,
    step: Annotated[
        Any,
        Option(
            help="With --resume: go back to the checkpoint of this step, or to the best. Newer ones are renamed to "
            "step-N.abandoned.",
            **STEP_OPTION,
        ),
    ] = None,
    profile_memory: Annotated[
        bool,
        Option(
            "--profile-memory",
            help="Measure memory and traffic of one early step on each rank, and compare them with the plan.",
        ),
    ] = False,
    profile_steps: Annotated[
        str | None,
        Option(
            help="Profile these steps (inclusive): passes and collectives over time, memory in the first step; on GPUs "
            "a trace of the last of several.",
            metavar="FIRST:LAST",
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Start even if the plan exceeds the machine's memory.")] = False,
    trust: Trust = None,
    print_config: Annotated[bool, Option("--print-config", help="Check the run, print it as TOML, and exit.")] = False,
) -> None:
    """Train a model as a run file describes it.

    Defaults < the file < environment (PHALANX_TRAINING__STEPS=200) < --set.

    Examples:

        phalanx train run.toml

        phalanx train run.toml --nproc 2 --set training.steps=200 --set name=short

        phalanx train run.toml --resume

        phalanx train runs/demo --resume --step 100

        phalanx train run.toml --nproc 2 --profile-memory

        phalanx train run.toml --nproc 2 --profile-steps 10:13

        phalanx train automatic.toml --nproc 2 --machine here.toml

        phalanx train run.toml --nodes 3:4 --rendezvous node0:29500 --resume    (on every node)

        torchrun --nproc-per-node 8 -m phalanx.train run.toml

        srun --ntasks-per-node 8 phalanx train run.toml

    Failed ranks are restarted from the newest checkpoint ([recovery]). Exit codes: 0 the last step is done; 1 the run,
    or this node of several, failed; 2 an error that you must fix; 75 a signal stopped the run after a checkpoint; 130
    Ctrl-C.
    """
    run, step = split_checkpoint_path(run, step)
    require(resume or step is None, "--step", step, "has no effect without --resume", fix="add --resume")
    if not (nproc or nodes or rendezvous or print_config):
        if options := kubeflow_options(os.environ):
            nproc = options.nproc
            nodes = options.nodes
            rendezvous = options.rendezvous
        elif set_rank_variables(os.environ):
            flags = {"--resume": resume, "--force": force, "--trust": trust, "--profile-memory": profile_memory}
            words = [flag for flag, is_set in flags.items() if is_set]
            words += [word for override in set_ or [] for word in ("--set", override)]
            words += ["--profile-steps", profile_steps] if profile_steps else []
            words += ["--machine", machine] if machine else []
            words += ["--step", str(step)] if step is not None else []
            from phalanx.launch.process import run_in_place  # imports torch, which help and completion do not need

            run_in_place("phalanx.train", str(run), *words)
    run_spec = _load_run_or_directory(run, set_ or [], machine, trust)
    if step is not None:
        list_in_run_directory(run_spec, run_directory(run_spec))
        step = step_of(require_valid_checkpoint(run_directory(run_spec), step))
    if run_spec.swarm is not None:
        fix = "start the coordinator with phalanx swarm serve; to train on this machine alone, add --set swarm="
        problem = "is a run of several sites, which phalanx train does not start"
        raise UserError("swarm", run_spec.swarm.method, problem, fix=fix)
    if profile_steps is not None:
        check_profiled_steps(run_spec, profile_steps)
    min_nodes, max_nodes = parse_nodes(nodes) if nodes else (run_spec.cluster.nodes,) * 2
    has_nodes = rendezvous is not None or max_nodes > 1
    sizes = {"nodes": max_nodes, "nproc_per_node": nproc or run_spec.cluster.nproc_per_node}
    # The run directory records the sizes for a later resume.
    cluster = run_spec.cluster.replace(**sizes)
    run_spec = run_spec.replace(cluster=cluster)
    rank_options = ["--profile-memory"] if profile_memory else []
    rank_options += ["--profile-steps", profile_steps] if profile_steps else []
    start = StartOptions(resume, force, rank_options, step)
    # Of several nodes, only the rendezvous host needs the text.
    if not (resume or has_nodes or run.is_dir()):
        from phalanx.data.source_checks import check_paths  # before the import of torch, which takes seconds

        check_paths(run_spec.data)
    if print_config:
        with _exit_on_local_node_error() if has_nodes else nullcontext():
            print(_format_config(run_spec, start))
        return

    for field, component in named_components(run_spec):
        require_trusted(field, component)
    if resume and (steps := completed_steps(run_spec, step)):
        directory = shlex.quote(str(run_directory(run_spec)))
        longer = f"phalanx train {directory} --resume --set training.steps={2 * steps}"
        logger.info("the run is complete: step %s is its last. To train longer: %s", f"{steps:,}", longer)
        return

    def handle_signal(*_: object) -> None:  # until there are ranks, which save before they exit
        logger.info("stopped by a signal before the first step; no new checkpoint was saved")
        sys.exit(EXIT_STOPPED)

    signal.signal(signal.SIGTERM, handle_signal)
    if (seconds := run_spec.training.seconds) is not None and not resume:
        logger.info("training for %g s after the text is prepared, then evaluation", seconds)
    if has_nodes:
        with exit_codes_of_run(run_spec), _exit_on_local_node_error():
            timeout_seconds = run_spec.recovery.rendezvous_timeout_seconds
            endpoint = resolve_rendezvous(rendezvous, max_nodes, timeout_seconds)
            raise typer.Exit(run_on_nodes(run_spec, start, min_nodes, endpoint))
    with exit_codes_of_run(run_spec):
        raise typer.Exit(run_on_one_machine(run_spec, start))


@contextmanager
def exit_codes_of_run(run: RunSpec) -> Iterator[None]:
    """Exit with the codes that the run's scheduler knows."""
    try:
        yield
    except typer.Exit as end:
        raise typer.Exit(run.recovery.exit_code(end.exit_code)) from None
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise SystemExit(run.recovery.exit_code(code)) from None


@contextmanager
def _exit_on_local_node_error() -> Iterator[None]:
    """Exit with 1 for an error of this node only, if the run has several nodes."""
    try:
        yield
    except LocalNodeError as error:
        logger.error("%s", error)
        raise typer.Exit(1) from None


def check_profiled_steps(run: RunSpec, steps: str) -> None:
    """Raise UserError for an invalid window of steps, or one in which nothing would be recorded."""
    window = parse_step_range(steps)
    if window[0] > run.training.steps:
        problem = f"begins after the last step, {run.training.steps}"
        raise UserError("--profile-steps", steps, problem, fix="choose earlier steps")
    if not run.metrics.per_rank_records:
        problem = "has no effect with metrics.per_rank_records = false"
        raise UserError("--profile-steps", steps, problem, fix="set it to true")


def _load_run_or_directory(path: Path, overrides: list[str], machine: str | None, trust: bool | None) -> RunSpec:
    if not path.is_dir():
        # A path with a folder and without a suffix of a file is a run directory; otherwise it may be a model's name.
        if not path.exists() and len(path.parts) > 1 and path.suffix not in (".toml", ".json"):
            require_run(path)
        require_run_file(path)
        return load_run(path, overrides, machine=machine, trust=trust)
    if not is_run_directory(path):
        run_file = path / RUN_FILE
        problem = "is not a run directory"
        fix = "give a run file, or a directory created by phalanx train"
        if run_file.is_file():
            problem = f"contains a {RUN_FILE}, but is not a run directory: phalanx train did not create it"
            fix = f"to train this run file: phalanx train {shlex.quote(str(run_file))}"
        raise UserError("run directory", str(path), problem, fix=fix)
    for override in overrides:
        if override.startswith("training.seconds=") and override != "training.seconds=":
            problem = "applies to new runs only: the number of steps of this run is fixed"
            raise UserError("--set", override, problem, fix="set training.steps instead")
    # The directory may have been moved since its creation.
    directory = path.resolve()
    location = [f"output_dir='{directory.parent}'", f"name={directory.name}"]
    return load_run(path / RUN_FILE, [*overrides, *location], machine=machine, trust=bool(trust))


def _format_config(run: RunSpec, start: StartOptions) -> str:
    """Return the run as TOML, after the checks before reading all text. Raises UserError if one fails."""
    from phalanx.data.source_checks import check_sources
    from phalanx.launch.process import select_nproc
    from phalanx.schedule.registry import layout_compiles_whole_blocks
    from phalanx.spec.attention_backend import describe_attention
    from phalanx.spec.files.write import to_toml
    from phalanx.spec.learning_rate import describe_learning_rate
    from phalanx.train.create_run import offer_recorded_tokens

    ranks = select_nproc(run)
    layout_ranks = run.cluster.nproc_per_node if run.cluster.nodes == 1 else ranks
    run, _ = decide_and_check(run, ranks, start, layout_ranks)
    with offer_recorded_tokens(run, start.resume):
        check_sources(run.data)
    batch_plan = ResolvedRun(run, ranks * run.cluster.nodes).batch
    sequences = f"{batch_plan.micro_batch_size} sequences x {batch_plan.dp_size} ranks"
    comments = [f"# per update: {sequences} x {batch_plan.gradient_accumulation_steps} accumulated"]
    if run.model.implementation is None:
        from phalanx.launch.process import select_device  # imports torch, which help and completion do not need

        device_run = run.on_device(select_device(run))
        comments.append(f"# attention kernel: {describe_attention(device_run)}")
        if device_run.compiles:
            is_whole = layout_compiles_whole_blocks(run.layout)
            compiled = "blocks" if is_whole else "rotary embeddings and activations of blocks"
            comments.append(f"# compiled: {compiled}, and the loss on GPUs")
    comments.append(f"# {describe_learning_rate(run)}")
    return "\n".join([*comments, to_toml(run)]).rstrip()
