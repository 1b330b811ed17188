"""`phalanx launch`: the job file with which Slurm, Kubernetes or SkyPilot starts a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from phalanx.cli.commands.auto_layout import choose_layout
from phalanx.cli.common.options import Overrides, RunFile
from phalanx.cli.common.output_file import write_file
from phalanx.launch.jobs.job import ClusterJob, check_job, parse_nodes, ranks_per_node, shell_join
from phalanx.launch.jobs.job_memory import job_notes, lacks_layout
from phalanx.launch.jobs.kubernetes import kubernetes
from phalanx.launch.jobs.skypilot import skypilot
from phalanx.launch.jobs.slurm import slurm
from phalanx.spec.components import named_components, require_trusted
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, require_run_file
from phalanx.spec.formatting import plural

logger = logging.getLogger(__name__)

WRITERS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "slurm": (slurm, ("time", "partition", "account")),
    "kubernetes": (kubernetes, ("image", "volume")),
    "skypilot": (skypilot, ("image", "volume", "accelerator")),
}
"""Writer of each system, with the options that apply to that system only."""


def launch(
    run: RunFile,
    to: Annotated[str, Option(help="System that starts the run.", metavar="slurm|kubernetes|skypilot")],
    nodes: Annotated[
        str | None,
        Option(help="Number of nodes, or minimum and maximum: 4, or 2:4. Default: cluster.nodes.", metavar="N|MIN:MAX"),
    ] = None,
    nproc: Annotated[
        int | None, Option(help="Ranks and GPUs per node; default: cluster.nproc_per_node.", min=1, metavar="N")
    ] = None,
    set_: Overrides = None,
    out: Annotated[Path | None, Option(help="File to write; default: print.", metavar="FILE")] = None,
    check: Annotated[
        bool, Option("--check/--no-check", help="Check each node with `phalanx doctor` before the run.")
    ] = True,
    force: Annotated[
        bool, Option("--force", help="Write the job even if the planned memory exceeds that of the cards.")
    ] = False,
    cpus: Annotated[
        int | None, Option(help="Cores per node; default: Slurm allocates whole nodes.", min=1, metavar="N")
    ] = None,
    memory: Annotated[int | None, Option(help="Memory per node in GiB.", min=1, metavar="GIB")] = None,
    time: Annotated[str | None, Option(help="Slurm: time limit, HH:MM:SS or D-HH:MM:SS.")] = None,
    partition: Annotated[str | None, Option(help="Slurm: partition.", metavar="NAME")] = None,
    account: Annotated[str | None, Option(help="Slurm: account.", metavar="NAME")] = None,
    image: Annotated[
        str | None, Option(help="Kubernetes, SkyPilot (required): container image with phalanx.", metavar="IMAGE")
    ] = None,
    volume: Annotated[
        str | None, Option(help="Kubernetes, SkyPilot (required): volume for text and checkpoints.", metavar="NAME")
    ] = None,
    accelerator: Annotated[
        str | None, Option(help="SkyPilot: GPU by its SkyPilot name, such as H100.", metavar="NAME")
    ] = None,
) -> None:
    """Write the job file that starts a run with Slurm, Kubernetes or SkyPilot, after a check of each node.

    Slurm excludes an unhealthy node, Kubernetes starts another pod for it, up to six times per node, and SkyPilot ends
    the run. All three restart a run that was stopped and has a checkpoint; it continues from there. If the run file of
    a large model sets no layout, the job plans it at its start, and its choice is printed.

    Examples:

        phalanx launch run.toml --to slurm --nodes 4 --nproc 8 --time 24:00:00 --out run.sbatch

        phalanx launch run.toml --to slurm --nodes 3:4 --nproc 8 --partition gpu --account lab

        phalanx launch run.toml --to kubernetes --nodes 2 --nproc 8 --image REGISTRY/phalanx:1 --volume shared

        phalanx launch run.toml --to skypilot --nproc 8 --accelerator H100 --image REGISTRY/phalanx:1 --volume shared
    """
    if to not in WRITERS:
        raise UserError("--to", to, "is not known", fix=f"use one of {', '.join(WRITERS)}")
    write, allowed = WRITERS[to]
    system_options = {
        "time": time,
        "partition": partition,
        "account": account,
        "image": image,
        "volume": volume,
        "accelerator": accelerator,
    }
    target_options = {name: value for name, value in system_options.items() if value is not None}
    for name, value in target_options.items():
        if name not in allowed:
            targets = " and ".join(system for system, (_, names) in WRITERS.items() if name in names)
            raise UserError(f"--{name}", value, f"does not apply to {to}", fix=f"remove it: it applies to {targets}")
    require_run_file(run)
    run_spec = load_run(run, set_ or [])
    for field, component in named_components(run_spec):
        require_trusted(field, component, fix=f"read that code, then give a run file of your own: cp {run} my_run.toml")
    min_nodes, max_nodes = parse_nodes(nodes) if nodes else (run_spec.cluster.nodes, run_spec.cluster.nodes)
    nproc_per_node = ranks_per_node(run_spec, nproc)
    override_args = [argument for override in set_ or () for argument in ("--set", override)]
    job_override_args = override_args
    if lacks_layout(run_spec, max_nodes * nproc_per_node):
        cluster = run_spec.cluster.replace(nodes=max_nodes, nproc_per_node=nproc_per_node)
        run_spec = run_spec.replace(auto_layout=True)
        job_override_args = [*override_args, "--set", "layout=auto"]
        size = f"{plural(max_nodes, 'node')} of {plural(nproc_per_node, 'rank')}"
        logger.info("layout is not set, so it is planned; with %s:", size)
        choose_layout(run_spec.replace(cluster=cluster))
    options = {"to": to, "nodes": nodes, "nproc": nproc, "cpus": cpus, "memory": memory, **target_options}
    flags = [*([] if check else ["--no-check"]), *(["--force"] if force else [])]
    job = ClusterJob(
        run=run_spec,
        file=run,
        command=_format_command(run, options, override_args, flags),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc=nproc_per_node,
        overrides=job_override_args,
        check=check,
        cpus=cpus,
        memory=memory,
        force=force,
    )
    check_job(job)
    for note in job_notes(job):
        logger.info("%s", note)
    _write_or_print(write(job, **target_options), out)


def _format_command(
    run: Path, options: Mapping[str, str | int | None], override_args: Sequence[str], flags: Sequence[str]
) -> str:
    """Return the command that requested the job file, in one line."""
    option_args = [
        argument for name, value in options.items() if value is not None for argument in (f"--{name}", str(value))
    ]
    command = shell_join(["phalanx", "launch", str(run), *option_args, *override_args, *flags])
    return " ".join(command.splitlines())


def _write_or_print(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
        return
    write_file("--out", out, text)
    print(f"wrote {out}")
