"""The end of a learning-rate range test (`phalanx debug lr-range`) at a divergence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.runs.metrics import MetricsRecord
from phalanx.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

DIVERGENCE_RATIO = 2.0
"""Ratio of the loss to the lowest one from which the training has diverged."""


class StopAtDivergence(Callback):
    """Ends the run when its training loss has risen far above the lowest one, or is not finite."""

    reads_weights = False

    def __init__(self) -> None:
        self.lowest = math.inf

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Compare the loss."""
        loss = record["loss"]
        self.lowest = min(self.lowest, loss) if math.isfinite(loss) else self.lowest
        if not loss <= DIVERGENCE_RATIO * self.lowest:
            trainer.finish(f"the loss, {loss:.4g}, is above {DIVERGENCE_RATIO:g} x {self.lowest:.4g}")
