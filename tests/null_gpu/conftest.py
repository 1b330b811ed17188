"""Collect these tests on the null GPU only (make test-null-gpu)."""

from __future__ import annotations

import pytest

from tests.null_gpu import is_null_gpu

collect_ignore_glob = [] if is_null_gpu() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def null_gpu() -> None:
    """Fail if the library is loaded and PyTorch finds no GPU: ranks would train on the CPU."""
    import torch

    assert torch.cuda.is_available()
