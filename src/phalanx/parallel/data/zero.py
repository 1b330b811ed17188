"""ZeRO-1 and ZeRO-2: every rank computes with the full model, and trains its rows of the model.

Source: arXiv 1910.02054, sections 5.1 and 5.2. A rank owns an N-th of every parameter's rows and their optimizer state.
Gradients are reduce-scattered in buckets to their owners (in bf16 exchanged, then summed in fp32): during the backward
pass, or in a pipeline after all passes of the step. The owners step; then the new rows are gathered, for a transformer
during the next forward pass. ZeRO-1 keeps full gradients and sends them once per step. ZeRO-2 sends gradients at every
micro-batch and keeps only its rows; in a pipeline it is ZeRO-1.

At most `MAX_BUCKETS_IN_FLIGHT` reductions or gathers run at a time. Both start in the order of the buckets, and all
gathers of an update start before the next reduction: the collectives have one order on all ranks.

Bytes per parameter, with Adam: in fp32 the owned rows are part of the model that computes, 4 + 4 + 8/N or 4 + (4 +
8)/N. In bf16 the model and its gradients are bf16, and owners have separate fp32 rows: 2 + 2 + 12/N or 2 + (2 + 12)/N
(section 3.1). Gradients of more than `MAX_BF16_SUMS` micro-batches accumulate in fp32: 2 bytes more. The copy of a tied
embedding on a pipeline's last stage is an exception: its own gradient accumulates in bf16. A single replica in bf16 is
ZeRO-1 with N = 1.

Why: `docs/design/decisions/own-zero.md`."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.model.transformer import Transformer
from phalanx.parallel.comm.host_copy import copy_to_host, wait_for_host_copies
from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.data.sharding_checks import check_shardable_optimizers, steps_in_pieces
from phalanx.parallel.data.zero_buckets import Bucket
from phalanx.parallel.data.zero_gathers import WeightGathers
from phalanx.parallel.data.zero_parameters import OwnedParameter, RowSharding, master_copy, trainable_parameters_of
from phalanx.parallel.grad_norm import clip_coefficient
from phalanx.parallel.module_tensors import materialize, named_parameters, optimizer_state_tensors, step_parameters
from phalanx.parallel.protocols import ModelShardingProtocol
from phalanx.parallel.strategy import Strategy
from phalanx.program.buckets import (
    MAX_BUCKETS_IN_FLIGHT,
    PIECE_BYTES,
    chunk_by_bytes,
    fill_buckets,
    may_reduce_together,
    zero_bucket_bytes,
)
from phalanx.spec.formatting import plural
from phalanx.spec.layout import Layout

logger = logging.getLogger(__name__)


class ZeRO(Strategy):
    """ZeRO stage 1 or 2; trains this rank's rows as DTensors (full parameters on a single rank).

    `offload` stores the trained rows and their state. If ranks share the model itself, `model_sharding` describes their
    shards."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        mesh: DeviceMesh | None,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        offload: CpuOffload | None,
        expert_parameters: frozenset[str] = frozenset(),
        expert_mesh: DeviceMesh | None = None,
        model_sharding: ModelShardingProtocol | None = None,
    ) -> None:
        """Shard a module over `mesh`, which has one axis (None: a single rank).

        The model computes in `compute_dtype` (None: unchanged). `expert_mesh` shards `expert_parameters`."""
        sharding = RowSharding(mesh)
        expert_sharding = RowSharding(expert_mesh)
        names = [name for name, _ in named_parameters(module)]
        shardings = {name: expert_sharding if name in expert_parameters else sharding for name in names}
        are_separate = compute_dtype is not None or offload is not None
        master_rows = {
            name: master_copy(owned_rows, device, offload)
            for name, p in trainable_parameters_of(named_parameters(module))
            for owned_rows in [shardings[name].rows(p)]
            # Fused AdamW steps only contiguous rows.
            if are_separate or not owned_rows.is_contiguous()
        }
        if compute_dtype is not None:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(compute_dtype)
        materialize(module, device)
        super().__init__(module, sharding.group)
        self.keeps_full_gradients = layout.data_parallel == "zero1"
        self.autocast = compute_dtype is None
        self.offload = offload
        owned_parameters = {
            name: OwnedParameter(name, p, shardings[name], master_rows.get(name), offload, largest_shape)
            for name, p in self.trainable_parameters.items()
            for largest_shape in [p.shape if model_sharding is None else model_sharding.largest_shape(name)]
        }
        self.trainable_parameters = {name: owned.master for name, owned in owned_parameters.items()}
        self.piece_bytes = PIECE_BYTES[layout.offload]
        self.offload_name = layout.offload
        limit = zero_bucket_bytes(layout, sharding.ranks)
        buckets = fill_buckets(
            owned_parameters.values(),
            limit,
            nbytes=lambda owned: owned.largest_numel * owned.parameter.element_size(),
            kind=lambda owned: (owned.sharding, owned.parameter.dtype),
        )
        self.buckets = [Bucket(parameters, self.comm_wait) for parameters in buckets]
        logger.debug("gradients are reduced in %s of at most %.1f MB", plural(len(buckets), "bucket"), limit / 1e6)
        self._communicates = True
        self._num_started = 0
        self._reducing: deque[Bucket] = deque()
        """Buckets whose reductions have started."""
        self._gradient_factor: Tensor | None = None
        """Factor that offloaded gradients must still be multiplied by."""
        self.gathers = WeightGathers(self.buckets)
        # Weak references: autograd keeps hooks alive, which would keep the groups of ranks alive.
        for bucket in self.buckets:
            for owned in bucket.parameters:
                ready = partial(
                    ZeRO._on_gradient_ready, weakref.proxy(self), weakref.proxy(bucket), weakref.proxy(owned)
                )
                owned.parameter.register_post_accumulate_grad_hook(ready)

    def overlap_gathers(self, transformer: Transformer) -> None:
        """Gather updated weights during the next forward pass; other readers of weights call `wait_for_weights`."""
        if self.group is not None and self.offload is None:
            self.gathers.overlaps_forward = True
            # The reference is weak, so that a copy of the module, or a module that outlives its strategy, waits for
            # nothing.
            gathers = weakref.ref(self.gathers)

            def wait_for_parameters(module: nn.Module) -> None:
                if (pending := gathers()) is not None:
                    pending.wait_for_module(module)

            transformer.wait_for_parameters = wait_for_parameters

    @contextmanager
    def accumulate(self, last: bool = True) -> Iterator[None]:
        """Wrap the forward and backward pass of a micro-batch, or all passes of a pipeline's step.

        The reduction of a bucket overlaps with the backward pass that completes it. A pipeline passes False for `last`
        and reduces in `finalize_gradients`, without overlap."""
        self._communicates = last or not self.keeps_full_gradients
        self._num_started = 0
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.parameters)
        yield
        if self._communicates:
            self._reduce_remaining()

    def end_rehearsal(self) -> None:
        """Load the kernels that sum in fp32, and drop the gradients of the rehearsal."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.float().add_(parameter.grad)
        self.zero_grad()

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that another rank computed, in fp32 if this rank's sum is fp32."""
        parameters = (owned for bucket in self.buckets for owned in bucket.parameters)
        next(owned for owned in parameters if owned.parameter is parameter).add_to_full_gradient(gradient)

    def finalize_gradients(self) -> None:
        """Reduce all gradients of the step, after its passes."""
        self._reduce_remaining()

    def _on_gradient_ready(self, bucket: Bucket, owned: OwnedParameter, _: Tensor) -> None:
        if self.keeps_full_gradients or (not bucket.has_peers and self.offload is None):
            owned.add_full_gradient()
        bucket.num_missing -= 1
        if self._communicates and not bucket.num_missing:
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        """Send the complete buckets, in the same order on every rank."""
        self.gathers.wait()
        while self._num_started < len(self.buckets) and not self.buckets[self._num_started].num_missing:
            bucket = self.buckets[self._num_started]
            while self._reducing and not self._can_start_reduce(bucket):
                self._finish_first_reduction()
            bucket.start_reduce(self.keeps_full_gradients)
            self._reducing.append(bucket)
            self._num_started += 1

    def _can_start_reduce(self, bucket: Bucket) -> bool:
        """Return whether memory allows another reduction before the pending ones have ended."""
        return len(self._reducing) < MAX_BUCKETS_IN_FLIGHT and may_reduce_together(
            bucket.message_bytes, self._reducing[-1].message_bytes, self.offload_name
        )

    def _finish_first_reduction(self) -> None:
        self._reducing.popleft().finish_reduce(self.keeps_full_gradients)

    def _reduce_remaining(self) -> None:
        """Send the buckets that were not sent during a backward pass, and finish all reductions."""
        for bucket in self.buckets:
            # A missing gradient is missing on all ranks, or counts as 0.
            bucket.num_missing = 0
        self._reduce_ready()
        while self._reducing:
            self._finish_first_reduction()

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradients of the owned rows."""
        parameters = [owned for bucket in self.buckets for owned in bucket.parameters]
        return {
            owned.name: owned.sharding.as_dtensor(owned.gradient, owned.parameter)
            for owned in parameters
            if owned.gradient is not None
        }

    def normalize_and_clip(self, norm: Tensor, weight: Tensor, clip_norm: float) -> Tensor:
        """Normalize and clip as `Strategy` does; the step scales offloaded gradients when it reads them."""
        if self.offload is None:
            return super().normalize_and_clip(norm, weight, clip_norm)
        norm = norm / weight.to(norm.dtype)
        (self._gradient_factor,) = copy_to_host(clip_coefficient(norm, clip_norm) / weight.to(norm.dtype))
        return norm

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step the owned rows piece by piece, in the order of the forward pass, and gather the results."""
        if self.group is not None:
            check_shardable_optimizers(optimizers)
        self.gathers.wait()
        pieces = chunk_by_bytes(self.buckets[::-1], self._piece_bytes(optimizers))
        for index, piece in enumerate(pieces):
            parameters = [owned for bucket in piece for owned in bucket.parameters]
            masters = [owned.master for owned in parameters]
            gradients = [owned.gradient for owned in parameters]
            with self.offload.stepping(index, optimizers, masters, gradients) if self.offload else nullcontext():
                step_parameters(optimizers, masters, self._scale_master_gradients(parameters))
            for bucket in piece:
                bucket.drop_gradients()
                self.gathers.add(bucket)
        if not self.gathers.overlaps_forward:
            self.gathers.wait()

    def _piece_bytes(self, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        """Return the bytes of rows to step at once.

        A single rank steps all rows if an optimizer may use all gradients."""
        is_whole = self.offload is None and self.group is None and not all(map(steps_in_pieces, optimizers))
        return math.inf if is_whole else self.piece_bytes

    def _scale_master_gradients(self, parameters: Sequence[OwnedParameter]) -> list[Tensor | None]:
        """Return the scaled gradients of these masters, with a single wait for the device."""
        gradients = [owned.master_gradient(self._gradient_factor) for owned in parameters]
        # The gradients were on the device until now.
        if self.offload is not None and self.keeps_full_gradients:
            wait_for_host_copies(parameters[0].parameter.device)
        return gradients

    def wait_for_weights(self) -> None:
        """Finish all gathers."""
        self.gathers.wait()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        for bucket in self.buckets:
            bucket.drop_gradients()

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        """Return zeros like `parameter`, in the offload storage if there is one."""
        return self.offload.zeros_like(parameter) if self.offload else super().init_optimizer_state(parameter)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the persistent tensors of this rank by part."""
        parameters = [owned for bucket in self.buckets for owned in bucket.parameters]
        master_rows = [owned.rows for owned in parameters if not owned.is_aliased]
        row_gradients = [owned.gradient for owned in parameters if owned.gradient is not None]
        full_gradients = [owned.full_gradient for owned in parameters if owned.full_gradient is not None]
        resident: dict[str, list[Tensor]] = {
            "parameters": [
                *(owned.parameter for owned in parameters),
                *self.frozen_parameters.values(),
                *self.carried_tensors,
            ]
        }
        if self.offload is None:
            return resident | {
                "gradients": row_gradients + full_gradients,
                "optimizer": master_rows + optimizer_state_tensors(optimizers),
            }
        return resident | {
            "gradients": full_gradients,
            "offloaded": master_rows + optimizer_state_tensors(optimizers) + ([] if full_gradients else row_gradients),
        }

    def sync_model_weights(self) -> None:
        """Gather every parameter from the owners of its rows."""
        self.gathers.discard()
        for bucket in self.buckets[::-1]:
            self.gathers.add(bucket)
        self.gathers.wait()
