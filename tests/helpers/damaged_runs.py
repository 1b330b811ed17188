"""Run directories with every file that Phalanx writes, to damage, and every command that reads them."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from phalanx.cli.commands import watch
from phalanx.cli.main import app
from phalanx.cli.views.report import render_live
from phalanx.data.tokenizer import load_tokenizer
from phalanx.debug.collective_order import COLLECTIVE, LoggedCall
from phalanx.debug.explain_run import failure_headline, suspect_ranks
from phalanx.debug.oom import describe_kill
from phalanx.report.compare_runs import report_data
from phalanx.report.export.prometheus import RunMetrics
from phalanx.report.facts import report_facts
from phalanx.report.html.page import page
from phalanx.report.measured_run import read_measured_run, with_measured_parts
from phalanx.report.run_data import read_run
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, check_manifest, checkpoints
from phalanx.runs.create import MARKER_FILE, is_finished, latest_manifest, read_run_directory
from phalanx.runs.events import FAILED, QUARANTINED, ROLLED_BACK, STARTED, append_event
from phalanx.runs.hang_dumps import calls_file, fault_file, write_dump, write_failure
from phalanx.runs.lock import check_not_running
from phalanx.runs.step_records import gpu_trace_file
from phalanx.runs.swarm_records import RoundRecord
from phalanx.spec.files.load import load_run
from phalanx.spec.files.write import to_toml
from phalanx.spec.formatting import printable
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.spec.terminal import Terminal
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.serve import initial_pieces
from phalanx.swarm.tensor_files import TensorFileError
from phalanx.train.checkpoint.load_model import load_trained_model
from tests.helpers.gpu_samples import USUAL
from tests.helpers.gpu_traces import step_events, write_trace
from tests.helpers.hang_dumps import BUSY, WAITING, make_dump
from tests.helpers.local_swarm import tiny_swarm_run
from tests.helpers.trained_runs import hybrid_run

SAMPLE = re.compile(r'[a-z_0-9]+\{([a-z]+="[^"\n]*(\\.[^"\n]*)*",?)+\} (NaN|[-+.0-9e]+)')
KERNELS = {"count": 3, "seconds": 0.02}
GPU_PROFILE: dict[str, Any] = {
    "seconds": 0.1,
    "compute_seconds": 0.05,
    "communication_seconds": 0.03,
    "exposed_communication_seconds": 0.02,
    "memory_seconds": 0.01,
    "exposed_memory_seconds": 0.01,
    "idle_seconds": 0.02,
    "late_launch_seconds": 0.01,
    "late_launches": 2,
    "families": {"matmul": KERNELS, "nccl": KERNELS},
    "groups": [
        {
            "group": "3",
            "description": "mesh_dp_shard",
            "ranks": 2,
            "busy_seconds": 0.03,
            "exposed_seconds": 0.02,
            "collectives": [{**KERNELS, "collective": "allreduce", "busy_seconds": 0.02}],
        }
    ],
}


def finished_run(folder: Path) -> Path:
    """Return a finished run with profiled steps, whose ranks also have GPU records."""
    directory = Path(shutil.copytree(hybrid_run(), folder / "finished"))
    for rank in range(4):
        file = directory / "trace" / f"rank-{rank:05d}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [line for line in lines if "stages" in line]
        for line in steps[::2]:
            line["gpu_sample"] = {**USUAL, "energy_joules": 50.0 * line["step"], "throttle_reasons": ["hw_slowdown"]}
        steps[-1]["gpu"] = GPU_PROFILE
        _write_lines(file, lines)
    write_trace(gpu_trace_file(directory, 0, 8), step_events("step"))
    (directory / "from_hf").mkdir()
    (directory / "from_hf" / "config.json").write_text('{"model_type": "qwen3"}')
    return directory


def hung_run(folder: Path) -> Path:
    """Return a run whose ranks hung in collectives, after earlier failures."""
    directory = Path(shutil.copytree(hybrid_run(), folder / "hung"))
    sizes = ParallelDims(dp_shard=2, pp=2)
    (directory / "hangs").mkdir()
    for rank in range(4):
        names = make_dump(rank, sizes, [], WAITING)["groups"]
        calls = [
            {
                "group": next(iter(names)),
                "number": number,
                "operation": "all_reduce",
                "inputs": [[4 + (rank == 2)]],
                "outputs": [[4]],
                "dtypes": ["Float"],
                "over": number == 1,
                "at": ["/x/mine/model.py", 7, "forward"],
            }
            for number in (1, 2)
        ]
        dump = make_dump(rank, sizes, calls, BUSY if rank == 3 else WAITING, sibling_states={"1": "S", "3": "D"})
        if rank != 1:
            write_dump(directory, dump)
        call = LoggedCall(
            kind=COLLECTIVE,
            group="0",
            ranks=(0, 1, 2, 3),
            signature="all_to_all of 8 float32",
            caller="model.py:7 (forward)",
            sent=(2, 2, 2, 2),
            received=(2, 2, 2, 2),
        )
        calls_file(directory, rank).write_text(f"{call.to_json()}\n0\n0\n")
    stack = 'Current thread 0x00 (most recent call first):\n  File "/a/b.py", line 3 in work\n'
    fault_file(directory, 1).write_text(f"Fatal Python error: Segmentation fault\n\n{stack}")
    failure = {"rank": 0, "step": 3, "time": time.time(), "reason": "RuntimeError: lost\nmore", "code": 1}
    write_failure_folder(directory, {**failure, "traceback": "Traceback", "final": False, "suspect_ranks": [1]})
    append_event(directory, FAILED, rank=1, step=3, reason="was killed by SIGKILL", verdict=["why: it"], local=True)
    append_event(directory, STARTED, ranks=4, step=2, launcher=7, alive_until=time.time() - 9)
    append_event(directory, ROLLED_BACK, after=3, to=2, reason="loss is nan")
    append_event(directory, QUARANTINED, checkpoint="step-00000002", problem="checksum of a is wrong")
    append_event(directory, STARTED, ranks=4, step=2, launcher=7, alive_until=None)
    return directory


def write_failure_folder(directory: Path, record: dict[str, Any]) -> None:
    """Write a failure record, and one of an earlier start."""
    write_failure(directory, record)
    earlier = directory / "failures" / "earlier"
    earlier.mkdir(parents=True)
    shutil.copy(directory / "failures" / "rank-00000.json", earlier / "rank-00000-20260101T000000.json")


def swarm_node(folder: Path) -> Path:
    """Return the directory of a swarm node."""
    directory = Path(shutil.copytree(hybrid_run(), folder / "node"))
    (directory / "run.toml").write_text(to_toml(tiny_swarm_run(folder).model_copy(update={"name": "node"})))
    rounds = [
        RoundRecord(
            round=number,
            steps=3,
            tokens=300,
            experts=2,
            train_seconds=2.0,
            code_seconds=0.1,
            send_seconds=0.2,
            wait_seconds=0.3,
            receive_seconds=0.4,
            sent_bytes=1000,
            received_bytes=2000,
            initial_bytes=500,
            held_bytes=9000,
            seconds=3.0,
            refused="" if number else "norm: it is too large",
        )
        for number in range(3)
    ]
    _write_lines(directory / "swarm.jsonl", [asdict(record) for record in rounds])
    return directory


def swarm_coordinator(folder: Path) -> Path:
    """Return the directory of a swarm's coordinator."""
    run = tiny_swarm_run(folder).model_copy(update={"name": "lead"})
    directory = folder / "lead"
    directory.mkdir()
    Coordinator(run, directory, initial_pieces(run)).journal.close()
    (directory / "run.toml").write_text(to_toml(run))
    (directory / MARKER_FILE).write_text('{"made_by": "phalanx", "version": "0"}')
    shutil.copy(hybrid_run() / "tokenizer.json", directory)
    (directory / "rounds" / "000001").mkdir(parents=True)
    (directory / "rounds" / "000001" / "down").write_bytes(bytes(100))
    owners = [["ann"], ["bob"], ["ann"], ["bob"]]
    events: list[dict[str, Any]] = [
        {"kind": "joined", "node": node, "capacity": 4, "text": "text", "at": 1.0} for node in ("ann", "bob")
    ]
    for number in range(2):
        time = 10.0 * number + 2
        opened = {"round": number, "owners": owners, "text": {"ann": [6 * number, 3], "bob": [6 * number + 3, 3]}}
        events.append({"kind": "opened", **opened, "at": time})
        accepted = {"round": number, "tokens": 300, "steps": 3, "bytes": 1000, "norm": 1.0}
        events += [{"kind": "accepted", "node": node, **accepted, "at": time + 1} for node in ("ann", "bob")]
        events.append({"kind": "refused", "node": "cid", "round": number, "reason": "norm: too large", "at": time + 1})
        if number == 0:
            events.append({"kind": "dropped", "node": "bob", "round": 0, "reason": "norm: outlier", "at": time + 2})
        events.append({"kind": "committed", "round": number, "at": time + 3})
    events.append({"kind": "left", "node": "bob", "reason": "restarts", "at": 90.0})
    _write_lines(directory / "journal.jsonl", events)
    return directory


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


MAKERS: dict[str, Callable[[Path], Path]] = {
    "finished": finished_run,
    "hung": hung_run,
    "node": swarm_node,
    "lead": swarm_coordinator,
}


def _invoke(*arguments: object, exit_codes: tuple[int, ...] = (0,)) -> str:
    """Run a command in this process, and return its output."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    assert result.exit_code in exit_codes, result.output
    return result.output


def _read_by_report(directory: Path) -> str:
    text = _invoke("report", directory)
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    return text


def _read_by_report_json(directory: Path) -> str:
    output = _invoke("report", directory, "--json", "--html", directory / "a.html")
    json.loads(output, parse_constant=_reject_constant)
    return output


def _read_by_trace(directory: Path) -> str:
    _invoke("report", directory, "--json", "--trace", directory / "a.json")
    json.loads((directory / "a.json").read_text(), parse_constant=_reject_constant)
    return ""


def _read_by_live_view(directory: Path) -> str:
    """Render the terminal view of `phalanx watch`, and the page of --web."""
    facts = report_facts(read_run(directory))
    screen = StringIO()
    Terminal(file=screen, width=120).print(render_live(facts))
    page(report_data([facts, facts]), every_seconds=1.0)
    return screen.getvalue()


def _read_by_prometheus(directory: Path) -> str:
    metrics = RunMetrics(directory)
    text = [metrics.exposition_text(checkpoints(directory / CHECKPOINTS_DIR)) for _ in range(2)][-1]
    for line in text.splitlines():
        assert line.startswith("#") or SAMPLE.fullmatch(line), line
    return ""


def _read_by_watch(directory: Path) -> str:
    """Run `phalanx watch` until it would wait."""
    with patch.object(watch.time, "sleep", side_effect=KeyboardInterrupt):
        return _invoke("watch", directory, exit_codes=(0, 1))


def _read_by_calibration(directory: Path) -> str:
    return repr(with_measured_parts(read_measured_run(directory), directory))


def _read_by_resume(directory: Path) -> str:
    """Read the files that the launcher reads before it continues a run."""
    run, _ = read_run_directory(directory)
    saved = checkpoints(directory / CHECKPOINTS_DIR)
    if saved:
        check_manifest(run, latest_manifest(saved))
    is_finished(directory)
    failure_headline(directory)
    suspect_ranks(directory)
    describe_kill(directory, 0, "was killed by SIGKILL", oom_kills=1)
    check_not_running(directory, 0.0)
    return ""


def _read_by_model(directory: Path) -> str:
    trained = load_trained_model(directory)
    tokenizer = load_tokenizer(trained.tokenizer_file)
    return printable(tokenizer.decode(tokenizer.encode_batch(["import"])[0].tolist()))


def _read_by_coordinator(directory: Path) -> str:
    run = load_run(directory / "run.toml", environment={})
    if run.swarm is None:  # `phalanx swarm serve` refuses such a run
        return ""
    coordinator = Coordinator(run, directory, initial_pieces(run))
    try:
        with suppress(TensorFileError):  # `run_rounds` reports the missing update, and tries again
            coordinator.tick()
        return json.dumps(coordinator.status())
    finally:
        coordinator.journal.close()


READERS: dict[str, Callable[[Path], str]] = {
    "report": _read_by_report,
    "report --json": _read_by_report_json,
    "report --trace": _read_by_trace,
    "live view": _read_by_live_view,
    "prometheus": _read_by_prometheus,
    "watch": _read_by_watch,
    "debug": lambda directory: _invoke("debug", directory),
    "debug --json": lambda directory: _invoke("debug", directory, "--json"),
    "experts": lambda directory: _invoke("experts", directory, "--ep", 2),
    "calibrate": _read_by_calibration,
    "data step": lambda directory: _invoke("data", "step", directory, "--step", 2),
    "resume": _read_by_resume,
    "model": _read_by_model,
    "serve": _read_by_coordinator,
}
"""Programs that read a run directory, and their output."""
NOT_FOR = {
    "lead": ("report --trace", "experts", "calibrate", "data step", "resume"),
    "node": ("experts", "resume", "model", "serve"),
    "finished": ("serve",),
    "hung": ("serve",),
}
"""Kinds of directories, and the programs that do not read them."""


def readers_of(kind: str) -> list[str]:
    """Return the names of the programs that read a kind of directory."""
    return [name for name in READERS if name not in NOT_FOR[kind]]


def _reject_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")
