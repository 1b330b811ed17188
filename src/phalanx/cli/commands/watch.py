"""`phalanx watch`: a run during training, in the terminal, on a local page, or for Prometheus."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from phalanx.spec.errors import UserError

RESTART_SECONDS = 60.0
"""Seconds after the last activity of a run until it counts as dead. A restart of ranks takes some seconds, mostly for
PyTorch's import. A rendezvous of nodes takes `recovery.last_call_timeout_seconds` more."""


def watch(
    run: Annotated[Path, Argument(help="Run directory.", metavar="RUN_DIR")],
    every: Annotated[float, Option(help="Refresh interval in seconds.", min=0.1, metavar="SECONDS")] = 2.0,
    web: Annotated[bool, Option("--web", help="Serve a live page to this machine only.")] = False,
    port: Annotated[int, Option(help="Port of the page; 0: any free port.", min=0, max=65535, metavar="N")] = 8642,
    prometheus: Annotated[
        int | None,
        Option(
            help="Serve metrics at /metrics on this port, on all addresses of this machine; 0: any free port.",
            min=0,
            max=65535,
            metavar="PORT",
        ),
    ] = None,
) -> None:
    """Watch a run while it trains: loss, speed, the parts of a step, and the bottleneck.

    The command ends with the run's last step, or on Ctrl-C. If the run ended before its last step, the exit code is 1;
    this takes a minute to decide, since a failed run may continue. Without a terminal it prints a line for each step.
    Pages and numbers are served until Ctrl-C, also for a run that has ended.

    Examples:

        phalanx watch runs/first

        phalanx watch runs/first --every 10 > log

        phalanx watch runs/first --web --port 0

        phalanx watch runs/first --prometheus 9400
    """
    from phalanx.report.run_data import read_run

    if web and prometheus is not None:
        fix = "start a second phalanx watch for it"
        raise UserError("--prometheus", prometheus, "cannot be combined with --web", fix=fix)
    # A directory that is not a run is rejected before any output.
    try:
        read_run(run)
    except UserError as error:
        if not run.exists():
            error.fix += "; a run that starts has its directory once its text is read"
        raise
    with suppress(KeyboardInterrupt):
        if prometheus is not None:
            from phalanx.cli.commands.watch_servers import serve_metrics

            serve_metrics(run, prometheus)
        elif web:
            from phalanx.cli.commands.watch_servers import serve_page

            serve_page(run, port, every)
        elif sys.stdout.isatty():
            from rich.live import Live

            from phalanx.cli.views.report import render_live
            from phalanx.spec.terminal import Terminal

            with Live(console=Terminal(), auto_refresh=False) as screen:
                for facts in _poll_facts(run, every):
                    screen.update(render_live(facts), refresh=True)
        else:
            from phalanx.cli.views.report import evaluation_lines, format_latest_step
            from phalanx.report.formatting import round_lines

            last_step = last_evaluation = num_printed = 0
            for facts in _poll_facts(run, every):
                steps = facts["curves"]["step"]
                new_steps = range(-sum(step > last_step for step in steps), 0)
                evaluations = evaluation_lines(facts)
                lines = [(steps[index], format_latest_step(facts, index)) for index in new_steps]
                lines += [(step, line) for step, line in evaluations if step > last_evaluation]
                for _, line in sorted(lines, key=lambda item: item[0]):
                    print(line, flush=True)
                last_step = steps[-1] if steps else 0
                last_evaluation = evaluations[-1][0] if evaluations else 0
                rounds = round_lines(facts)
                for line in rounds[num_printed:]:
                    print(line, flush=True)
                num_printed = len(rounds)


def _poll_facts(directory: Path, every_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the facts of a run repeatedly, until its last step is done.

    If the run ended before, this command exits with 1. It waits for a run that may be restarted.
    """
    from phalanx.report.facts import report_facts
    from phalanx.report.run_data import read_run

    reported = None
    while True:
        facts = report_facts(read_run(directory))
        yield facts
        run = facts["run"]
        # A swarm's node that has finished its steps still exchanges updates.
        rounds = facts.get("swarm", {"rounds": None})["rounds"]
        in_last_round = rounds and run["under_way"] and rounds["round"][-1] + 1 < facts["swarm"]["planned"]
        if run["step"] >= run.get("steps", float("inf")) and not in_last_round:
            return
        failure = "; ".join(facts["problems"]) if run["failed"] or run["under_way"] is False else None
        if failure and not run["under_way"] and _has_ended(directory):
            print(f"phalanx: {failure}", file=sys.stderr)
            raise typer.Exit(1)
        if failure and failure != reported:
            print(f"phalanx: {failure}; waiting for the run to continue", file=sys.stderr)
        reported = failure
        time.sleep(every_seconds)


def _has_ended(directory: Path) -> bool:
    """Return whether a run has failed without a restart: by its own record, or because it is inactive."""
    from phalanx.runs.events import FINISHED, read_events

    events = read_events(directory)
    if events and events[-1]["kind"] == FINISHED:
        return True
    last_modified = 0.0
    for file in (*directory.iterdir(), *directory.glob("failures/*")):
        with suppress(OSError):  # it may have been deleted
            last_modified = max(last_modified, file.stat().st_mtime)
    return time.time() - last_modified > RESTART_SECONDS
