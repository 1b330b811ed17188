"""Swarm rounds in the report: records of the nodes and the coordinator of a real swarm, compared with formulas."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.views.report import render_live
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.swarm import node_share, round_bytes, state_bytes
from phalanx.report import formatting
from phalanx.report.compare_runs import report_data
from phalanx.report.facts import report_facts
from phalanx.report.html.page import main
from phalanx.report.run_data import read_run
from phalanx.report.swarm_rounds import round_rows
from phalanx.runs.create import MARKER_FILE
from phalanx.runs.lock import acquire_run_lock
from phalanx.runs.swarm_records import RoundRecord
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import Method
from phalanx.testing.processes import start_python
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.local_swarm import tiny_swarm_run, train_local_swarm
from tests.helpers.report_page import parse_embedded_json
from tests.helpers.trained_runs import copy_run, two_rank_run


def write_json_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def swarm_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Path]:
    """Return the directories of two nodes and their coordinator."""
    folder = tmp_path_factory.mktemp("swarm")
    run = tiny_swarm_run(folder)
    _, members = train_local_swarm(run, folder, ("ann", "bob"))
    for name in ("ann", "bob"):
        write_json_lines(folder / name / "swarm.jsonl", members.rounds[name])
        write_json_lines(folder / name / "metrics.jsonl", [*members.steps[name], members.evaluations[name]])
    for name in ("ann", "bob", "lead"):
        (folder / name / "run.toml").write_text(to_toml(run.model_copy(update={"name": name})))
        (folder / name / MARKER_FILE).write_text('{"made_by": "phalanx"}')
    return run, folder


@pytest.fixture
def node_directory(swarm_run: tuple[RunSpec, Path], tmp_path: Path) -> Path:
    """Return a copy of a node's directory."""
    return copy_run(swarm_run[1] / "ann", tmp_path)


def comparison_row(found: dict[str, Any], role: str, what: str) -> dict[str, Any]:
    (only,) = [row for row in found["comparison"] if (row["role"], row["quantity"]) == (role, what)]
    return only


def test_swarm_node_and_coordinator_record_equal_bytes_per_round(swarm_run):
    _, folder = swarm_run
    updates = report_facts(read_run(folder / "lead"))["swarm"]["updates"]
    assert [each["round"] for each in updates] == [0, 1, 2, 3]
    for name in ("ann", "bob"):
        own = report_facts(read_run(folder / name))["swarm"]["rounds"]
        assert own["bytes"]["sent"] == [each["bytes"][name] for each in updates]
        assert own["steps"] == [3] * 4


def test_swarm_report_bytes_and_memory_match_formulas(swarm_run):
    run, folder = swarm_run
    found, node = report_facts(read_run(folder / "ann")), node_share(run.model, "spes+", 2)
    sent = round_bytes(node, "spes+", "int8")
    held = comparison_row(found, "round", "state held")
    assert held["measured"] == held["predicted"] == state_bytes(node)
    for what, said in (("sent", sent.up), ("received", sent.down)):
        each, whole = comparison_row(found, "round", what), comparison_row(found, "rounds", what)
        assert each["predicted"] == said
        assert whole["predicted"] == 4 * said
        assert said < each["measured"] < 1.5 * said  # of this model names, checksums and short blocks are a large part
        assert whole["measured"] == 4 * each["measured"]
    first = comparison_row(found, "rounds", "initial weights")
    assert first["measured"] == first["predicted"] == 4 * count_parameters(run.model).total
    whole = comparison_row(found, "rounds", "communication")["measured"]
    own = found["swarm"]["rounds"]
    assert (
        whole == sum(own["bytes"]["sent"]) + sum(own["bytes"]["received"]) == own["sent_bytes"] + own["received_bytes"]
    )


@pytest.mark.parametrize(
    ("method", "changes", "owned"),
    [
        ("ddp", {"every": 1}, 0),
        ("diloco", {}, 0),
        ("spes", {"frozen_expert_codec": "int8"}, 2),
        ("spes+", {"frozen_expert_codec": "bf16", "delay": 1}, 2),
    ],
)
def test_swarm_node_state_bytes_equal_formula(tmp_path: Path, method: Method, changes: dict[str, Any], owned: int):
    run = tiny_swarm_run(tmp_path, method=method, **changes)
    _, members = train_local_swarm(run, tmp_path, ("ann", "bob"))
    node = node_share(run.model, method, owned)
    for rounds in members.rounds.values():
        assert {line["held_bytes"] for line in rounds} == {state_bytes(node, run.swarm.frozen_expert_codec)}


def test_swarm_round_phase_seconds_fit_round_and_give_utilization(swarm_run):
    """Without delay, no communication overlaps training."""
    _, folder = swarm_run
    found = report_facts(read_run(folder / "bob"))
    own = found["swarm"]["rounds"]
    for at, whole in enumerate(own["total_seconds"]):
        assert 0 < sum(seconds[at] for seconds in own["seconds"].values()) <= whole
        assert all(seconds[at] > 0 for seconds in own["seconds"].values())
    used = comparison_row(found, "round", "utilization")["measured"]
    assert used == own["utilization"] == sum(own["seconds"]["training"]) / sum(own["total_seconds"])


def test_swarm_round_time_is_predicted_from_measured_step_and_link(swarm_run):
    """The link has 1 kB/s up and 2 kB/s down, steps take a second, and no node waits."""
    run, _ = swarm_run
    sent = round_bytes(node_share(run.model, "spes+", 2), "spes+", "int8")
    up, down = round(sent.up), round(sent.down)
    spent = RoundRecord(
        round=0,
        steps=3,
        tokens=300,
        experts=2,
        train_seconds=3.0,
        send_seconds=up / 1000,
        receive_seconds=down / 2000,
        sent_bytes=up,
        received_bytes=down,
        seconds=100.0,
    )
    found = {(row.role, row.quantity): row.predicted for row in round_rows(run, 1, [spent, spent])}
    whole = 3.0 + sent.up / 1000 + sent.down / 2000
    assert found["round", "whole round"] == pytest.approx(whole, rel=1e-6)
    assert found["round", "utilization"] == pytest.approx(3.0 / whole, rel=1e-6)
    several = {row.quantity: row.predicted for row in round_rows(run, 2, [spent]) if row.role == "round"}
    assert several["state held"] is None  # what ranks share is the layout's affair


def truncate_swarm_records(node: Path) -> None:
    whole = (node / "swarm.jsonl").read_text()
    (node / "swarm.jsonl").write_text(whole[:-20])


def replace_first_record_with_other_version(node: Path) -> None:
    lines = [json.loads(line) for line in (node / "swarm.jsonl").read_text().splitlines()]
    write_json_lines(node / "swarm.jsonl", [{"step": 3, "round": 0}, *lines[1:]])


def duplicate_swarm_records(node: Path) -> None:
    lines = (node / "swarm.jsonl").read_text()
    (node / "swarm.jsonl").write_text(lines + lines)


@pytest.mark.parametrize(
    ("damage", "rounds", "message"),
    [
        (truncate_swarm_records, [0, 1, 2], ""),
        (replace_first_record_with_other_version, [1, 2, 3], "ann/swarm.jsonl: 1 lines cannot be read"),
        (duplicate_swarm_records, [0, 1, 2, 3], ""),
    ],
)
def test_report_shows_readable_rounds_of_damaged_swarm_records(
    node_directory: Path, damage: Callable[[Path], None], rounds: list[int], message: str
):
    damage(node_directory)
    (found,) = command_json("report", node_directory)["runs"]
    assert found["swarm"]["rounds"]["round"] == rounds
    assert message in "\n".join(found["problems"])
    assert "of a round of the swarm" in command_output("report", node_directory)


def test_report_treats_swarm_node_without_round_records_as_plain_run(node_directory):
    (node_directory / "swarm.jsonl").unlink()
    (found,) = command_json("report", node_directory)["runs"]
    assert "swarm" not in found
    assert "no round has been written to swarm.jsonl yet" in found["problems"]
    assert found["curves"]["step"] == list(range(1, 13))
    (node_directory / "run.toml").write_text("[model")
    assert "run.toml is not valid in this version" in command_output("report", node_directory)


def test_swarm_round_bytes_are_measured_when_run_toml_is_unreadable(node_directory):
    (node_directory / "run.toml").write_text("[model")
    (found,) = command_json("report", node_directory)["runs"]
    assert comparison_row(found, "round", "sent")["predicted"] is None
    assert comparison_row(found, "round", "sent")["measured"] > 0


@pytest.mark.parametrize("name", ["ann", "lead"])
def test_report_page_swarm_figure_matches_facts(swarm_run, name):
    from plotly.graph_objects import Figure

    found = report_facts(read_run(swarm_run[1] / name))
    text = main(report_data([found]))
    figure = parse_embedded_json(text, "figures")["rounds-0"]
    Figure(data=figure["data"], layout=figure["layout"])  # raises for a property that it does not know
    drawn = {trace["name"]: trace["y"] for trace in figure["data"]}
    own, updates = found["swarm"]["rounds"], found["swarm"]["updates"]
    if own:
        assert drawn == own["seconds"] | own["bytes"]
    else:
        assert drawn == {who: [each["bytes"][who] for each in updates] for who in ("ann", "bob")}
    for title, value, _ in formatting.round_totals(found):
        assert f"<dt>{title}</dt><dd>{value}<" in text
    assert "No step was profiled" not in text


def test_live_view_and_watch_print_swarm_rounds(swarm_run):
    from rich.console import Console

    found = report_facts(read_run(swarm_run[1] / "ann"))
    console = Console(width=160, file=io.StringIO())
    console.print(render_live(found))
    text = console.file.getvalue()
    used = formatting.format_number(found["swarm"]["rounds"]["utilization"], "")
    assert "rounds 4 of 4" in text
    assert f"training {used} of the time" in text
    lines = command_output("watch", swarm_run[1] / "ann").splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("round")] == [f"round {at}" for at in range(4)]
    assert sum(line.startswith("step") for line in lines) == 12


def test_watch_follows_swarm_node_until_last_round(node_directory):
    *lines, last = (node_directory / "swarm.jsonl").read_text().splitlines(keepends=True)
    (node_directory / "swarm.jsonl").write_text("".join(lines))
    held = acquire_run_lock(node_directory)
    watch = [sys.executable, "-m", "phalanx", "watch", str(node_directory), "--every", "0.1"]
    with start_python(watch, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("round 2") for line in process.stdout)  # all steps are done by then
            with (node_directory / "swarm.jsonl").open("a") as file:
                file.write(last)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            held.close()
    assert (process.returncode, said.startswith("round 3: 3 steps")) == (0, True)


def test_report_of_swarm_coordinator_lists_updates_per_round(swarm_run, tmp_path):
    text = command_output("report", swarm_run[1] / "lead", width=160)
    assert "coordinator of a swarm; the directories of its nodes are nodes/NAME" in text
    assert "rounds 4 of 4" in text
    lines = command_output("watch", swarm_run[1] / "lead").splitlines()
    assert [line.startswith(f"round {at}: 2 of 2 nodes sent ") for at, line in enumerate(lines)] == [True] * 4
    directory = copy_run(swarm_run[1] / "lead", tmp_path)
    events = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    third = next(at for at, event in enumerate(events) if event["kind"] == "committed" and event["round"] == 2)
    late = {"kind": "refused", "round": 1, "node": "bob", "reason": "closed", "message": "closed: round 1", "at": 0.0}
    write_json_lines(directory / "journal.jsonl", [*events[:third], late])
    (found,) = command_json("report", directory)["runs"]
    assert [each["refused"] for each in found["swarm"]["updates"]] == [{}, {"bob": 1}, {}]
    assert [each["seconds"] is None for each in found["swarm"]["updates"]] == [False, False, True]
    assert found["problems"][0].startswith("step 6 of 12: the run ")
    assert "; refused 1 x: bob" in command_output("report", directory, width=160)


def test_report_has_no_swarm_section_for_plain_run():
    found = report_facts(read_run(two_rank_run()))
    assert "swarm" not in found
    assert "leads" not in found["run"]
    text = main(report_data([found]))
    assert "swarm" not in text.partition("<script")[0]
