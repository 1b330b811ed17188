"""Profiled steps: which steps they are, and what is recorded of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data.loader import prefetch
from phalanx.runs.checkpoints import checkpoints, step_of
from phalanx.runs.step_records import gpu_trace_file
from phalanx.spec.errors import UserError
from phalanx.testing import rank_pool
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.standard import standard_callbacks
from phalanx.train.create_run import create_run
from phalanx.train.profiling import step_profiler
from phalanx.train.profiling.step_profiler import StepProfiler
from phalanx.train.progress import ProgressDisplay
from phalanx.train.session import profiled_steps
from tests.helpers.small_runs import MOE, make_trainer, small_run


def profiled_step_records(run: Any, window: range, last: int, after: int = 0) -> list[dict[str, Any]]:
    """Return a rank's records of the steps up to `last`, in a run that resumes after the step `after`."""
    trainer = make_trainer(run)
    trainer.step = after
    trainer.directory.mkdir(parents=True, exist_ok=True)
    profiler, batches, records = StepProfiler(trainer, window), prefetch(trainer.loader, after, last), []
    for _ in range(after, last):
        record = profiler(batches)()
        records.append({**(trainer.step_record or {}), "profiled": record.get("profiled", False)})
    return records


def test_step_profiler_records_memory_in_first_steady_step(text: Path, tmp_path: Path) -> None:
    records = profiled_step_records(small_run(text, tmp_path, {"model": MOE}), range(2, 6), last=6)
    assert [record["profiled"] for record in records] == [False, True, True, True, True, False]
    assert ["spans" in record for record in records] == [record["profiled"] for record in records]
    assert [record["step"] for record in records if "memory" in record] == [3]
    [measured] = (tmp_path / "parity" / "measured").glob("*")
    assert json.loads(measured.read_text())["held_bytes"]["optimizer"] > 0
    for record in records[1:5]:
        assert sum(map(sum, record["expert_tokens"])) == 2 * 2 * 256  # of two layers, each token two experts
        kinds = [kind for kind, *_ in record["spans"]]
        assert sorted(kinds) == ["B"] * (len(kinds) // 2) + ["F"] * (len(kinds) // 2)


def test_step_profiler_pass_spans_are_ordered_and_inside_step(text: Path, tmp_path: Path) -> None:
    changes = {"layout.pp": 2, "layout.micro_batch_size": 1}
    for records in rank_pool(2).run(profiled_step_records, small_run(text, tmp_path, changes), range(3, 5), 4):
        record = records[-1]
        ends = [moment for *_, start, end in record["spans"] for moment in (start, end)]
        assert ends == sorted(ends)
        assert record["start"] <= ends[0]
        assert ends[-1] <= record["start"] + record["seconds"]["data"] + record["seconds"]["passes"]
        assert {kind for kind, *_ in record["waits"]} >= {"pipeline"}
        assert {call["operation"] for call in record["collectives"]} >= {"send", "recv", "all_reduce"}


@pytest.mark.parametrize(
    ("device", "window", "traced"),
    [
        ("cuda", range(2, 6), 5),
        ("cuda", range(3, 5), 4),
        ("cuda", range(3, 4), None),  # the measured step
        ("cuda", range(1, 3), None),  # no steady step
        ("cpu", range(2, 6), None),
    ],
)
def test_step_profiler_traces_last_step_on_gpu_only(
    device: str, window: range, traced: int | None, text: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(small_run(text, tmp_path, {}))
    trainer.device = torch.device(device)
    assert StepProfiler(trainer, window).traced_step == traced


def test_step_profiler_adds_figures_of_gpu_to_record_of_traced_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []

    def trace(step: Any, file: Path, device: torch.device) -> Any:
        files.append(file)
        return step(), {"seconds": 1.0}

    monkeypatch.setattr(step_profiler, "trace_gpu_step", trace)
    trainer = make_trainer(small_run(text, tmp_path, {}))
    trainer.directory.mkdir(parents=True, exist_ok=True)
    profiler = StepProfiler(trainer, range(3, 5))
    profiler.traced_step = 4
    batches = prefetch(trainer.loader, 0, 4)
    records = [profiler(batches)() for _ in range(4)]
    assert [record.get("profiled", False) for record in records] == [False, False, True, True]
    assert trainer.step_record is not None
    assert trainer.step_record["gpu"] == {"seconds": 1.0}
    assert trainer.step_record["spans"]
    assert files == [gpu_trace_file(trainer.directory, 0, 4)]


def test_compiled_blocks_stay_compiled_after_profiled_steps(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append(graph)
            return graph(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    changes = {"training.precision": "fp32", "training.compile": True, "data.mask_documents": False}
    trainer = make_trainer(small_run(text, tmp_path, changes))
    trainer.directory.mkdir(parents=True, exist_ok=True)
    profiler = StepProfiler(trainer, range(3, 5))
    batches = prefetch(trainer.loader, 0, 5)
    calls_by_step = []
    for _ in range(5):
        calls.clear()
        profiler(batches)()
        calls_by_step.append(len(calls))
    assert calls_by_step[0] > 0
    assert calls_by_step == [calls_by_step[0]] * 2 + [0, 0, calls_by_step[0]]  # two steps record operations


def test_profiled_steps_are_clipped_to_remaining_steps_after_resume(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"training.steps": 20})
    trainer = make_trainer(run)
    trainer.step = 11
    assert profiled_steps(trainer, False, range(10, 14)) == range(12, 14)
    assert not profiled_steps(trainer, False, range(3, 6))
    assert profiled_steps(trainer, False, range(18, 30)) == range(18, 21)
    assert profiled_steps(trainer, True, None) == range(14, 15)
    assert not profiled_steps(trainer, False, None)
    assert [
        line["step"] for line in profiled_step_records(run, range(12, 15), last=15, after=11) if "memory" in line
    ] == [14]


class StopAfter(Callback):
    """A callback that stops the run like a signal, without waiting for the device."""

    reads_weights = False

    def on_step_end(self, trainer: Any, record: Any) -> None:
        trainer.stop_requested = record["step"] >= 3


def test_stop_before_profiled_step_is_seen_although_records_are_read_late(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"training.steps": 9, "training.precision": "fp32"})
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    trainer.allows_late_reads = True
    callbacks = standard_callbacks(trainer, user_callbacks={"stop": StopAfter()})
    trainer.train(callbacks, ProgressDisplay(0, 9, quiet=True), StepProfiler(trainer, range(6, 8)))
    # The request is part of the sums of step 5, whose record is read before step 6 is profiled.
    assert trainer.step == 5
    assert [step_of(path) for path in checkpoints(trainer.directory / "checkpoints")] == [5]


NOT_A_RANGE, EMPTY_RANGE = "is not a valid step range", "is an empty step range"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("3", NOT_A_RANGE),
        ("3:2", EMPTY_RANGE),
        ("0:4", EMPTY_RANGE),
        ("a:b", NOT_A_RANGE),
        ("-1:2", NOT_A_RANGE),
        ("3:4:5", NOT_A_RANGE),
    ],
)
def test_parse_step_range_rejects_invalid_ranges(steps: str, message: str) -> None:
    from phalanx.runs.step_records import parse_step_range

    with pytest.raises(UserError, match=message):
        parse_step_range(steps)
