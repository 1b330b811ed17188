"""`phalanx runs`: the table of run directories, also of damaged ones and of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.create import claim_run_directory
from phalanx.runs.events import FAILED, FINISHED, STARTED, append_event
from phalanx.runs.lock import acquire_run_lock
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from tests.helpers.cli_runner import command_json, command_output

STEPS = 100


def write_run(directory: Path, steps: int, loss: float, layout: dict[str, Any] | None = None) -> Path:
    """Write a run directory with records of its steps, an evaluation every 30 of them, and its start."""
    claim_run_directory(directory)
    table = {"model": {"preset": "tiny"}, "training": {"steps": STEPS}, "layout": layout or {}}
    (directory / "run.toml").write_text(to_toml(run_from_table(table)))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        record = {"step": step, "loss": loss + 1 / step, "step_seconds": 0.1, "tokens_per_second": 1000.0, "ranks": 4}
        lines.append({**record, "time": 1.7e9 + loss * 1000 + step})
        if step % 30 == 0:
            lines.append({"step": step, "held_out_loss": loss + 2 / step, "time": 1.7e9 + loss * 1000 + step})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    append_event(directory, STARTED, ranks=4, step=0)
    lock = acquire_run_lock(directory)
    assert lock is not None
    lock.close()
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with a run in each state, and with directories of other programs."""
    append_event(write_run(tmp_path / "done", STEPS, 2.0), FINISHED, step=STEPS)
    append_event(write_run(tmp_path / "stopped", 45, 3.0, {"tp": 2, "data_parallel": "zero1"}), FINISHED, step=45)
    append_event(write_run(tmp_path / "failed", 20, 4.0), FAILED, rank=0, step=20, reason="lost")
    write_run(tmp_path / "killed", 10, 5.0)
    damaged = write_run(tmp_path / "damaged", 10, 6.0)
    (damaged / "run.toml").write_bytes(b"\xff{")
    with (damaged / "metrics.jsonl").open("ab") as file:
        file.write(b'[3]\n{"step": 11, "loss"')
    (tmp_path / "marker").mkdir()
    (tmp_path / "marker" / "run.toml").mkdir()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "notes.txt").touch()
    return tmp_path


def test_runs_describes_each_state_and_damage(runs: Path) -> None:
    result = command_json("runs", runs)
    rows = {Path(row["directory"]).name: row for row in result["runs"]}
    states = {name: (row["state"], row["step"], row["steps"]) for name, row in rows.items()}
    assert states == {
        "done": ("finished", 100, 100),
        "stopped": ("stopped", 45, 100),
        "failed": ("failed", 20, 100),
        "killed": ("killed", 10, 100),
        "damaged": ("killed", 10, None),
        "marker": ("unreadable", 0, None),
    }
    assert rows["stopped"]["layout"] == "zero1 dp 2 tp 2"
    assert rows["stopped"]["model"].startswith("tiny")
    assert rows["stopped"]["loss"] == 3 + 1 / 45
    assert rows["stopped"]["held_out_loss"] == 3 + 2 / 30
    assert rows["failed"]["held_out_loss"] is None
    assert rows["damaged"]["loss"] == 6.1
    assert "run.toml: is not valid TOML" in rows["damaged"]["problems"][0]
    assert [Path(path).name for path in result["others"]] == ["wandb"]


def test_runs_sorts_by_a_column_with_unknown_values_last(runs: Path) -> None:
    lines = command_output("runs", runs, "--sort", "validation", width=200).splitlines()
    assert [Path(line.split()[0]).name for line in lines[1:3]] == ["done", "stopped"]
    assert lines[1].split()[1:6] == ["finished", "100/100", "2.0100", "2.0222", "1,000"]
    assert lines[-1] == "1 directory is not a run: wandb"
    assert "\x1b" not in "".join(lines)
    newest_first = [Path(row["directory"]).name for row in command_json("runs", runs)["runs"]]
    assert newest_first[-1] == "marker" or newest_first[0] == "marker"  # it has the time of its folder
    with pytest.raises(UserError, match=r"--sort = 'valid' is not a column"):
        command_output("runs", runs, "--sort", "valid")


def test_runs_accepts_run_directories_and_shows_an_active_one(runs: Path) -> None:
    lock = acquire_run_lock(runs / "killed")
    rows = command_json("runs", runs / "killed", runs / "done", runs)["runs"]
    assert lock is not None
    lock.close()
    assert len(rows) == 6
    assert next(row for row in rows if row["directory"].endswith("killed"))["state"] == "running"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        command_output("runs", runs / "missing")
