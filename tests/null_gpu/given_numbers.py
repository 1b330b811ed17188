"""Replacements of numbers that a null GPU does not compute but on which a program branches.
Routing sends an equal number of tokens to each expert, losses and norms are finite, and nobody
requests a stop. Reads still wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.cost.exact.scalar_reductions import NUM_SCALARS
from phalanx.model import host_counts
from phalanx.model.moe import Router
from phalanx.parallel.comm.host_copy import PendingCopies
from phalanx.train import evaluator, learner, trainer
from phalanx.train.callbacks import rank_records
from phalanx.train.expert_counts import ExpertCounts
from phalanx.train.profiling import clock_sync, step_profiler

NUM_TOKENS, LOSS_SUM = 1000.0, 5000.0


def balanced_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Return the rows of each expert, in place of `read_counts`, for balanced experts."""
    counts.tolist()
    share, rest = divmod(total, counts.shape[1])
    return [[share + (index < rest) for index in range(counts.shape[1])]] * len(counts)


class GivenStepSums(PendingCopies):
    """Copies of the sums and the norm of a step, with the numbers of a successful step."""

    def wait(self) -> list[Tensor]:
        sums, norm = super().wait()
        sums_of_one = torch.ones_like(sums)
        sums_of_one[0], sums_of_one[1], sums_of_one[2:NUM_SCALARS] = NUM_TOKENS, LOSS_SUM, 0
        return [sums_of_one, torch.ones_like(norm)]


class GivenExpertCounts(ExpertCounts):
    """Counts of experts in host memory: the device's counts would be uninitialized memory."""

    def __init__(self, layers: list[int], num_experts: int, device: torch.device) -> None:
        super().__init__(layers, num_experts, torch.device("cpu"))

    def add(self, loads: Tensor, routers: dict[int, Router], multiplicity: int, update_biases: bool) -> None:
        self.current.add_(NUM_TOKENS)
        for index, router in routers.items():
            router.load.copy_(loads[index])
            router.update_bias(update_biases)


def give_numbers() -> None:
    """Replace all reads of the device by given numbers, and disable cuDNN, which needs a real driver."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    host_counts.read_counts = balanced_counts
    trainer.PendingCopies = GivenStepSums
    learner.ExpertCounts = GivenExpertCounts
    sum_over_ranks = evaluator._sum_over_ranks
    evaluator._sum_over_ranks = lambda learner, sums: (sum_over_ranks(learner, sums), torch.ones(3))[1]
    for module in (rank_records, step_profiler):
        module.measure_clock_offset = lambda *_, **__: clock_sync.ClockOffset()
    step_profiler.trace_gpu_step = lambda step, *_: (step(), None)  # CUPTI crashes without a driver
