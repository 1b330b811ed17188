"""Recognition of out-of-memory errors, and the requested bytes in messages of allocators."""

from __future__ import annotations

import pytest
import torch

from phalanx.train.guards.oom_report import is_out_of_memory, requested_bytes


def test_requested_bytes_parses_pytorch_cpu_allocator_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(str(caught.value)) == 2**50


@pytest.mark.parametrize(
    ("error", "is_oom", "requested"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."), True, 3 * 2**29),
        (MemoryError(), True, None),
        (OSError(12, "Cannot allocate memory"), True, None),
        (RuntimeError("shapes do not match"), False, None),
        (KeyError("not enough memory"), False, None),
    ],
)
def test_is_out_of_memory_and_requested_bytes_classify_errors(
    error: BaseException, is_oom: bool, requested: int | None
) -> None:
    assert (is_out_of_memory(error), requested_bytes(str(error))) == (is_oom, requested)
