"""Programs of the ranks of `benchmarks.pipeline`: train through a pipeline, or wait in it instead of computing."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shapes import STEPS
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import prefetch
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.pipeline.runtime import PipelineStrategy
from phalanx.parallel.pipeline.stage_module import InferenceMicroBatch, StageModule
from phalanx.parallel.strategy import Strategy
from phalanx.schedule.registry import layout_schedule, representative_schedule
from phalanx.schedule.simulate import Span
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import RunSpec
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

SMALL = ModelSpec(
    num_layers=16, hidden_size=8, num_heads=1, num_kv_heads=1, ffn_hidden_size=8, vocab_size=8, max_seq_len=8
)


class WaitingStages(StageModule):
    """Stages that wait instead of computing."""

    def __init__(self, layers: dict[int, range], stages: int, seconds: float) -> None:
        super().__init__(SMALL, layers, stages)
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, starts_BT: Tensor | None = None, stage: int = 0) -> tuple[Tensor, Tensor]:
        x_BTD = torch.zeros(*x.shape, SMALL.hidden_size) if stage == 0 else x
        return _Wait.apply(x_BTD, self.weight, self), torch.zeros(())


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: WaitingStages) -> Tensor:
        ctx.part, ctx.weight = part, weight
        time.sleep(part.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        def of_weight() -> Tensor:
            time.sleep(ctx.part.seconds)
            return torch.zeros(1)

        time.sleep(ctx.part.seconds)
        later = ctx.part.deferred_weight_grads.deferred
        if later is None:
            return grad, of_weight(), None
        later.append((ctx.weight, of_weight))
        return grad, None, None


def layout_of(schedule: str, p: int) -> Layout:
    """Return the layout of a pipeline of p ranks."""
    return Layout(pp=p, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)


def wait(layout: Layout, m: int, seconds: float, steps: int) -> list[list[Span]]:
    """Wait through the steps of a pipeline; return the spans of this rank by step."""
    mesh, schedule = build_mesh(layout, layout.pp, "cpu"), representative_schedule(layout)
    stages = {stage: range(stage, stage + 1) for stage in schedule.stages_of(mesh.rank)}
    part = WaitingStages(stages, schedule.stages, seconds / len(stages))
    all_ranks = mesh.pipeline_groups[0]
    order, example = partial(layout_schedule, layout), torch.empty(0)
    strategy = PipelineStrategy(
        Strategy(part), part, schedule, order, mesh.pipeline_groups, all_ranks, nullcontext, example
    )
    micros = [InferenceMicroBatch(torch.zeros(1, 4, dtype=torch.int64), None)] * m

    def losses(model: Any, micro: InferenceMicroBatch) -> tuple[Tensor, Tensor]:
        return model(micro.tokens, micro.documents)[0].sum(), torch.zeros(())

    timelines = []
    for _ in range(steps + 1):
        dist.barrier()
        list(strategy.forward_backward(micros, losses))
        timelines.append(strategy.timeline)
    return timelines[1:]


def train(run: RunSpec, data: str, steps: int) -> list[list[Span]]:
    """Train the steps of a run; return the spans of this rank by step."""
    dataset = IndexedDataset(data)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run, TrainingData(dataset, dataset, byte_tokenizer()), Path(folder), torch.device("cpu"))
        batches, timelines = prefetch(trainer.loader, 0, STEPS), []
        for _ in range(steps + 2):
            dist.barrier()
            trainer.train_step(batches)
            assert isinstance(trainer.strategy, PipelineStrategy)
            timelines.append(trainer.strategy.timeline)
        batches.close()
    return timelines[2:]
