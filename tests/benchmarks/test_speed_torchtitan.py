"""The parts of the torchtitan benchmark that need no GPU: its inputs, and the parsing of its logs.

The logs were written by torchtitan 0.3.0 on the null GPU: `steps` by a complete run on PyTorch 2.14, `failed_step`
by a run on PyTorch 2.13, `import_error` by a run without Triton."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.gpu import speed_torchtitan
from benchmarks.gpu.harness import NotRunError, Table
from benchmarks.gpu.shapes import STEPS, WARM_UP, Shape, llama
from benchmarks.gpu.speed_torchtitan import (
    StepMetrics,
    failure_reason,
    parse_log,
    run_torchtitan,
    time_torchtitan,
    write_inputs,
)

LOGS = Path(__file__).parent / "torchtitan_logs"
SHAPE = Shape(llama(2, 64, 4, 2, 128, 300, 16), seq_len=16, micro_batch=4)


def read_log(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text()


def test_parse_log_reads_each_step() -> None:
    steps = parse_log(read_log("steps"))
    assert [step.step for step in steps] == list(range(1, 13))
    assert steps[:2] == [StepMetrics(1, 11.0, 0.10), StepMetrics(2, 1542.0, 0.11)]
    assert [step.step for step in parse_log(read_log("failed_step"))] == [1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("import_error", "ModuleNotFoundError: No module named 'triton'"),
        ("failed_step", "AttributeError: module 'torch.distributed' has no attribute 'set_timeout'"),
    ],
)
def test_failure_reason_is_error_of_rank(name: str, reason: str) -> None:
    assert failure_reason(read_log(name)) == reason


def test_failure_reason_is_last_line_where_no_error_is_named() -> None:
    assert failure_reason("one\nKilled\n") == "Killed"
    assert failure_reason("") == "it printed nothing"


def test_time_torchtitan_is_median_of_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_torchtitan, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(speed_torchtitan, "run_torchtitan", lambda folder: read_log("steps"))
    monkeypatch.setattr(speed_torchtitan, "STEPS", 8)
    result = time_torchtitan(SHAPE)
    assert result["seconds"] == SHAPE.tokens / 1518  # the mean of steps 5 to 12
    assert result["first"] == SHAPE.tokens / 11
    assert result["peak_bytes"] == 0.11 * 2**30
    monkeypatch.setattr(speed_torchtitan, "run_torchtitan", lambda folder: read_log("failed_step"))
    with pytest.raises(NotRunError, match=f"log has 1 steps of {WARM_UP + 8}"):
        time_torchtitan(SHAPE)


def test_row_says_why_torchtitan_did_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = Table(("trainer", "ms a step"))
    monkeypatch.setattr(speed_torchtitan, "find_spec", lambda name: None)
    table.measure("torchtitan", lambda: [time_torchtitan(SHAPE)["seconds"]])
    fails = [sys.executable, "-c", "raise ImportError('no such name')"]
    monkeypatch.setattr(speed_torchtitan, "command", lambda folder: fails)
    table.measure("torchtitan", lambda: [run_torchtitan(tmp_path)])
    waits = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(speed_torchtitan, "command", lambda folder: waits)
    monkeypatch.setattr(speed_torchtitan, "COMMAND_SECONDS", 0.1)
    table.measure("torchtitan", lambda: [run_torchtitan(tmp_path)])
    assert table.lines[2:] == [
        "| torchtitan | not run: torchtitan is not installed |",
        "| torchtitan | not run: torchtitan failed: ImportError: no such name |",
        "| torchtitan | not run: torchtitan took longer than 0 s |",
    ]
    assert table.failures == []
    assert capsys.readouterr().out.splitlines() == table.lines[2:]


def test_inputs_are_rows_of_one_document_each(tmp_path: Path) -> None:
    write_inputs(tmp_path, SHAPE)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPE.model.vocab_size
    rows = [json.loads(line)["text"] for line in (tmp_path / "data" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) * SHAPE.seq_len >= SHAPE.tokens * (WARM_UP + STEPS)
    encoded = [tokenizer.encode(row).ids for row in rows]
    assert {len(ids) for ids in encoded} == {SHAPE.seq_len + 1}
    assert encoded[0] == [int(token) for token in rows[0].split()]
    config = (tmp_path / "phalanx_run.py").read_text()
    assert "def run() -> Trainer.Config:" in config
    assert "compile=CompileConfig(enable=True)" in config
