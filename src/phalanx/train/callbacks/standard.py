"""The callbacks of every run, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.checkpoints import Checkpoints, CheckpointTimes, InMemoryCopies
from phalanx.train.callbacks.evaluation import EarlyStop, Evaluation, Samples
from phalanx.train.callbacks.gradient_noise import GradientNoise
from phalanx.train.callbacks.guards import LossSpikes, NonfiniteSteps, ReplicaCheck
from phalanx.train.callbacks.rank_records import RankRecords
from phalanx.train.callbacks.records import JsonLines, Progress, TensorBoard
from phalanx.train.callbacks.wandb import Wandb
from phalanx.train.checkpoint.auto_interval import CheckpointScheduler
from phalanx.train.guards.divergence import LossSpikeDetector
from phalanx.train.time_budget import TimeBudget

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


def build_record_writers(run: RunSpec) -> dict[str, Callback]:
    """Return the writers of a run's records besides the user's callbacks, by name.

    Raises UserError if W&B is requested and not available."""
    writers: dict[str, Callback] = {}
    metrics = run.metrics
    if metrics.wandb is not None:
        # W&B comes first, because it may refuse to open.
        writers["wandb"] = Wandb(metrics.wandb, metrics.wandb_entity, metrics.wandb_group, metrics.wandb_tags)
    writers |= {"metrics": JsonLines(), "tensorboard": TensorBoard()}
    return {**writers, "rank records": RankRecords()} if metrics.per_rank_records else writers


def standard_callbacks(
    trainer: Trainer,
    record_writers: Mapping[str, Callback] | None = None,
    user_callbacks: Mapping[str, Callback] | None = None,
    spike_detector: LossSpikeDetector | None = None,
) -> dict[str, Callback]:
    """Return the callbacks of a run by name, in the order in which their hooks run.

    A step is first recorded, then checked. The user's callbacks follow, then the evaluation. Checkpoints are saved
    after these, so that they contain the state of all callbacks after the step and its evaluation. Samples change no
    state and come last. Without `record_writers` no records are written, without `spike_detector` loss spikes are
    ignored."""
    noise_every = trainer.run.metrics.gradient_noise_every
    stop_after = trainer.run.evaluation.stop_after
    scheduler = CheckpointScheduler(trainer.run, trainer.mesh.dims.world_size, trainer.directory)
    return {
        "time budget": TimeBudget(),
        **({"gradient noise": GradientNoise(noise_every)} if noise_every else {}),
        **(record_writers or {}),
        "progress": Progress(),
        "replica check": ReplicaCheck(),
        "nonfinite steps": NonfiniteSteps(),
        "loss spikes": LossSpikes(spike_detector or LossSpikeDetector(None)),
        **(user_callbacks or {}),
        **({"early stop": EarlyStop(stop_after)} if stop_after else {}),
        "evaluation": Evaluation(),
        "checkpoint times": CheckpointTimes(scheduler),
        "checkpoints": Checkpoints(scheduler),
        "in-memory copies": InMemoryCopies(),
        "samples": Samples(),
    }
