"""Pipelines of real ranks: the order of actions is the schedule's, and results equal those of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data.loader import prefetch
from phalanx.parallel.inference import SharedModel
from phalanx.parallel.pipeline import runtime
from phalanx.parallel.pipeline.runtime import PipelineStrategy
from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.program.pipeline_split import contiguous_ranges
from phalanx.schedule.published import PUBLISHED
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Action, Schedule
from phalanx.spec.layout import MAX_BF16_SUMS
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import (
    DENSE,
    MOE,
    Table,
    make_trainer,
    small_run,
    train_and_evaluate,
    training_trajectory,
)

FOUR_LAYERS = {**DENSE, "num_layers": 4}
REHEARSED: dict[str, Table] = {
    "1f1b-ddp": {},
    "interleaved-zero3": {
        "layout.schedule": "interleaved",
        "layout.virtual_stages": 2,
        "layout.data_parallel": "zero3",
    },
    "zb-v-zero1-moe": {
        "layout.schedule": "zb-v",
        "layout.data_parallel": "zero1",
        "model": {**MOE, "num_layers": 4},
    },
    "1f1b-ep2": {"layout.ep": 2, "model": {**MOE, "num_layers": 4}},
    "zb-h1-tp2": {"layout.schedule": "zb-h1", "layout.tp": 2},
}


def record_executed_actions(run: RunSpec) -> tuple[list[str], float, float]:
    """Return the actions that this rank executed in a step, the step's seconds, and the seconds that the rank
    waited."""
    trainer = make_trainer(run)
    record = trainer.train_step(prefetch(trainer.loader, 0, 1))
    pipeline = trainer.strategy
    assert isinstance(pipeline, PipelineStrategy)
    assert all(begin <= end for _, begin, end in pipeline.timeline)
    return [str(step) for step, _, _ in pipeline.timeline], record["step_seconds"], record["pipeline_wait_seconds"]


@pytest.mark.parametrize("schedule", PUBLISHED)
def test_pipeline_executes_actions_in_schedule_order(schedule: str, text: Path, tmp_path: Path) -> None:
    choices = {"layout.virtual_stages": 2} if schedule == "interleaved" else {}
    layout = {"layout.pp": 2, "layout.schedule": schedule, "layout.micro_batch_size": 1, **choices}
    run = small_run(text, tmp_path, {"model": FOUR_LAYERS, **layout})
    planned = build_schedule(schedule, 2, 8, 2)
    for rank, (executed, seconds, waited) in enumerate(rank_pool(2).run(record_executed_actions, run)):
        assert executed == [str(step) for step in planned.orders[rank]]
        assert 0 <= waited <= seconds


def test_schedule_sends_each_message_to_rank_of_adjacent_stage() -> None:
    for schedule in (
        build_schedule("1f1b", 4, 8),
        build_schedule("interleaved", 4, 8, 2),
        build_schedule("zb-v", 4, 8),
        build_schedule("dualpipe-v", 4, 8),
    ):
        sent = [message for rank in range(4) for message, _ in schedule.messages(rank)]
        assert len(sent) == len(set(sent)) == 2 * 8 * (schedule.stages - 1)
        for rank in range(4):
            for (stage, kind, _), to in schedule.messages(rank):
                assert to == schedule.rank_of[stage + 1 if kind == "F" else stage - 1]


def evaluate_and_score(run: RunSpec) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the evaluation, and the scores of some tokens."""
    trainer = make_trainer(run)
    record = trainer.evaluate()
    places = torch.arange(2).repeat_interleave(23), torch.arange(23).repeat(2)
    targets = torch.arange(48).view(2, 24)[:, 1:].flatten()
    return record, SharedModel(trainer.strategy).score_targets(torch.arange(48).view(2, 24), places, targets, 257)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("model", [FOUR_LAYERS, {**MOE, "num_layers": 4}], ids=["dense", "moe"])
def test_pipeline_evaluation_and_scores_equal_single_process(
    model: Any, schedule: str, text: Path, tmp_path: Path
) -> None:
    expected, expected_scores = evaluate_and_score(small_run(text, tmp_path, {"model": model}))
    layout = {"layout.pp": 2, "layout.schedule": schedule, "layout.micro_batch_size": 1}
    for record, out in rank_pool(4).run(
        evaluate_and_score, small_run(text, tmp_path / "split", {"model": model, **layout})
    ):
        assert record["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-12)
        assert record["held_out_tokens"] == expected["held_out_tokens"]
        torch.testing.assert_close(out.double(), expected_scores.double(), rtol=1e-6, atol=1e-7)


def test_stage_modules_partition_full_model_parameter_names() -> None:
    from phalanx.model.transformer import Transformer
    from phalanx.spec.base import parse_table
    from phalanx.spec.model import ModelSpec

    spec = parse_table(ModelSpec, FOUR_LAYERS)
    full = dict(Transformer(spec).named_parameters())
    layers = contiguous_ranges([1, 1, 1, 1])
    shapes: dict[str, torch.Size] = {}
    for stages in ([0, 3], [1, 2]):
        part = StageModule(spec, {stage: layers[stage] for stage in stages}, 4)
        part_shapes = {name: parameter.shape for name, parameter in part.named_parameters()}
        assert not shapes.keys() & part_shapes.keys()
        shapes |= part_shapes
    assert shapes == {name: parameter.shape for name, parameter in full.items()}


def test_forward_only_schedule_lists_activation_messages() -> None:
    forward = Schedule.from_rows([[Action(0, "F", 0), Action(3, "F", 0)], [Action(1, "F", 0), Action(2, "F", 0)]])
    assert [(str(message), to) for message, to in forward.messages(1)] == [("1F0", 1), ("2F0", 0)]


def train_with_rehearsal(run: RunSpec) -> tuple[list[tuple[float, float]], int]:
    """Train with stages rehearsed as on a GPU; return the trajectory and the number of rehearsals."""
    count = 0
    rehearse = runtime.PipelineStrategy._rehearse_stages

    def count_and_rehearse(*arguments: object) -> None:
        nonlocal count
        count += 1
        rehearse(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "LAZY_LOADING_DEVICES", ("cpu",))
        patch.setattr(runtime.PipelineStrategy, "_rehearse_stages", count_and_rehearse)
        return train_and_evaluate(run), count


@pytest.mark.parametrize("name", REHEARSED)
def test_rehearsed_pipeline_equals_single_process_training(name: str, documents: Path, tmp_path: Path) -> None:
    steps = {"training.steps": 3, "optimizer.warmup_steps": 1}
    changes = {"model": {**DENSE, "num_layers": 4}, **REHEARSED[name], **steps}
    single_process_changes = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    expected = train_and_evaluate(small_run(documents, tmp_path / "alone", single_process_changes))
    layout = {"layout.pp": 2, "layout.micro_batch_size": 1}
    run = small_run(documents, tmp_path / "pipeline", {**changes, **layout})
    for result, count in rank_pool(4).run(train_with_rehearsal, run):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected]
        assert count >= 2  # of training and of the evaluation


@pytest.mark.parametrize("micro_batches", [MAX_BF16_SUMS, MAX_BF16_SUMS + 1])
def test_tied_embedding_gradient_of_many_bf16_micro_batches_includes_head(
    micro_batches: int, text: Path, tmp_path: Path
) -> None:
    """The first rank sums its own gradients in bf16 or in fp32; the head's gradient comes from the last rank."""
    changes = {"model": {**DENSE, "tie_embeddings": True}, "training.tokens_per_step": micro_batches * 32}
    changes |= {"training.steps": 1, "layout.micro_batch_size": 1}
    ((_, expected_norm),) = training_trajectory(small_run(text, tmp_path / "alone", changes))
    layout = {"layout.pp": 2, "layout.data_parallel": "zero1", "training.precision": "bf16"}
    run = small_run(text, tmp_path / "pipeline", {**changes, **layout})
    for ((_, norm),) in rank_pool(2).run(training_trajectory, run):
        assert norm == pytest.approx(expected_norm, rel=0.01)
