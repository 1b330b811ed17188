"""Interfaces that a strategy needs: micro-batches, their losses, and the ranks that share a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.sequence_context import Documents
from phalanx.parallel.comm.wait_timer import WaitTimer


class MicroBatchProtocol(Protocol):
    """The model's input: token ids [B, T], and their documents (see Transformer.forward)."""

    @property
    def tokens(self) -> Tensor:
        """Token ids [B, T]."""

    @property
    def documents(self) -> Documents | None:
        """Documents of the tokens, if they are masked."""

    @property
    def token_keys(self) -> Tensor | None:
        """Keys of the tokens, if inputs of adapters are dropped (`model.dropout`)."""


LossFunction = Callable[[Callable[..., Any], Any], tuple[Tensor, Tensor]]
"""Runs a micro-batch (second argument) through the model (first); returns loss and auxiliary loss."""


class ModelShardingProtocol(Protocol):
    """The shards of a model that ranks share (tensor and expert parallelism)."""

    shapes: dict[str, torch.Size]
    """Shapes of full parameters."""

    def expert_shard(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's shard of one of its experts; `full` is the full expert."""

    def as_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor like the trained parameter `name` as part of one of the full model (shared memory)."""

    def local_shape(self, name: str, global_shape: torch.Size) -> torch.Size:
        """Return the shape of this rank's shard of the parameter `name` with the shape `global_shape`."""

    def largest_shape(self, name: str) -> torch.Size:
        """Return the shape of the largest shard of the parameter `name` on any rank."""

    def gradient_reduce_group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group over which this parameter's gradient must be summed; None if there is none."""


class TensorParallelProtocol(Protocol):
    """The ranks that share matrix products (tensor parallelism)."""

    first_row: int
    """First row of the vocabulary on this rank."""

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return the residual stream, or its gradient, of all tokens."""

    def reduce_tokens(self, term: Tensor) -> Tensor:
        """Return the sum over ranks of a term for all tokens, as tokens of the residual stream."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce a tensor in place, and return it."""

    def residual_shape(self, tokens: torch.Size) -> tuple[int, ...]:
        """Return the shape of the residual stream without its width, for a micro-batch of shape `tokens`."""


@dataclass(kw_only=True)
class ModelParallelism:
    """The groups of ranks that share a strategy's module; without values if each rank has the full model."""

    sharding: ModelShardingProtocol | None = None
    """Shards of the model, if ranks share it."""
    tensor_parallel: TensorParallelProtocol | None = None
    """The ranks that share matrix products, if any."""
    wait_timers: dict[str, WaitTimer] = field(default_factory=dict)
    """Recorded waiting times of this rank, by reason, besides `Strategy.comm_wait`."""
    pop_expert_rows: Callable[[], int] | None = None
    """Returns the number of rows of this rank's experts since the last call, with expert parallelism."""
    router_count_multiplicity: int = 1
    """Number of ranks whose routers count each choice of an expert."""

    def as_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor like the trained parameter `name` as part of one of the full model (shared memory)."""
        return tensor if self.sharding is None else self.sharding.as_global_dtensor(name, tensor)

    def sync_scalars(self, sums: Tensor) -> None:
        """Synchronize sums between ranks that share products, by their maximum.

        The sums of tokens and losses are equal on these ranks. Counts of requests may differ: a signal to stop, a
        request to finish, or a pending save reaches some ranks only."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.all_reduce(sums, dist.ReduceOp.MAX)
