"""What a program decides by numbers that a device computed, where the device computes nothing: routing sends as many
tokens to each expert, losses and norms are finite, nobody asks to stop. Reads still wait for the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.model import moe
from phalanx.parallel.expert import expert_parallel
from phalanx.parallel.pipeline import split_backward
from phalanx.parallel.strategy import StepReduction
from phalanx.train import evaluator, worker
from phalanx.train.learner import Learner
from phalanx.train.profiling import clock_sync, step_profiler

NUM_TOKENS, LOSS_SUM = 1000.0, 5000.0


def balanced_counts(counts: Tensor, total: int) -> list[int]:
    """Return the rows of each expert, in place of `to_host_list`, if all have as many."""
    counts.tolist()
    share, rest = divmod(total, len(counts))
    return [share + (index < rest) for index in range(len(counts))]


def given_reduction(learner: Learner, sums: Tensor) -> StepReduction:
    """Reduce as `Learner.reduce`, and return numbers of a step that went well."""
    reduced = _reduce(learner, sums)
    reduced.sums.tolist()
    float(reduced.norm)
    given = torch.ones_like(reduced.sums, device="cpu")
    given[0], given[1], given[2:6] = NUM_TOKENS, LOSS_SUM, 0
    return replace(reduced, sums=given.to(reduced.sums.device), norm=torch.tensor(1.0).to(reduced.norm.device))


def give_numbers() -> None:
    """Put these in the places of what reads a device, and do without cuDNN, which needs a real driver."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    for module in (moe, expert_parallel, split_backward):
        module.to_host_list = balanced_counts
    Learner.reduce = given_reduction
    sum_over_ranks = evaluator._sum_over_ranks
    evaluator._sum_over_ranks = lambda learner, sums: (sum_over_ranks(learner, sums), torch.ones(3))[1]
    for module in (worker, step_profiler):
        module.measure_clock_offset = lambda *_, **__: clock_sync.ClockOffset()


_reduce = Learner.reduce
