"""Interfaces that a strategy needs: micro-batches, their losses, and the ranks that share a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.attention import Documents


class MicroBatchProtocol(Protocol):
    """The model's input: token ids [B, T], and their documents (see Transformer.forward)."""

    @property
    def tokens(self) -> Tensor:
        """Token ids [B, T]."""

    @property
    def documents(self) -> Documents | None:
        """Documents of the tokens, if they are masked."""


LossFunction = Callable[[Callable[..., Any], Any], tuple[Tensor, Tensor]]
"""Runs a micro-batch (second argument) through the model (first); returns loss and auxiliary loss."""


class ModelShardingProtocol(Protocol):
    """The shards of ranks in a model (tensor and expert parallelism)."""

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

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce a tensor in place, and return it."""

    def cross_entropy(self, logits_BTV: Tensor, targets_BT: Tensor, ignored: int) -> Tensor:
        """Return the loss of this rank's part of the logits, like `Strategy.cross_entropy`.

        Args:
            logits_BTV: Logits of this rank's part of the vocabulary.
            targets_BT: Token ids of the full vocabulary.
            ignored: Token id of targets that are not counted.
        """

    def residual_shape(self, tokens: torch.Size) -> tuple[int, ...]:
        """Return the shape of the residual stream without its width, for a micro-batch of shape `tokens`."""
