"""These tests are for the GPU that computes nothing (make test-null-gpu): elsewhere there is none to collect."""

from __future__ import annotations

import pytest

from tests.null_gpu import is_null_gpu

collect_ignore_glob = [] if is_null_gpu() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def null_gpu() -> None:
    """Fail where the library is there and PyTorch sees no GPU: ranks would train on the CPU."""
    import torch

    assert torch.cuda.is_available()
