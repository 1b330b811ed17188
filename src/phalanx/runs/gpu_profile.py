"""Figures of one step on a GPU, from the trace of torch.profiler: a part of the step's record (`StepRecord`)."""

from __future__ import annotations

from typing_extensions import TypedDict

from phalanx.runs.decode import Amount, Count


class KernelSum(TypedDict):
    """Kernels or calls of one kind."""

    count: Count
    seconds: Amount
    """Sum of their durations, in which simultaneous ones count twice."""


class CollectiveSum(KernelSum):
    """NCCL kernels of one collective in one process group."""

    collective: str
    busy_seconds: Amount
    """Time in which at least one of them runs."""


class GroupCommunication(TypedDict):
    """NCCL kernels of one process group."""

    group: str
    """PyTorch's name of the group, or "" if the trace does not have it."""
    description: str
    """PyTorch's description of the group, such as mesh_tp."""
    ranks: Count
    """The number of ranks, or 0 if the trace does not have it."""
    busy_seconds: Amount
    exposed_seconds: Amount
    """Time in which at least one of its kernels runs, and no compute kernel of any stream."""
    collectives: list[CollectiveSum]


class GpuProfile(TypedDict):
    """Times of a GPU in a step, and its kernels.

    The step is the sum of `compute_seconds`, `exposed_communication_seconds`, `exposed_memory_seconds` and
    `idle_seconds`.
    """

    seconds: Amount
    """Duration of the step, from an idle GPU to an idle GPU."""
    compute_seconds: Amount
    """Time in which at least one kernel runs that is not NCCL's."""
    communication_seconds: Amount
    """Time in which at least one kernel of NCCL runs."""
    exposed_communication_seconds: Amount
    """Time in which at least one kernel of NCCL runs, and no compute kernel."""
    memory_seconds: Amount
    """Time in which at least one copy or memset runs."""
    exposed_memory_seconds: Amount
    """Time in which at least one copy or memset runs, and no kernel."""
    idle_seconds: Amount
    """Time in which nothing runs."""
    late_launch_seconds: Amount
    """Part of the idle time before the host has launched what runs next."""
    late_launches: Count
    """The number of such gaps."""
    families: dict[str, KernelSum]
    """Kernels, copies and memsets by family."""
    groups: list[GroupCommunication]
