"""Tensors offloaded from a GPU need no more host memory than their bytes."""

from __future__ import annotations

import torch

from phalanx.parallel.data.offload import CpuOffload


def test_offloaded_tensors_are_not_rounded_up_to_a_power_of_two() -> None:
    torch.cuda.init()
    offload, shape = CpuOffload(), (33, 1024, 32)  # 4.1 MiB of fp32, which PyTorch's pinned allocator rounds up to 8
    before = torch.cuda.host_memory_stats()["allocated_bytes.allocated"]
    tensors = [offload.to_host(torch.empty(shape, device="meta")) for _ in range(3)]
    assert torch.cuda.host_memory_stats()["allocated_bytes.allocated"] == before
    assert all(torch.equal(tensor, torch.zeros(shape)) for tensor in tensors)
    assert torch.zeros(shape, pin_memory=True).shape == shape
    assert torch.cuda.host_memory_stats()["allocated_bytes.allocated"] - before == 2**23
