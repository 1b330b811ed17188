"""Rank with a planted fault, as tests.null_gpu.rank: `python -m tests.null_gpu.faulty_rank FAULT ARGUMENTS`."""

from __future__ import annotations

import faulthandler
import sys

import torch
import torch.distributed as dist

from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline import runtime
from phalanx.train.__main__ import main
from tests.null_gpu.given_numbers import give_numbers


def join_group() -> int:
    """Initialize NCCL; return this rank."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    return dist.get_rank()


def messages_in_another_order() -> None:
    """Receive two messages of different sizes in another order than they are sent."""
    rank = join_group()
    short, long = torch.zeros(8, device="cuda"), torch.zeros(16, device="cuda")
    for message in (short, long) if rank == 0 else (long, short):
        (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
    torch.cuda.synchronize()


def sums_in_another_order() -> None:
    """Call two all-reduces of one group, in another order on rank 1."""
    rank = join_group()
    short, long = torch.zeros(8, device="cuda"), torch.zeros(16, device="cuda")
    for terms in (short, long) if rank == 0 else (long, short):
        dist.all_reduce(terms)
    torch.cuda.synchronize()


def groups_in_another_order() -> None:
    """Call all-reduces of two groups, and wait for each on the host, in another order on rank 1."""
    rank = join_group()
    groups, terms = [dist.new_group([0, 1]), dist.new_group([0, 1])], torch.zeros(8, device="cuda")
    for group in groups:
        dist.all_reduce(terms, group=group)
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(terms, group=group)
        torch.cuda.synchronize()


def tensor_of_cpu() -> None:
    """Call an NCCL all-reduce of a tensor in CPU memory."""
    join_group()
    dist.all_reduce(torch.zeros(8))


def one_group_for_both_directions() -> None:
    """Train with a pipeline that sends gradients in the group of its activations."""
    Mesh.pipeline_groups = property(lambda mesh: (mesh.device_mesh["pp"].get_group(),) * 2)
    train()


def peers_that_never_met() -> None:
    """Train with a pipeline whose first messages create the communicators of pairs."""
    runtime.connect_peers = lambda *_, **__: None
    train()


def kernels_loaded_late() -> None:
    """Train with a pipeline that loads its kernels while messages are running."""
    runtime.LAZY_LOADING_DEVICES = ()
    train()


def train() -> None:
    """Train as tests.null_gpu.rank does."""
    give_numbers()
    main()


FAULTS = {
    fault.__name__: fault
    for fault in (
        messages_in_another_order,
        sums_in_another_order,
        groups_in_another_order,
        tensor_of_cpu,
        one_group_for_both_directions,
        peers_that_never_met,
        kernels_loaded_late,
    )
}

if __name__ == "__main__":
    faulthandler.enable()
    FAULTS[sys.argv.pop(1)]()
