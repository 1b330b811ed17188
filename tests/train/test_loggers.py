"""Records of a run survive numbers that are not finite, kills, resumes, and full disks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from phalanx.runs.metrics import METRICS_FILE, read_metrics
from phalanx.train.loggers import JsonLinesLogger, TensorBoardLogger, open_loggers


def write_metrics(directory: Path, steps: range, after_step: int = 0) -> None:
    logs = open_loggers(directory, after_step)
    for step in steps:
        for log in logs:
            log.write({"step": step, "loss": float(step)})
    for log in logs:
        log.close()


def test_json_lines_logger_writes_null_for_nonfinite_values(tmp_path: Path) -> None:
    log = JsonLinesLogger(tmp_path / METRICS_FILE, 0)
    log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": -math.inf, "tokens": 3})
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    strict = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    assert strict == {"step": 1, "loss": None, "grad_norm": None, "mfu": None, "tokens": 3}
    assert read_metrics(tmp_path) == [strict]


def test_read_metrics_accepts_records_of_a_diverging_run(tmp_path: Path) -> None:
    records = [{"step": 1, "loss": -4e20, "grad_norm": 3.1e38}, {"step": 1, "held_out_loss": 2.5e19}]
    log = JsonLinesLogger(tmp_path / METRICS_FILE, 0)
    for record in records:
        log.write(record)
    log.close()
    problems: list[str] = []
    assert read_metrics(tmp_path, problems) == records
    assert not problems


@pytest.mark.parametrize("number", ["1e400", "1e301", "Infinity", "true", "9" * 5000])
@pytest.mark.parametrize("name", ["loss", "held_out_loss"])
def test_read_metrics_reports_numbers_that_training_cannot_write(name: str, number: str, tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1, "{name}": {number}}}\n')
    problems: list[str] = []
    assert read_metrics(tmp_path, problems) == []
    [problem] = problems
    assert problem.endswith("1 lines cannot be read")


def test_loggers_drop_repeated_steps_when_run_resumes(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(1, 8))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 8, "lo')  # half a line, of a run that was killed
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    write_metrics(tmp_path, range(5, 10), after_step=4)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(step, step) for step in range(1, 10)]


def test_json_lines_logger_loses_no_records_when_killed_during_rewrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(tmp_path, range(1, 8))
    before = read_metrics(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, moment, killed)
            patched.setattr(Path, moment, killed, raising=False)
            with pytest.raises(KeyboardInterrupt):
                JsonLinesLogger(tmp_path / METRICS_FILE, 4)
        assert read_metrics(tmp_path) == before
    JsonLinesLogger(tmp_path / METRICS_FILE, 4).close()
    assert read_metrics(tmp_path) == before[:4]


@pytest.mark.parametrize("name", [METRICS_FILE, "metrics.partial"])
def test_json_lines_logger_does_not_write_through_links(name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / name).symlink_to(target)
    log = JsonLinesLogger(tmp_path / METRICS_FILE, 1)
    log.write({"step": 2})
    log.close()
    assert target.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not (tmp_path / METRICS_FILE).is_symlink()


def test_loggers_close_twice_and_after_failed_write(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full, the disk that is always full")
    log = JsonLinesLogger(tmp_path / METRICS_FILE, 0)
    log._file.close()
    log._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 1})
    write_metrics(tmp_path, range(0))
    for logger in (log, *open_loggers(tmp_path, 0)):
        logger.close(failed=True)
        logger.close()


def test_tensorboard_logger_raises_error_of_full_disk_in_its_own_thread(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full, the disk that is always full")
    log = TensorBoardLogger(tmp_path, 0)
    log._file.close()
    log._file = log._records._writer = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 1, "loss": 2.0})
    log.close(failed=True)
