"""Buckets of ZeRO-1 and 2: each row's gradient is reduced to its owner, and the row gathered from it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm.collectives import ReduceScatter, all_gather
from phalanx.parallel.comm.host_copy import copy_to_host
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.data.zero_parameters import OwnedParameter


class Bucket:
    """Parameters whose gradients are sent in one message, and whose rows are gathered in one message.

    The message buffer is [N, n]: for each rank its rows of every parameter, padded where there are fewer."""

    def __init__(self, parameters: list[OwnedParameter], comm_wait: WaitTimer) -> None:
        self.parameters = parameters
        self.comm_wait = comm_wait
        self.group = parameters[0].sharding.group
        self.has_peers = parameters[0].sharding.ranks > 1
        self.sizes = [owned.size for owned in parameters]
        self.message_bytes = parameters[0].sharding.ranks * sum(self.sizes) * parameters[0].parameter.element_size()
        self.num_missing = len(parameters)
        """Number of gradients of the current micro-batch that are not ready.

        Meaningless in the passes of a pipeline, which overlap and send nothing."""
        self._reducing: ReduceScatter | None = None
        self._gathering: tuple[dist.Work, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the owned rows, with padding, on the rank with the most rows.

        The number is equal on all ranks, so they step the same pieces."""
        return sum(owned.largest_size * owned.rows.element_size() for owned in self.parameters)

    def start_reduce(self, keep_full: bool) -> None:
        """Start to send each owner its rows of these gradients."""
        if self.group is None:
            return
        for owned in self.parameters:
            if owned.full_gradient is None:
                owned.add_to_full_gradient(torch.zeros_like(owned.parameter))
        if not self.has_peers:
            return
        sent = self.parameters[0].parameter.new_empty(self.group.size(), sum(self.sizes))
        if any(owned.axis for owned in self.parameters):
            for owned, gradient, message_part in zip(
                self.parameters, self._full_gradients(), sent.split(self.sizes, dim=1), strict=True
            ):
                if owned.axis:
                    rows = owned.sharding.by_rank(gradient)
                    message_part.view(rows.shape).copy_(rows)
                else:
                    torch._chunk_cat(
                        [gradient.view(owned.matrix)], dim=0, num_chunks=self.group.size(), out=message_part
                    )
        else:
            torch._chunk_cat(self._full_matrices(), dim=0, num_chunks=self.group.size(), out=sent)
        if not keep_full:
            for owned in self.parameters:
                owned.drop_full_gradient()
        self._reducing = ReduceScatter(sent, sent.new_empty(sum(self.sizes)), self.group, self.comm_wait)

    def _full_matrices(self) -> list[Tensor]:
        """Return the full gradients as matrices of one dtype, fp32 if a sum is fp32.

        Messages have the dtype of the model, so `start_reduce` rounds fp32 sums to bf16."""
        gradients = self._full_gradients()
        dtype = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
        return [
            gradient.to(dtype).view(owned.matrix) for gradient, owned in zip(gradients, self.parameters, strict=True)
        ]

    def _full_gradients(self) -> list[Tensor]:
        return [owned.full_gradient for owned in self.parameters if owned.full_gradient is not None]

    def finish_reduce(self, keep_full: bool) -> None:
        """Wait for the reduction, and give every parameter the sum of its owned rows' gradients."""
        if self._reducing is None:
            parameters = [owned for owned in self.parameters if owned.full_gradient is not None]
            received = self._full_gradients()
        else:
            parameters = self.parameters
            received = self._wait_for_reduced_rows(self._reducing)
            self._reducing = None
        if self.parameters[0].offload is not None and not keep_full:
            received = copy_to_host(*received)
        for owned, gradient in zip(parameters, received, strict=True):
            owned.accumulate(gradient, keep_full)

    def _wait_for_reduced_rows(self, reducing: ReduceScatter) -> list[Tensor]:
        """Wait for a reduction, and return the summed gradients of the owned rows of each parameter."""
        reducing.wait()
        pairs = zip(self.parameters, reducing.out.split(self.sizes), strict=True)
        return [flat[: owned.rows.numel()].view_as(owned.rows) for owned, flat in pairs]

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters of the bucket."""
        for owned in self.parameters:
            owned.drop_gradient()

    def start_gather(self) -> None:
        """Start to send the trained values of the owned rows to every rank."""
        if self.group is None or not self.has_peers:
            for owned in self.parameters:
                if not owned.is_aliased:
                    owned.parameter.detach().copy_(owned.rows.to(owned.parameter.device, non_blocking=True))
            return
        local_rows = self.parameters[0].parameter.new_zeros(sum(self.sizes))
        for owned, flat in zip(self.parameters, local_rows.split(self.sizes), strict=True):
            # Cast on the device, because the host would cast into memory that is not pinned and wait for the device.
            rows = owned.rows.to(flat.device, non_blocking=True)
            flat[: owned.rows.numel()].view_as(owned.rows).copy_(rows)
        gathered = local_rows.new_empty(self.group.size() * len(local_rows))
        work = all_gather(gathered, local_rows, group=self.group, async_op=True)
        self._gathering = work, gathered.view(self.group.size(), -1)

    def finish_gather(self) -> None:
        """Wait for the gathered rows, and copy them to the model's parameters."""
        gathered = self._wait_for_gather()
        if gathered is None:
            return
        for owned, received in zip(self.parameters, gathered.split(self.sizes, dim=1), strict=True):
            full = owned.parameter.detach()
            if full.numel() == received.numel():
                rows = owned.sharding.by_rank(full)
                rows.copy_(received.view(rows.shape))
            else:
                full.view(owned.matrix).copy_(received.reshape(-1, owned.matrix[1])[: len(full)])

    def discard_gather(self) -> None:
        """Wait for the gathered rows, and drop them."""
        self._wait_for_gather()

    def _wait_for_gather(self) -> Tensor | None:
        """Return the gathered rows, [N, n]; None if no gather has started."""
        if self._gathering is None:
            return None
        work, gathered = self._gathering
        self._gathering = None
        with self.comm_wait.measure():
            work.wait()
        return gathered
