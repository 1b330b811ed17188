"""A trainer leaves nothing behind in its process: threads of process groups would slow down all that follows."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.loader import prefetch
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, metered_step, small_run

PIPELINE = {"layout.pp": 2, "layout.schedule": "zb-h1", "model": {**MOE, "num_layers": 4}}
LAYOUTS: dict[str, dict[str, Any]] = {
    data: {"layout.data_parallel": data} for data in ("ddp", "zero1", "zero2", "zero3", "parameter_server")
}
LAYOUTS |= {axis: {f"layout.{axis}": 2} for axis in ("tp", "cp", "ep")} | {"pp": PIPELINE}


def is_trainer_released(run: RunSpec) -> bool:
    """Return whether a trainer is released after a measured step."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, 2)
    trainer.train_step(batches)
    metered_step(trainer, batches)
    reference = weakref.ref(trainer.strategy)
    del trainer, batches
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_trainer_memory_is_released_after_training(layout: dict[str, Any], text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"model": MOE, "layout.micro_batch_size": 1, **layout})
    assert rank_pool(2).run(is_trainer_released, run) == [True, True]
