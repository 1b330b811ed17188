"""Overlap of all-to-alls with shared experts, and the number of times that the host reads token counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from phalanx.data.loader import prefetch
from phalanx.model import host_counts
from phalanx.model.moe import MoE
from phalanx.model.transformer import Transformer
from phalanx.parallel.expert.expert_parallel import ExpertParallelGroup, InFlightDispatch
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, small_run


def record_step_order(run: RunSpec) -> list[str]:
    """Return the order in which a step starts all-to-alls, waits for them, and runs the shared expert."""
    trainer, events = make_trainer(run), []
    shared = cast(MoE, next(iter(cast(Transformer, trainer.module).blocks)).mlp).shared
    assert shared is not None
    shared.register_forward_hook(lambda *_: events.append("shared forward"))
    shared.down.weight.register_post_accumulate_grad_hook(lambda _: events.append("shared backward"))
    begin, wait = ExpertParallelGroup.start_all_to_all, InFlightDispatch.wait

    def record_begin(*arguments: Any) -> Any:
        events.append("begin")
        return begin(*arguments)

    def record_wait(dispatch: InFlightDispatch) -> None:
        wait(dispatch)
        events.append("end")

    with (
        patch.object(ExpertParallelGroup, "start_all_to_all", record_begin),
        patch.object(InFlightDispatch, "wait", record_wait),
    ):
        trainer.train_step(prefetch(trainer.loader, 0, 1))
    return events


def test_expert_parallel_overlaps_all_to_all_with_shared_experts(text: Path, tmp_path: Path) -> None:
    """The forward pass runs dispatch, shared experts, combine; the backward pass combine, dispatch, shared experts."""
    model = {**MOE, "num_layers": 1}
    run = small_run(text, tmp_path, {"model": model, "layout.ep": 2, "layout.micro_batch_size": 4})
    forward = ["begin", "shared forward", "end", "begin"]
    assert rank_pool(2).run(record_step_order, run) == [[*forward, "begin", "begin", "shared backward", "end"]] * 2


def count_reads(run: RunSpec) -> int:
    """Return how often the host reads counts in a step."""
    trainer = make_trainer(run)
    with patch.object(host_counts, "read_counts", side_effect=host_counts.read_counts) as read:
        trainer.train_step(prefetch(trainer.loader, 0, 1))
    return read.call_count


@pytest.mark.parametrize(
    ("capacity", "layout"),
    [(None, {"activation_checkpointing": "full"}), (1.0, {}), (1.0, {"activation_checkpointing": "full", "pp": 2})],
    ids=["full", "capacity", "full-capacity-pp"],
)
def test_expert_layer_reads_counts_once_a_micro_batch(
    capacity: float | None, layout: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    """The backward pass reuses the counts of the forward pass, and a capacity needs no others."""
    model = {**MOE, "moe": {**MOE["moe"], "capacity_factor": capacity}}
    changes = {f"layout.{name}": value for name, value in layout.items()}
    common = {"model": model, "training.precision": "bf16", "layout.ep": 2, "layout.micro_batch_size": 1}
    run = small_run(text, tmp_path, {**common, **changes})
    pp, micro_batches = layout.get("pp", 1), 4
    assert rank_pool(2 * pp).run(count_reads, run) == [MOE["num_layers"] // pp * micro_batches] * 2 * pp
