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


def comparison_row(facts: dict[str, Any], role: str, quantity: str) -> dict[str, Any]:
    (only,) = [row for row in facts["comparison"] if (row["role"], row["quantity"]) == (role, quantity)]
    return only


def test_swarm_node_and_coordinator_record_equal_bytes_per_round(swarm_run):
    _, folder = swarm_run
    updates = report_facts(read_run(folder / "lead"))["swarm"]["updates"]
    assert [update["round"] for update in updates] == [0, 1, 2, 3]
    for name in ("ann", "bob"):
        rounds = report_facts(read_run(folder / name))["swarm"]["rounds"]
        assert rounds["bytes"]["sent"] == [update["bytes"][name] for update in updates]
        assert rounds["steps"] == [3] * 4


def test_swarm_report_bytes_and_memory_match_formulas(swarm_run):
    run, folder = swarm_run
    facts, node = report_facts(read_run(folder / "ann")), node_share(run.model, "spes+", 2)
    predicted = round_bytes(node, "spes+", "int8")
    state = comparison_row(facts, "round", "state held")
    assert state["measured"] == state["predicted"] == state_bytes(node)
    for quantity, predicted_bytes in (("sent", predicted.up), ("received", predicted.down)):
        per_round, total = comparison_row(facts, "round", quantity), comparison_row(facts, "rounds", quantity)
        assert per_round["predicted"] == predicted_bytes
        assert total["predicted"] == 4 * predicted_bytes
        # Names, checksums and short blocks are a large part of the bytes of this small model.
        assert predicted_bytes < per_round["measured"] < 1.5 * predicted_bytes
        assert total["measured"] == 4 * per_round["measured"]
    initial_weights = comparison_row(facts, "rounds", "initial weights")
    assert initial_weights["measured"] == initial_weights["predicted"] == 4 * count_parameters(run.model).total
    total = comparison_row(facts, "rounds", "communication")["measured"]
    rounds = facts["swarm"]["rounds"]
    assert (
        total
        == sum(rounds["bytes"]["sent"]) + sum(rounds["bytes"]["received"])
        == rounds["sent_bytes"] + rounds["received_bytes"]
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
    facts = report_facts(read_run(folder / "bob"))
    rounds = facts["swarm"]["rounds"]
    for number, total_seconds in enumerate(rounds["total_seconds"]):
        assert 0 < sum(seconds[number] for seconds in rounds["seconds"].values()) <= total_seconds
        assert all(seconds[number] > 0 for seconds in rounds["seconds"].values())
    utilization = comparison_row(facts, "round", "utilization")["measured"]
    assert utilization == rounds["utilization"] == sum(rounds["seconds"]["training"]) / sum(rounds["total_seconds"])


def test_swarm_round_time_is_predicted_from_measured_step_and_link(swarm_run):
    """The link has 1 kB/s up and 2 kB/s down, steps take a second, and no node waits."""
    run, _ = swarm_run
    traffic = round_bytes(node_share(run.model, "spes+", 2), "spes+", "int8")
    up, down = round(traffic.up), round(traffic.down)
    record = RoundRecord(
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
    predicted = {(row.role, row.quantity): row.predicted for row in round_rows(run, 1, [record, record])}
    round_seconds = 3.0 + traffic.up / 1000 + traffic.down / 2000
    assert predicted["round", "whole round"] == pytest.approx(round_seconds, rel=1e-6)
    assert predicted["round", "utilization"] == pytest.approx(3.0 / round_seconds, rel=1e-6)
    several = {row.quantity: row.predicted for row in round_rows(run, 2, [record]) if row.role == "round"}
    assert several["state held"] is None  # unknown for several ranks, whose shares depend on the layout


def truncate_swarm_records(node: Path) -> None:
    content = (node / "swarm.jsonl").read_text()
    (node / "swarm.jsonl").write_text(content[:-20])


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
    (facts,) = command_json("report", node_directory)["runs"]
    assert facts["swarm"]["rounds"]["round"] == rounds
    assert message in "\n".join(facts["problems"])
    assert "of a round of the swarm" in command_output("report", node_directory)


def test_report_treats_swarm_node_without_round_records_as_plain_run(node_directory):
    (node_directory / "swarm.jsonl").unlink()
    (facts,) = command_json("report", node_directory)["runs"]
    assert "swarm" not in facts
    assert "no round has been written to swarm.jsonl yet" in facts["problems"]
    assert facts["curves"]["step"] == list(range(1, 13))
    (node_directory / "run.toml").write_text("[model")
    assert "run.toml is not valid in this version" in command_output("report", node_directory)


def test_swarm_round_bytes_are_measured_when_run_toml_is_unreadable(node_directory):
    (node_directory / "run.toml").write_text("[model")
    (facts,) = command_json("report", node_directory)["runs"]
    assert comparison_row(facts, "round", "sent")["predicted"] is None
    assert comparison_row(facts, "round", "sent")["measured"] > 0


@pytest.mark.parametrize("name", ["ann", "lead"])
def test_report_page_swarm_figure_matches_facts(swarm_run, name):
    from plotly.graph_objects import Figure

    facts = report_facts(read_run(swarm_run[1] / name))
    text = main(report_data([facts]))
    figure = parse_embedded_json(text, "figures")["rounds-0"]
    Figure(data=figure["data"], layout=figure["layout"])  # raises for unknown properties
    traces = {trace["name"]: trace["y"] for trace in figure["data"]}
    rounds, updates = facts["swarm"]["rounds"], facts["swarm"]["updates"]
    if rounds:
        assert traces == rounds["seconds"] | rounds["bytes"]
    else:
        assert traces == {node: [update["bytes"][node] for update in updates] for node in ("ann", "bob")}
    for title, value, _ in formatting.round_totals(facts):
        assert f"<dt>{title}</dt><dd>{value}<" in text
    assert "No step was profiled" not in text


def test_live_view_and_watch_print_swarm_rounds(swarm_run):
    from rich.console import Console

    facts = report_facts(read_run(swarm_run[1] / "ann"))
    console = Console(width=160, file=io.StringIO())
    console.print(render_live(facts))
    text = console.file.getvalue()
    utilization = formatting.format_number(facts["swarm"]["rounds"]["utilization"], "")
    assert "rounds 4 of 4" in text
    assert f"training {utilization} of the time" in text
    lines = command_output("watch", swarm_run[1] / "ann").splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("round")] == [
        f"round {number}" for number in range(4)
    ]
    assert sum(line.startswith("step") and "held-out" not in line for line in lines) == 12


def test_watch_follows_swarm_node_until_last_round(node_directory):
    *lines, last = (node_directory / "swarm.jsonl").read_text().splitlines(keepends=True)
    (node_directory / "swarm.jsonl").write_text("".join(lines))
    lock = acquire_run_lock(node_directory)
    watch = [sys.executable, "-m", "phalanx", "watch", str(node_directory), "--every", "0.1"]
    with start_python(watch, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("round 2") for line in process.stdout)  # all steps are finished then
            with (node_directory / "swarm.jsonl").open("a") as file:
                file.write(last)
            stdout, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            lock.close()
    assert (process.returncode, stdout.startswith("round 3: 3 steps")) == (0, True)


def test_report_of_swarm_coordinator_lists_updates_per_round(swarm_run, tmp_path):
    text = command_output("report", swarm_run[1] / "lead", width=160)
    assert "coordinator of a swarm; the directories of its nodes are nodes/NAME" in text
    assert "rounds 4 of 4" in text
    lines = command_output("watch", swarm_run[1] / "lead").splitlines()
    assert [line.startswith(f"round {index}: 2 of 2 nodes sent ") for index, line in enumerate(lines)] == [True] * 4
    directory = copy_run(swarm_run[1] / "lead", tmp_path)
    events = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    third_commit = next(
        index for index, event in enumerate(events) if event["kind"] == "committed" and event["round"] == 2
    )
    late = {"kind": "refused", "round": 1, "node": "bob", "reason": "closed", "message": "closed: round 1", "at": 0.0}
    write_json_lines(directory / "journal.jsonl", [*events[:third_commit], late])
    (facts,) = command_json("report", directory)["runs"]
    assert [update["refused"] for update in facts["swarm"]["updates"]] == [{}, {"bob": 1}, {}]
    assert [update["seconds"] is None for update in facts["swarm"]["updates"]] == [False, False, True]
    assert facts["problems"][0].startswith("step 6 of 12: the run ")
    assert "; refused 1 x: bob" in command_output("report", directory, width=160)


def test_report_has_no_swarm_section_for_plain_run():
    facts = report_facts(read_run(two_rank_run()))
    assert "swarm" not in facts
    assert "leads" not in facts["run"]
    text = main(report_data([facts]))
    assert "swarm" not in text.partition("<script")[0]
