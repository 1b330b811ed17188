"""What a run writes down: metrics.jsonl and TensorBoard always, Weights & Biases if asked. Rank 0 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from phalanx.spec.errors import UserError

Record = dict[str, Any]
METRICS_FILE = "metrics.jsonl"


class Log(Protocol):
    """Takes one record: a step's, an evaluation's."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one JSON object a line, flushed at once."""

    def __init__(self, path: Path, after_step: int) -> None:
        """On resume, lines of steps that will be done again are dropped."""
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= after_step]
        path.write_text("".join(kept))
        self._file = path.open("a")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars under the names they have in metrics.jsonl."""

    def __init__(self, directory: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=after_step + 1 if after_step else None)

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The optional service (`pip install phalanx[wandb]`)."""

    def __init__(self, project: str, name: str, config: Record) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, config=config, resume="allow")

    def write(self, record: Record) -> None:
        self._run.log(record, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def open_logs(directory: Path, after_step: int, wandb: str | None, name: str, config: Record) -> list[Log]:
    """The logs of a run; `after_step` is the last step of the checkpoint it resumes from, 0 for a fresh one."""
    logs: list[Log] = [
        JsonLines(directory / METRICS_FILE, after_step),
        TensorBoard(directory / "tensorboard", after_step),
    ]
    if wandb:
        try:
            logs.append(WeightsAndBiases(wandb, name, config))
        except ImportError:
            raise UserError("metrics.wandb", wandb, "wandb is not installed", "pip install 'phalanx[wandb]'") from None
    return logs


def read_metrics(directory: Path) -> list[Record]:
    """All records of a run directory, in order."""
    return [json.loads(line) for line in _lines(directory / METRICS_FILE)]


def _lines(path: Path) -> list[str]:
    """The complete lines of a file; a run that was killed may have left half a line."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
