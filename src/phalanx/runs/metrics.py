"""Read metrics.jsonl of a run directory, and name the other logs there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from phalanx.runs.decode import MAX_FINITE, Amount, Count, Finite, Number, WorldSize, decoder
from phalanx.runs.jsonl import JsonRecord, read_valid_jsonl

MetricsRecord = JsonRecord
METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb.id"
TENSORBOARD_DIR = "tensorboard"


@with_config(ConfigDict(extra="allow"))
class StepMetrics(TypedDict):
    """The fields of a step's record that readers use. A number that was not finite is None."""

    step: Count
    step_seconds: NotRequired[Amount]
    loss: NotRequired[Finite | None]
    grad_norm: NotRequired[Finite | None]
    learning_rate: NotRequired[Number | None]
    tokens_per_second: NotRequired[Amount | None]
    mfu: NotRequired[Amount | None]
    tokens: NotRequired[Count]
    targets: NotRequired[Count]
    targets_per_second: NotRequired[Amount | None]
    skipped_steps: NotRequired[Count]
    hot_expert_share: NotRequired[Number | None]
    gradient_noise_scale: NotRequired[Amount | None]
    mtp_loss: NotRequired[Number | None]
    kl_loss: NotRequired[Number | None]
    peak_memory_bytes: NotRequired[Count]
    ranks: NotRequired[WorldSize]
    resumed_at_step: NotRequired[Count]


@with_config(ConfigDict(extra="allow"))
class EvaluationMetrics(TypedDict):
    """The fields of an evaluation's record that readers use."""

    step: Count
    held_out_loss: Finite | None
    held_out_tokens: NotRequired[Count]
    held_out_set: NotRequired[str]
    expert_tokens: NotRequired[Annotated[list[list[Count]], Field(min_length=1)]]


def _classify_record(record: Any) -> str:
    return "evaluation" if isinstance(record, dict) and "held_out_loss" in record else "step"


decode_metrics = decoder(
    Annotated[
        Annotated[StepMetrics, Tag("step")] | Annotated[EvaluationMetrics, Tag("evaluation")],
        Discriminator(_classify_record),
    ]
)
"""Decode a line of metrics.jsonl."""


def read_metrics(directory: Path, problems: list[str] | None = None) -> list[MetricsRecord]:
    """Return all records of a run directory, in order. A number that was not finite is None.

    A missing file and unreadable lines are added to `problems`.
    """
    file = directory / METRICS_FILE
    problems = [] if problems is None else problems
    if not file.exists():
        problems.append(f"{file.name} is missing")
        return []
    return read_valid_jsonl(file, problems, decode_metrics)


def losses_by_source(record: Mapping[str, Any], field: Literal["loss", "held_out_loss"]) -> dict[str, float]:
    """Return the losses of a mixture's sources in the record of a step or of an evaluation, by name.

    Losses that were not finite, and damaged ones, are left out."""
    prefix = f"{field}/"
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix) and type(value) in (int, float) and abs(value) <= MAX_FINITE
    }


def have_same_held_out_text(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two evaluations measured the same tokens in the same way, so that their losses are comparable.

    Records of earlier versions have the number of tokens alone.
    """
    sets = first.get("held_out_set"), second.get("held_out_set")
    return first.get("held_out_tokens") == second.get("held_out_tokens") and (None in sets or sets[0] == sets[1])


def has_ignored_targets(record: MetricsRecord) -> bool:
    """Return whether a step had tokens without a target; the records of earlier versions do not say so."""
    return record.get("targets_per_second", record.get("tokens_per_second")) != record.get("tokens_per_second")


def peak_from_mfu(record: MetricsRecord, flops_per_token: float, ranks: int) -> float | None:
    """Return the peak FLOP/s of one rank to which the MFU of a step's record refers, or None without speed or MFU.

    `flops_per_token` are the model FLOPs of training on one token; `ranks` is the number of ranks of the run.
    """
    mfu = record.get("mfu")
    speed = record.get("tokens_per_second")
    return speed * flops_per_token / ranks / mfu if mfu and speed else None
