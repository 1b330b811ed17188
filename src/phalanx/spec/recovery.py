"""Recovery of a run from failures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec
from phalanx.spec.errors import KUBEFLOW_EXIT_CODES, UserError


class RecoverySpec(Spec):
    """Recovery of a run whose ranks fail or whose loss diverges."""

    max_restarts: int = Field(3, ge=0)
    """Maximum number of consecutive restarts of failed ranks, from the latest checkpoint, without a completed step
    between them. 0 ends the run at the first failure."""
    rendezvous_timeout_seconds: float = Field(600, gt=0)
    """Seconds that nodes wait for the number of nodes that a run needs."""
    last_call_timeout_seconds: int = Field(30, gt=0)
    """Seconds that nodes wait for further nodes once there are enough for the run."""
    in_memory_checkpoint_every: int = Field(0, ge=0)
    """Steps between copies of every rank's state to the memory of its launcher and of the next node's launcher. After
    the loss of a rank, the run resumes from these copies instead of a checkpoint, if the number of ranks is unchanged.
    Each rank's state is in memory twice (with several nodes, four times). 0 disables the copies."""
    max_rollbacks: int = Field(0, ge=0)
    """Maximum number of rollbacks to an earlier checkpoint. A rollback follows `training.max_nonfinite_steps`
    consecutive non-finite losses, or a spike, and skips the text of the steps since then (PaLM, arXiv 2204.02311,
    section 5.1)."""
    loss_spike_ratio: float | None = Field(None, gt=1, examples=[2.0])
    """Minimum ratio of a loss spike to the median loss of the 50 steps before it (with `max_rollbacks`). By default
    spikes are not detected."""

    exit_codes: Literal["phalanx", "kubeflow"] = "phalanx"
    """Exit codes of the run. "kubeflow" has 138 for 1, and 143 for 75, after which a pod with `restartPolicy: ExitCode`
    is restarted; docs/reference/exit-codes.md."""

    def exit_code(self, code: int) -> int:
        """Return the exit code for the scheduler, for one of ours."""
        return KUBEFLOW_EXIT_CODES.get(code, code) if self.exit_codes == "kubeflow" else code

    @property
    def restarts_ranks(self) -> bool:
        """True if failed ranks are restarted."""
        return self.max_restarts > 0 or self.in_memory_checkpoint_every > 0

    @model_validator(mode="after")
    def _check_loss_spike_rollbacks(self) -> RecoverySpec:
        if self.loss_spike_ratio is not None and self.max_rollbacks <= 0:
            problem = "cannot be combined with recovery.max_rollbacks = 0, because a loss spike causes a rollback"
            fix = "set recovery.max_rollbacks to at least 1, or remove recovery.loss_spike_ratio"
            raise UserError("loss_spike_ratio", self.loss_spike_ratio, problem, fix)
        return self
