"""What Phalanx must be told on a GPU that computes nothing, in every process of a dry run (PYTHONPATH): numbers that
decide what it does next. There a sum of losses, or a count of rows, is whatever lies in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

TOKENS, LOSS = 1000.0, 5000.0


def give_counts(moe: Any) -> None:
    """Have experts be balanced."""

    def balanced(counts: Any, total: int) -> list[int]:
        counts.tolist()  # the wait that it is
        quotient, remainder = divmod(total, len(counts))
        return [quotient + (index < remainder) for index in range(len(counts))]

    moe.to_host_list = balanced


def give_sums(learner: Any) -> None:
    """Have every step come to the same loss and norm."""
    import torch

    reduce = learner.Learner.reduce

    def reduce_to_numbers(self: Any, sums: Any) -> Any:
        reduced = reduce(self, sums)
        numbers = torch.ones_like(reduced.sums, device="cpu")
        numbers[:6] = torch.tensor([TOKENS, LOSS, 0.0, 0.0, 0.0, 0.0])
        reduced.sums.tolist()  # the wait that it is
        return replace(reduced, sums=numbers, norm=torch.tensor(1.0))

    learner.Learner.reduce = reduce_to_numbers


def count_on_host(resumable: Any) -> None:
    """Have experts' loads be counted where numbers are."""
    initialize = resumable.ResumableLearner.__init__

    def initialize_on_host(self: Any, *args: Any, **options: Any) -> None:
        initialize(self, *args, **options)
        self.expert_loads = self.expert_loads.cpu()

    resumable.ResumableLearner.__init__ = initialize_on_host


def give_evaluation(evaluator: Any) -> None:
    """Have every evaluation come to the same loss."""
    import torch

    evaluator._sum_over_ranks = lambda *_: torch.tensor([LOSS, TOKENS, TOKENS])


def leave_out_cudnn(_: Any) -> None:
    """Choose no cuDNN, which needs a driver."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def give_documents(attention: Any) -> None:
    """Have a document in each row."""
    import torch

    def row_bounds(starts_BT: Any) -> Any:
        rows, tokens = starts_BT.shape
        return torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32).to(starts_BT.device)

    leave_out_cudnn(attention)
    attention.document_bounds = row_bounds


def give_clock_offset(clock_sync: Any) -> None:
    """Have all clocks agree."""
    clock_sync.measure_clock_offset = lambda *_, **__: clock_sync.ClockOffset()


PATCHES: dict[str, Callable[[Any], None]] = {
    "phalanx.model.moe": give_counts,
    "phalanx.train.learner": give_sums,
    "phalanx.train.profiling.clock_sync": give_clock_offset,
    "phalanx.train.resumable": count_on_host,
    "phalanx.train.evaluator": give_evaluation,
    "phalanx.model.attention": give_documents,
    "phalanx.bench.matmul": leave_out_cudnn,
}


class PatchingFinder(MetaPathFinder):
    """Patches modules once they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        patch = PATCHES.pop(name)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, PatchingFinder())
