"""What works while tokens are under way to their experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from phalanx.data.loader import prefetch
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
