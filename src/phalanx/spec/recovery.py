"""What becomes of a run that breaks."""

from __future__ import annotations

from pydantic import Field, model_validator

from phalanx.spec.base import Spec, require


class RecoverySpec(Spec):
    """What becomes of a run whose ranks fail, or whose loss does."""

    max_restarts: int = Field(3, ge=0)
    """How often in a row ranks that failed are started again, from the newest checkpoint, without a step won by it;
    0 ends the run at the first failure."""
    rendezvous_timeout_seconds: float = Field(600, gt=0)
    """How long nodes wait for as many as a run needs."""
    last_call_timeout_seconds: int = Field(30, gt=0)
    """How long nodes that are enough for the run wait for the rest."""
    in_memory_checkpoint_every: int = Field(0, ge=0)
    """Steps between copies of every rank's state in its launcher's memory, and in that of the next node: a rank that is
    lost then costs the steps since, not those since a checkpoint, where as many ranks go on as before. Each rank's
    state is there twice (of several nodes four times). 0 keeps none."""
    max_rollbacks: int = Field(0, ge=0)
    """How often the run may go back to the checkpoint before a loss that is not finite `training.max_nonfinite_steps`
    times in a row, or a spike, and pass over the text of the steps since (PaLM, arXiv 2204.02311, section 5.1)."""
    loss_spike_ratio: float | None = Field(None, gt=1, examples=[2.0])
    """A loss so many times the median of the 50 steps before it is a spike (with `max_rollbacks`); by default none
    is."""

    @property
    def restarts_ranks(self) -> bool:
        """Whether ranks that fail are started again."""
        return self.max_restarts > 0 or self.in_memory_checkpoint_every > 0

    @model_validator(mode="after")
    def _check(self) -> RecoverySpec:
        require(
            self.loss_spike_ratio is None or self.max_rollbacks > 0,
            "loss_spike_ratio",
            self.loss_spike_ratio,
            problem="is what a run goes back for, and recovery.max_rollbacks = 0 says never",
            fix="set recovery.max_rollbacks too",
        )
        return self
