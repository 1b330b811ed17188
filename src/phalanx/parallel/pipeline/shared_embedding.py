"""The embedding of a pipeline whose first and last rank need it: tied to the head, or for multi-token prediction.

The first rank trains the weight. It adds the gradients of the last rank to its own, and sends its weights after every
update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.parallel.strategy import Strategy
from phalanx.spec.parts.model import model_parameters


class SharedEmbedding:
    """One rank's part in a shared embedding. All methods are no-ops on a rank that does not share one."""

    def __init__(
        self,
        stages: StageModule,
        data_parallel: Strategy,
        end_ranks: tuple[int, int],
        p2p_groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        """Create the link between the ranks with the first and the last stage, `end_ranks`.

        `p2p_groups` carry messages to later and to earlier ranks."""
        self.stages = stages
        self.data_parallel = data_parallel
        self.first, self.last = end_ranks
        self.to_later, self.to_earlier = p2p_groups
        has_end = self.to_later.rank() in end_ranks
        self.is_trained = not model_parameters(stages.spec)["embedding.weight"].is_frozen
        self.is_shared = stages.spec.reuses_embedding and self.first != self.last and has_end

    def create_copy(self, template: Tensor) -> None:
        """Give the last rank its copy of the weight, with the dtype and device of `template`."""
        if not self.stages.has_embedding_copy:
            return
        shape = torch.Size((self.stages.spec.vocab_size, self.stages.spec.hidden_size))
        sharding = self.data_parallel.model_parallel.sharding
        if sharding is not None:
            shape = sharding.local_shape("embedding.weight", shape)
        self.stages.embedding.weight = template.new_zeros(shape).requires_grad_(self.is_trained)

    @property
    def copy(self) -> Tensor | None:
        """The last rank's copy of the weight."""
        return self.stages.embedding.weight if self.stages.has_embedding_copy else None

    def reduce_gradient(self) -> None:
        """Add the last rank's gradient to that of the first rank."""
        if not self.is_shared or not self.is_trained:
            return
        with self.data_parallel.comm_wait.measure():
            if self.copy is not None:
                assert self.copy.grad is not None
                dist.send(self.copy.grad, group=self.to_earlier, group_dst=self.first)
                self.copy.grad = None
                return
            weight = self.stages.embedding.weight
            received_grad = torch.empty_like(weight)
            dist.recv(received_grad, group=self.to_earlier, group_src=self.last)
            self.data_parallel.add_gradient(weight, received_grad)

    def send_weight(self) -> None:
        """Send the trained weight to the last rank."""
        if not self.is_shared:
            return
        with self.data_parallel.comm_wait.measure():
            if self.copy is not None:
                dist.recv(self.copy.detach(), group=self.to_later, group_src=self.first)
            else:
                self.stages.wait_for_parameters(self.stages.embedding)
                dist.send(self.stages.embedding.weight.detach(), group=self.to_later, group_dst=self.last)
