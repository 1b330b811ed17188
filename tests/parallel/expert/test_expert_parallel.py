"""What works while tokens are under way to their experts, and how often the host reads how many they are."""

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
    """When exchanges begin, when they were waited for, and when the shared experts work."""
    under_way, done = make_trainer(run), []
    shared = cast(MoE, next(iter(cast(Transformer, under_way.module).blocks)).mlp).shared
    assert shared is not None
    shared.register_forward_hook(lambda *_: done.append("shared forward"))
    shared.down.weight.register_post_accumulate_grad_hook(lambda _: done.append("shared backward"))
    begin, wait = ExpertParallelGroup.start_all_to_all, InFlightDispatch.wait

    def noted_begin(*arguments: Any) -> Any:
        done.append("begin")
        return begin(*arguments)

    def noted_wait(of: InFlightDispatch) -> None:
        wait(of)
        done.append("here")

    with (
        patch.object(ExpertParallelGroup, "start_all_to_all", noted_begin),
        patch.object(InFlightDispatch, "wait", noted_wait),
    ):
        under_way.train_step(prefetch(under_way.loader, 0, 1))
    return done


def test_expert_parallel_overlaps_all_to_all_with_shared_experts(text: Path, tmp_path: Path) -> None:
    """Forward: dispatch, shared experts, combine. Backward: combine, dispatch, shared experts."""
    model = {**MOE, "num_layers": 1}
    run = small_run(text, tmp_path, {"model": model, "layout.ep": 2, "layout.micro_batch_size": 4})
    forward = ["begin", "shared forward", "here", "begin"]
    assert rank_pool(2).run(record_step_order, run) == [[*forward, "begin", "begin", "shared backward", "here"]] * 2


def count_reads(run: RunSpec) -> int:
    """How often the host reads counts in a step."""
    under_way = make_trainer(run)
    with patch.object(host_counts, "read_counts", side_effect=host_counts.read_counts) as read:
        under_way.train_step(prefetch(under_way.loader, 0, 1))
    return read.call_count


@pytest.mark.parametrize(
    ("capacity", "layout"),
    [(None, {"activation_checkpointing": "full"}), (1.0, {}), (1.0, {"activation_checkpointing": "full", "pp": 2})],
    ids=["full", "capacity", "full-capacity-pp"],
)
def test_expert_layer_reads_counts_once_a_micro_batch(
    capacity: float | None, layout: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    """The backward pass takes those of the forward pass, and a capacity needs no more; 6 s in all."""
    model = {**MOE, "moe": {**MOE["moe"], "capacity_factor": capacity}}
    changes = {f"layout.{name}": value for name, value in layout.items()}
    common = {"model": model, "training.precision": "bf16", "layout.ep": 2, "layout.micro_batch_size": 1}
    run = small_run(text, tmp_path, {**common, **changes})
    pp, micro_batches = layout.get("pp", 1), 4
    assert rank_pool(2 * pp).run(count_reads, run) == [MOE["num_layers"] // pp * micro_batches] * 2 * pp
