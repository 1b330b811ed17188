"""OLMo-core with its own transformer of the same shape in its own train module: DDP, FSDP2 or tensor parallelism.

OLMo-core's trainer is not used, nor its work between steps: metrics, garbage collection and callbacks."""

from __future__ import annotations

from typing import Any

import torch
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig
from olmo_core.train.train_module.transformer.config import (
    TransformerTensorParallelConfig,
)

from benchmarks.peers.plain import loader
from benchmarks.peers.rank import Step
from benchmarks.shapes import OPTIMIZER, RANKS, SEED, STEPS, Shape
from phalanx.cost.exact.parameters import count_parameters
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader, prefetch


class Recorder:
    """Replacement for the trainer that keeps the last value of each metric."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def record_metric(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self.metrics[name] = value

    def record_ce_loss(self, value: Any, *_: Any, **__: Any) -> None:
        self.metrics["loss"] = value


def parallelism(shape: Shape, layout: str) -> dict[str, Any]:
    """Return the configuration of `layout`."""
    if layout == "tp2":
        # OLMo-core requires data parallelism, which has one rank here.
        one = {"dp_config": TransformerDataParallelConfig(name=DataParallelType.fsdp)}
        return one | {"tp_config": TransformerTensorParallelConfig(degree=RANKS)}
    return {"dp_config": TransformerDataParallelConfig(name=DataParallelType(layout))}


def build(shape: Shape, layout: str, dataset: IndexedDataset) -> Step:
    model = TransformerConfig.llama_like(
        d_model=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        rope_theta=int(shape.model.rope.theta),
    ).build(init_device="meta")
    assert model.num_params == count_parameters(shape.model).total
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=shape.micro_batch * shape.sequence,
        max_sequence_length=shape.sequence,
        optim=AdamWConfig(
            lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, weight_decay=OPTIMIZER.weight_decay, fused=True
        ),
        **parallelism(shape, layout),
        max_grad_norm=OPTIMIZER.max_grad_norm,
    ).build(model, device=torch.device("cpu"))
    recorder = Recorder()
    module._attach_trainer(recorder)
    whole = TokenLoader(dataset, shape.sequence, shape.sequences, SEED, 0, 1, mask_documents=False)
    batches = prefetch(whole if layout == "tp2" else loader(shape, dataset), 0, STEPS)

    def step() -> float:
        batch = next(batches)
        module.zero_grads()
        module.train_batch({"input_ids": torch.from_numpy(batch.tokens), "labels": torch.from_numpy(batch.targets)})
        module.optim_step()
        return float(recorder.metrics["loss"])

    return step
