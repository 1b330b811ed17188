"""Callback that writes the records of a run to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.launch.preflight import check_wandb
from phalanx.runs.metrics import WANDB_ID_FILE, MetricsRecord
from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import replace_file
from phalanx.train.callbacks.records import RecordWriter
from phalanx.train.loggers import Logger

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class WandbLogger:
    """A W&B run. It ignores steps that run again, and keeps the first record."""

    def __init__(self, wandb_run: Any) -> None:
        self._run = wandb_run

    def write(self, record: MetricsRecord) -> None:
        """Send a record."""
        self._run.log(record, step=record["step"])

    def close(self, failed: bool = False) -> None:
        """Finish the W&B run."""
        self._run.finish(exit_code=int(failed))


class Wandb(RecordWriter):
    """Writes to a project in W&B. A run that resumes continues its W&B run."""

    def __init__(
        self, project: str, entity: str | None = None, group: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        """Choose the `project`; it is created if it does not exist.

        W&B's environment variables and login provide an entity, a group and tags that are not given."""
        check_wandb(project)
        self.project = project
        self._labels: dict[str, Any] = {"entity": entity, "group": group, "tags": list(tags) or None}

    def open(self, trainer: Trainer) -> Logger:
        """Create the W&B run, or open it again. Raises UserError if W&B rejects the project or the login."""
        import wandb

        directory = trainer.directory
        config = trainer.run.model_dump(mode="json")
        run_id = wandb_id(directory)
        options: dict[str, Any] = {"name": trainer.run.name, "dir": str(directory), "config": config, **self._labels}
        try:
            return WandbLogger(wandb.init(project=self.project, id=run_id, resume="allow", **options))
        except wandb.Error as error:
            fix = "run `wandb login`, set WANDB_MODE=offline, or remove metrics.wandb"
            raise UserError("metrics.wandb", self.project, f"cannot be opened: {error}", fix) from None


def wandb_id(directory: Path) -> str:
    """Return the W&B id of a run directory, which is created once and saved there."""
    file = directory / WANDB_ID_FILE
    if not file.exists():
        replace_file(file, uuid.uuid4().hex[:16])
    return file.read_text()
