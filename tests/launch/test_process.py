"""What a rank sets before it trains."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from phalanx.launch.process import use_deterministic_kernels
from phalanx.spec.open_files import raise_open_files_limit
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, small_run, train_and_evaluate


def train_with_deterministic_kernels(run: RunSpec) -> tuple[list[tuple[float, float]], bool]:
    use_deterministic_kernels()
    try:
        return train_and_evaluate(run), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_exist_for_all_that_a_run_of_experts_computes(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"model": MOE, "training.steps": 2, "optimizer.name": "muon", "layout.ep": 2})
    expected = rank_pool(2).run(train_and_evaluate, run)
    for rank, (result, was_deterministic) in enumerate(rank_pool(2).run(train_with_deterministic_kernels, run)):
        assert was_deterministic
        assert result == expected[rank]


def test_open_files_limit_is_raised_to_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
