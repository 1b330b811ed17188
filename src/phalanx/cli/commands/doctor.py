"""`phalanx doctor`: the health of one or several machines before a run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from phalanx.cli.common.options import Json, Overrides
from phalanx.cli.common.output_file import check_replaceable
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import COMMAND_SECONDS, Machine
from phalanx.doctor.subprocesses import run_command as run_child
from phalanx.spec.errors import UserError


def doctor(
    run: Annotated[Path | None, Argument(help="A run file: adds checks of its needs.", metavar="RUN.toml")] = None,
    nproc: Annotated[
        int | None, Option(help="Ranks per node; default: cluster.nproc_per_node.", min=1, metavar="N")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Finish within a minute: write less to the disk.")] = False,
    nccl_log: Annotated[
        Path | None, Option(help="NCCL log (NCCL_DEBUG=INFO) to check for a fallback to sockets.", metavar="FILE")
    ] = None,
    topology: Annotated[
        Path | None, Option(help="Write the links between GPUs, for `phalanx plan` and `placement`.", metavar="FILE")
    ] = None,
    save_snapshot: Annotated[
        Path | None, Option(help="Write all collected data to a new directory.", metavar="DIR")
    ] = None,
    from_snapshot: Annotated[
        Path | None, Option(help="Check a saved snapshot instead of this machine.", metavar="DIR")
    ] = None,
    save_report: Annotated[
        Path | None, Option(help="Write this node's report to a directory on shared storage.", metavar="DIR")
    ] = None,
    compare_reports: Annotated[
        Path | None, Option(help="Compare the node reports in a directory.", metavar="DIR")
    ] = None,
    collectives: Annotated[
        bool, Option("--collectives", help="Benchmark the run's collectives with ranks on this node instead.")
    ] = False,
    out: Annotated[
        Path | None,
        Option(help="Write findings.json, findings.md and failing_nodes.txt to a directory.", metavar="DIR"),
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Check that this machine is ready to train, with a run file also for the needs of the run.

    The checks cover GPUs, NVLink, PCIe, network cards, RoCE settings, limits, memory, disk, clock and the kernel log.
    Every probe is a process with a time limit. Ranks start only with --collectives.

    Exit code: 0 no finding, 1 warnings, 2 failures (or a mistake in the command), 3 nothing could be checked. Checks
    that do not apply are skipped, with the reason. docs/reference/doctor-rules.md lists all checks.

    Examples:

        phalanx doctor run.toml

        srun --ntasks-per-node 1 phalanx doctor run.toml --quick --save-report shared/health

        phalanx doctor run.toml --compare-reports shared/health  # srun --exclude=$(cat shared/health/failing_nodes.txt)

        phalanx doctor run.toml --collectives --nproc 2

        torchrun --nnodes 2 --nproc-per-node 8 ... -m phalanx.doctor.multi_node_benchmark run.toml --out shared/health

        phalanx doctor --save-snapshot mine; phalanx doctor --from-snapshot mine
    """
    from phalanx.doctor.compare_nodes import (
        collective_findings,
        compare_nodes,
        read_node_reports,
        stale_report_findings,
    )
    from phalanx.doctor.report import exit_code, sort_by_severity, write_reports

    exclusive_options = {"--compare-reports": compare_reports, "--collectives": collectives or None}
    machine_options = {
        "--from-snapshot": from_snapshot,
        "--save-snapshot": save_snapshot,
        "--save-report": save_report,
        "--topology": topology,
    }
    given_options = [option for option, value in {**exclusive_options, **machine_options}.items() if value is not None]
    if (len(given_options) > 1 and given_options[0] in exclusive_options) or {
        "--from-snapshot",
        "--save-snapshot",
    } <= set(given_options):
        raise UserError(" ".join(given_options), None, "cannot be combined", fix="use one of them")
    if collectives and run is None:
        fix = "add the run file"
        raise UserError("--collectives", None, "requires a run file, whose layout determines the collectives", fix=fix)
    # A disk that does not answer is reported by a check.
    is_checked = nccl_log is not None and from_snapshot is None
    if is_checked and run_child(("test", "-e", str(nccl_log)), COMMAND_SECONDS).code == 1:
        raise UserError("--nccl-log", str(nccl_log), "is not a file", fix="give the file that NCCL_DEBUG_FILE names")
    is_empty = save_snapshot is not None and save_snapshot.is_dir() and not any(save_snapshot.iterdir())
    if save_snapshot is not None and save_snapshot.exists() and not is_empty:
        fix = "use a new directory: a snapshot shows one point in time"
        raise UserError("--save-snapshot", str(save_snapshot), "already exists", fix=fix)
    expected = Expectations(ranks=nproc)
    if run is not None:
        from phalanx.doctor.expectations_from_run import expectations_from_run
        from phalanx.spec.files.load import load_run

        expected = expectations_from_run(load_run(run, set_ or []), nproc)
    expected = replace(expected, quick=quick, nccl_log=str(nccl_log) if nccl_log else None)
    if compare_reports is not None:
        nodes = read_node_reports(compare_reports)
        findings = [
            *compare_nodes(nodes, expected.nodes or 0),
            *stale_report_findings(compare_reports),
            *collective_findings(compare_reports),
            *(finding for node in nodes for finding in node.findings),
        ]
        out = out or compare_reports
    elif collectives and run is not None:
        findings = _check_collectives(run, nproc, set_ or [])
    else:
        findings = _examine_machine(expected, from_snapshot, save_snapshot, save_report, topology)
    if out is not None:
        write_reports(out, findings, "phalanx doctor")
        print(f"wrote {out}/findings.json, findings.md and failing_nodes.txt", file=sys.stderr)
    if json_:
        rows = [asdict(finding) for finding in sort_by_severity(findings)]
        print(json.dumps({"exit_code": exit_code(findings), "findings": rows}, indent=2))
    else:
        from phalanx.cli.views.doctor import print_findings

        print_findings(findings)
    raise typer.Exit(exit_code(findings))


def _examine_machine(
    expected: Expectations,
    from_snapshot: Path | None,
    save_snapshot: Path | None,
    save_report: Path | None,
    topology: Path | None,
) -> list[DoctorFinding]:
    """Return the findings on one machine, and write the requested files."""
    from phalanx.doctor import run_checks
    from phalanx.doctor.compare_nodes import storage_clock, write_node_report
    from phalanx.doctor.probes.nvidia_smi import topology_matrix
    from phalanx.spec.topology.read import read_topology

    if from_snapshot is not None and not from_snapshot.is_dir():
        fix = "give a directory that phalanx doctor --save-snapshot wrote"
        raise UserError("--from-snapshot", str(from_snapshot), "is not a directory", fix=fix)
    machine = Machine(from_snapshot, save_snapshot)
    if topology is not None:
        # An existing file may be the topology of an earlier machine.
        try:
            read_topology(topology)
        except UserError:
            check_replaceable("--topology", topology, "topology")
        try:
            topology.write_text(topology_matrix(machine))
        except CheckSkipped as skipped:
            problem = f"cannot be written: {skipped}"
            raise UserError("--topology", str(topology), problem, fix="remove --topology") from None
        print(f"wrote {topology}; use it with phalanx placement RUN.toml --topology {topology}", file=sys.stderr)
    if save_report is None:
        return run_checks.run_all_checks(machine, expected, with_facts=save_snapshot is not None)
    save_report.mkdir(parents=True, exist_ok=True)
    node = run_checks.examine_node(machine, expected, clock_offset_seconds=storage_clock(save_report))
    print(f"wrote {write_node_report(save_report, node)}", file=sys.stderr)
    return list(node.findings)


def _check_collectives(run: Path, nproc: int | None, overrides: list[str]) -> list[DoctorFinding]:
    from phalanx.cli.commands.auto_layout import choose_layout_for
    from phalanx.cost.exact.layout_checks import assume_no_recomputation, check_layout
    from phalanx.spec.files.load import load_run

    run_spec = load_run(run, overrides)
    if run_spec.cluster.nodes > 1:
        fix = "start each node with torchrun -m phalanx.doctor.multi_node_benchmark, or set cluster.nodes = 1"
        problem = "is more than the one node whose ranks --collectives starts"
        raise UserError("cluster.nodes", run_spec.cluster.nodes, problem, fix)
    if run_spec.auto_layout:
        run_spec, _ = choose_layout_for(run_spec, nproc or run_spec.cluster.nproc_per_node)
    run_spec = assume_no_recomputation(run_spec)
    from phalanx.doctor.multi_node_benchmark import launch_check
    from phalanx.launch.process import select_nproc
    from phalanx.spec.resolved_run import ResolvedRun

    ranks = select_nproc(run_spec, nproc)
    if ranks == 1:
        raise UserError("--nproc", 1, "leaves no peer to communicate with", fix="start 2 ranks or more")
    check_layout(ResolvedRun(run_spec, ranks))
    return launch_check(run_spec, ranks)
