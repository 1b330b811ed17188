"""The latest metrics of a run directory in the text format of Prometheus.

Format: github.com/prometheus/docs, exposition_formats.md. The exporter follows metrics.jsonl of rank 0 and the records
of each rank, and reads only new lines. The training process does no extra work, and its last metrics remain available
after it has exited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.report.step_breakdown import computed_seconds
from phalanx.runs.create import RUN_FILE
from phalanx.runs.events import STARTED, failure_count_and_uptime, read_events
from phalanx.runs.hang_dumps import FAILURES_DIR
from phalanx.runs.jsonl import JsonlTail, JsonRecord
from phalanx.runs.lock import is_running
from phalanx.runs.metrics import METRICS_FILE, decode_metrics
from phalanx.runs.step_records import FORMAT, TRACE_DIR, decode_rank_line
from phalanx.runs.swarm_records import JOURNAL_FILE
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.run import RunSpec

Sample = tuple[str, Mapping[str, str], float]
"""Name, labels in addition to `run`, value."""

STEP_FAMILIES = {
    "step": ("phalanx_step", "Last finished step."),
    "loss": ("phalanx_loss_nats_per_token", "Training loss of the last step; NaN if it was not finite."),
    "grad_norm": (
        "phalanx_gradient_norm",
        "Gradient norm of the last step, before clipping; NaN if it was not finite.",
    ),
    "learning_rate": ("phalanx_learning_rate", "Learning rate of the last step."),
    "step_seconds": ("phalanx_step_seconds", "Duration of the last step."),
    "tokens_per_second": ("phalanx_tokens_per_second", "Tokens per second of the last step, over all ranks."),
    "targets_per_second": (
        "phalanx_targets_per_second",
        "Targets per second of the last step, over all ranks: tokens without those whose target is ignored.",
    ),
    "mfu": ("phalanx_mfu_ratio", "Model FLOP/s of the last step as a share of the devices' peak."),
    "tokens": ("phalanx_tokens", "Tokens computed in training."),
    "targets": ("phalanx_targets", "Targets trained on."),
    "skipped_steps": ("phalanx_skipped_steps", "Steps skipped because of a non-finite gradient."),
}
"""Metrics from the last step's record in metrics.jsonl, by field: name and help text.

None of them is a counter: a restarted run continues from a checkpoint, with lower counts than before.
"""
EVALUATION_FAMILIES = {
    "held_out_loss": ("phalanx_held_out_loss_nats_per_token", "Held-out loss of the last evaluation."),
    "held_out_tokens": (
        "phalanx_held_out_tokens",
        "Targets of the last evaluation; losses of other numbers are not comparable.",
    ),
}
OTHER_FAMILIES = {
    "phalanx_planned_steps": "Number of steps of the run.",
    "phalanx_under_way": "1 while the run trains, 0 after its end; absent if unknown.",
    "phalanx_start_timestamp_seconds": "Time of the last start, in seconds since 1970.",
    "phalanx_last_step_timestamp_seconds": (
        "Time of the last step, or of the last start if no step followed, in seconds since 1970."
    ),
    "phalanx_checkpoint_step": "Step of the newest complete checkpoint.",
    "phalanx_checkpoint_timestamp_seconds": "Time of the newest complete checkpoint, in seconds since 1970.",
    "phalanx_checkpoint_interval_steps": "Steps between checkpoints; 0 if the interval is automatic.",
    "phalanx_starts_total": "Number of starts.",
    "phalanx_failures_total": "Number of failures, with or without a restart.",
    "phalanx_failed_ranks": "Ranks with a failure record since the last start.",
    "phalanx_rank_info": "Always 1; the labels are the host and the kind of device of each rank.",
    "phalanx_rank_step": "Last step that each rank recorded.",
    "phalanx_phase_seconds": "Seconds of each phase of each rank's last step, including waits.",
    "phalanx_wait_seconds": "Seconds that each rank waited for other ranks in its last step, by phase; CPUs only.",
    "phalanx_compute_seconds": "Seconds of the passes in each rank's last step; on CPUs without waits.",
    "phalanx_peak_memory_bytes": "Peak memory of each rank on its GPU, or on its host.",
    "phalanx_device_memory_bytes": "Memory of each rank's device; on a CPU, of its host.",
}
FAMILIES = {
    name: ("counter" if name.endswith("_total") else "gauge", text)
    for name, text in (*STEP_FAMILIES.values(), *EVALUATION_FAMILIES.values(), *OTHER_FAMILIES.items())
}
"""Type and help text of every metric."""
LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass
class RankMetrics:
    """The latest record of a rank."""

    follower: JsonlTail
    opening: JsonRecord = field(default_factory=dict)
    step: JsonRecord = field(default_factory=dict)
    """The latest step of the last start."""

    def refresh(self) -> None:
        """Read the new records."""
        replaced, lines = self.follower.read_new()
        if replaced:
            self.opening = {}
            self.step = {}
        for line in lines:
            if line.get("format") == FORMAT:
                self.opening = line
                self.step = {}
            elif "stages" in line:
                self.step = line


class RunMetrics:
    """Metrics of a run directory, updated at each request."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metrics = JsonlTail(directory / METRICS_FILE, decode_metrics)
        self._step: JsonRecord = {}
        self._evaluation: JsonRecord = {}
        self._ranks: dict[Path, RankMetrics] = {}

    def exposition_text(self, checkpoints: Sequence[Path]) -> str:
        """Return the current metrics as text; `checkpoints` are the complete ones, the newest first."""
        run = None
        with suppress(UserError):  # a run file of another version
            run = load_run(self.directory / RUN_FILE, environment={})
        name = run.name if run else self.directory.resolve().name
        samples = [*self._read_rank_samples(), *self._read_step_samples(), *self._read_run_samples(run, checkpoints)]
        return exposition([(metric, {"run": name, **labels}, value) for metric, labels, value in samples])

    def _read_step_samples(self) -> Iterator[Sample]:
        replaced, lines = self._metrics.read_new()
        if replaced:
            self._step = {}
            self._evaluation = {}
        for line in lines:
            self._step = line if "step_seconds" in line else self._step
            self._evaluation = line if "held_out_loss" in line else self._evaluation
        if (self.directory / JOURNAL_FILE).is_file():  # a swarm's coordinator does no steps
            return
        for families, line in ((STEP_FAMILIES, self._step or {"step": 0}), (EVALUATION_FAMILIES, self._evaluation)):
            for key, (name, _) in families.items():
                if key in line:
                    yield name, {}, math.nan if line[key] is None else line[key]
        started = self._last_start_time()
        yield "phalanx_start_timestamp_seconds", {}, started
        # Ranks record every step, also if metrics.every is not 1.
        files = [rank.follower.path for rank in self._ranks.values() if rank.step]
        if self._step:
            files.append(self._metrics.path)
        times = map(_modification_time, files)
        yield "phalanx_last_step_timestamp_seconds", {}, max([started, *times])

    def _last_start_time(self) -> float:
        """Return the time of the last start: when ranks started or, until then, when the run was requested."""
        start_times = [float(event["time"]) for event in read_events(self.directory) if event["kind"] == STARTED]
        return max([*start_times, _modification_time(self.directory / RUN_FILE)])

    def _read_run_samples(self, run: RunSpec | None, checkpoints: Sequence[Path]) -> Iterator[Sample]:
        active = is_running(self.directory)
        if active is not None:
            yield "phalanx_under_way", {}, active
        for checkpoint in checkpoints[:1]:
            with suppress(OSError):  # it may have been removed
                yield "phalanx_checkpoint_timestamp_seconds", {}, checkpoint.stat().st_mtime
                yield "phalanx_checkpoint_step", {}, int(checkpoint.name.removeprefix("step-"))
        yield "phalanx_starts_total", {}, sum(event["kind"] == STARTED for event in read_events(self.directory))
        yield "phalanx_failures_total", {}, failure_count_and_uptime(self.directory)[0]
        yield "phalanx_failed_ranks", {}, len([*(self.directory / FAILURES_DIR).glob("rank-*.json")])
        if run is None:
            return
        if run.training.has_decided_steps:
            yield "phalanx_planned_steps", {}, run.training.steps
        interval = run.checkpoint.every
        at_end = run.training.steps if run.training.has_decided_steps else 0
        yield "phalanx_checkpoint_interval_steps", {}, 0 if interval == "auto" else interval or at_end

    def _read_rank_samples(self) -> Iterator[Sample]:
        for file in (self.directory / TRACE_DIR).glob("rank-*.jsonl"):
            self._ranks.setdefault(file, RankMetrics(JsonlTail(file, decode_rank_line))).refresh()
        ranks = {rank.opening["rank"]: rank for rank in self._ranks.values() if rank.opening}
        if 0 not in ranks:
            return
        rank0 = ranks[0]
        for number, rank in sorted(ranks.items()):
            opening = rank.opening
            step = rank.step
            if any(opening[name] != rank0.opening[name] for name in ("step", "ranks")):  # of an earlier start
                continue
            labels = {"rank": str(number)}
            yield "phalanx_rank_info", {**labels, "host": opening["host"], "device": opening["device"]}, 1
            yield "phalanx_device_memory_bytes", labels, opening["memory_bytes"]
            if not step:
                continue
            yield "phalanx_rank_step", labels, step["step"]
            yield "phalanx_compute_seconds", labels, computed_seconds(step)
            yield "phalanx_peak_memory_bytes", labels, step["peak_memory_bytes"]
            for phase, seconds in step["seconds"].items():
                yield "phalanx_phase_seconds", {**labels, "phase": phase}, seconds
            for phase, seconds in step.get("wait_seconds", {}).items():
                yield "phalanx_wait_seconds", {**labels, "phase": phase}, seconds


def _modification_time(file: Path) -> float:
    """Return the modification time of a file, or 0 if it does not exist."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def exposition(samples: Sequence[Sample]) -> str:
    """Return samples in the text format, grouped by metric below its help and type."""
    lines = []
    for name, (kind, text) in FAMILIES.items():
        family_samples = [sample for sample in samples if sample[0] == name]
        if family_samples:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for _, labels, value in family_samples:
            pairs = ",".join(f'{key}="{label.translate(LABEL_ESCAPES)}"' for key, label in labels.items())
            lines.append(f"{name}{{{pairs}}} {_format_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def _format_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if isinstance(value, float) else str(int(value))
