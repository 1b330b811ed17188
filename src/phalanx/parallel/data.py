"""Data parallelism (DDP): every rank holds the whole model, reads its own share of the batch, and gradients are summed.

Gradients are all-reduced in buckets while the backward pass goes on (PyTorch Distributed, arXiv 2006.15704)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.exposed import ExposedTime
from phalanx.spec.layout import Layout


class DataParallel:
    """A replica of the model. DDP divides summed gradients by the ranks; the trainer divides the loss by the tokens
    of the global batch, so `loss_scale` takes DDP's division back."""

    def __init__(self, module: nn.Module, layout: Layout, group: dist.ProcessGroup) -> None:
        self.exposed = ExposedTime()
        self.loss_scale = float(group.size())
        # The routers' buffers are kept equal by summing their loads; DDP need not broadcast them at every forward pass.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [name for name, _ in module.named_buffers()]
        )
        self.model = DistributedDataParallel(
            module,
            process_group=group,
            bucket_cap_mb=layout.bucket_mb,
            static_graph=layout.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,  # initial weights are a function of their names
        )
        self._last_gradient = 0.0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def _gradient_ready(self, _: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def rest(self) -> None:
        """Nothing was gathered."""

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch; only the `last` one of a step communicates."""
        if not last:
            with self.model.no_sync():
                yield
            return
        yield
        # On the CPU, backward returns when the last bucket is reduced: what follows the last gradient is exposed.
        if next(self.model.parameters()).device.type == "cpu":
            self.exposed.seconds += max(0.0, time.perf_counter() - self._last_gradient)
