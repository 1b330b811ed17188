"""Benchmark of collectives by the conventions of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

It times the sizes that a run sends, or a sweep of sizes, over a real process group, and verifies the results.

A size S is that of the full tensor for an all-gather or a reduce-scatter, and that of one rank's data for others. Ranks
send and receive around a ring. n is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.bench.timing import time_calls
from phalanx.cost.formulas.collectives import Operation, Traffic, bus_factor
from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.layout import ZERO_STRATEGIES
from phalanx.spec.precision import Precision
from phalanx.spec.run import RunSpec

Call = Callable[[Tensor, Tensor, dist.ProcessGroup], object]
"""An operation with arguments output, input and group. In place, the output is the input or one is part of the other.
"""
BufferMode = Literal["out_of_place", "in_place"]
BUFFER_MODES: tuple[BufferMode, BufferMode] = ("out_of_place", "in_place")
PARTITIONED_OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all")
"""Operations whose inputs or outputs are the parts of a full tensor, one per rank."""
REDUCE_OPERATIONS = ("all_reduce", "reduce_scatter")
UNVERIFIABLE_IN_PLACE = ("all_to_all", "send")
"""Operations whose results in place cannot be predicted, because they overwrite data that is still to be sent."""
MODEL_STATE_GROUPS = ("data", "replicas", "same_experts", "expert_replicas", "servers")
"""Groups that exchange parameters and gradients instead of activations."""
NUM_TEST_VALUES = 61
"""Number of distinct test values; bf16 represents all of them exactly."""
CHECK_CHUNK_ELEMENTS = 2**20
"""Elements that are verified at a time. Full tensors of expected values would exceed the memory of the results."""


@dataclass(frozen=True)
class CollectiveKind:
    """An operation of torch.distributed in a group of a run's ranks at one precision."""

    operation: Operation
    group_kind: GroupKind
    precision: Precision

    @property
    def name(self) -> str:
        """Name for people and files."""
        return f"{self.operation} among {self.group_kind}"


@dataclass(frozen=True)
class BenchmarkCase:
    """A kind of collective and a size."""

    kind: CollectiveKind
    ranks: int
    """Ranks per group (n)."""
    size_bytes: int
    calls: int
    """Maximum over ranks of the calls in one update of the run; 0 for sizes of a sweep only."""


@dataclass(frozen=True)
class CaseTiming:
    """Timing of a case on one rank."""

    group: tuple[int, ...]
    seconds: Mapping[BufferMode, list[float]]
    """Seconds of each iteration."""
    num_wrong: Mapping[BufferMode, int | None]
    """Number of wrong elements; None if they cannot be verified."""


# -- cases -------------------------------------------------------------------------------------------------------------


def collective_kinds_of_run(
    run: RunSpec, traffic: Mapping[str, list[Traffic]]
) -> dict[CollectiveKind, list[list[Traffic]]]:
    """Group the traffic of a run (`traffic_by_group`) by kind of collective, for each sending role.

    A receive is the peer's send and is not counted.
    """
    roles_by_kind: dict[CollectiveKind, list[list[Traffic]]] = {}
    for rows in traffic.values():
        rows_by_kind: dict[CollectiveKind, list[Traffic]] = {}
        for row in rows:
            if row.operation != "recv":
                # The ends of a pipeline communicate over its group.
                group_kind = "pp" if row.group_kind == "ends" else row.group_kind
                kind = CollectiveKind(row.operation, group_kind, _wire_precision(run, row))
                rows_by_kind.setdefault(kind, []).append(row)
        for kind, kind_rows in rows_by_kind.items():
            roles_by_kind.setdefault(kind, []).append(kind_rows)
    return roles_by_kind


def _wire_precision(run: RunSpec, row: Traffic) -> Precision:
    """Return the precision in transit.

    Gradients are reduced in the precision of the optimizer, unless the layout sets another.
    """
    precision = "bf16" if run.training.precision == "fp8" else run.training.precision
    is_gradient = row.group_kind in MODEL_STATE_GROUPS and row.operation in (*REDUCE_OPERATIONS, "broadcast", "send")
    is_narrow = run.layout.data_parallel in ZERO_STRATEGIES or run.layout.gradient_compression == "bf16"
    return "fp32" if precision == "bf16" and is_gradient and not is_narrow else precision


def benchmark_cases(
    kind: CollectiveKind, roles: list[list[Traffic]], ranks: int, sweep: Iterable[int] = ()
) -> list[BenchmarkCase]:
    """Return the sizes S of a kind's calls (the mean of each row) and those of a sweep in bytes, in ascending order.

    A rank sends S x `bus_factor` bytes for a call of size S. Sizes are rounded to an integer number of elements,
    equal for all ranks. `roles` has the traffic per update of each sending role; a group has `ranks` ranks.
    """
    calls: dict[int, int] = dict.fromkeys((_round_size(kind, size, ranks) for size in sweep), 0)
    for rows in roles:
        role_calls: dict[int, int] = {}
        for row in rows:
            size = _round_size(kind, row.bytes / row.calls / _bus_factor(kind.operation, ranks), ranks)
            role_calls[size] = role_calls.get(size, 0) + row.calls
        calls |= {size: max(calls.get(size, 0), count) for size, count in role_calls.items()}
    return [BenchmarkCase(kind, ranks, size, calls=count) for size, count in sorted(calls.items())]


def _round_size(kind: CollectiveKind, size_bytes: float, ranks: int) -> int:
    step = TORCH_DTYPES[kind.precision].itemsize
    if kind.operation not in ("all_reduce", "broadcast", "send"):
        step *= ranks
    return max(1, round(size_bytes / step)) * step


def _bus_factor(operation: Operation, ranks: int) -> float:
    return 1.0 if operation == "send" or operation == "recv" else bus_factor(operation, ranks)


def bandwidths(case: BenchmarkCase, seconds: float) -> tuple[float, float]:
    """Return algbw = S / t and busbw = algbw x f(n), in bytes per second."""
    algorithm = case.size_bytes / seconds
    return algorithm, algorithm * _bus_factor(case.kind.operation, case.ranks)


def element_count(case: BenchmarkCase) -> int:
    """Return nccl-tests' count: elements of the full tensor, or of one rank's part if ranks have parts."""
    numbers = case.size_bytes // TORCH_DTYPES[case.kind.precision].itemsize
    return numbers // case.ranks if case.kind.operation in PARTITIONED_OPERATIONS else numbers


# -- timing and verification ---------------------------------------------------------------------------------


def time_case(
    case: BenchmarkCase, call: Call, group: dist.ProcessGroup, device: torch.device, iterations: int
) -> CaseTiming:
    """Run a case on this rank; all ranks of the group (`case.ranks`) call this at the same time.

    `iterations` is the number of timed calls per buffer mode.
    """
    seconds: dict[BufferMode, list[float]] = {}
    wrong_counts: dict[BufferMode, int | None] = {}
    for mode in BUFFER_MODES:
        received, sent = _allocate_buffers(case, mode, group.rank(), device)
        _fill_test_values(case, group.rank(), sent)
        dist.barrier(group)
        seconds[mode] = time_calls(partial(call, received, sent, group), device, iterations)
        wrong_counts[mode] = _count_wrong(case, call, received, sent, group)
        if mode == "in_place" and case.kind.operation in UNVERIFIABLE_IN_PLACE:
            wrong_counts[mode] = None
    return CaseTiming(tuple(dist.get_process_group_ranks(group)), seconds, wrong_counts)


def _allocate_buffers(case: BenchmarkCase, mode: BufferMode, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the output and input buffers. In place, one is the other, or this rank's part of it."""
    make = partial(torch.zeros, dtype=TORCH_DTYPES[case.kind.precision], device=device)
    count = element_count(case)
    operation = case.kind.operation
    full_tensor = make(count * (case.ranks if operation in PARTITIONED_OPERATIONS else 1))
    local_part = full_tensor[rank * count : (rank + 1) * count]
    if operation == "all_gather":
        return full_tensor, local_part if mode == "in_place" else make(count)
    if operation == "reduce_scatter":
        return local_part if mode == "in_place" else make(count), full_tensor
    return full_tensor, full_tensor if mode == "in_place" else torch.zeros_like(full_tensor)


def _fill_test_values(case: BenchmarkCase, rank: int, sent: Tensor) -> None:
    """Fill the input with test values: nonzero at every n-th index from the rank's own, zero elsewhere.

    Sums of them are exact in any arithmetic and order.
    """
    for begin in range(0, len(sent), CHECK_CHUNK_ELEMENTS):
        chunk = sent[begin : begin + CHECK_CHUNK_ELEMENTS]
        chunk.copy_(_test_values(_index_elements(chunk, begin), rank, case.ranks))


def _count_wrong(case: BenchmarkCase, call: Call, received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> int:
    """Return the number of wrong elements in the result of one call."""
    rank = group.rank()
    received.fill_(-1)
    _fill_test_values(case, rank, sent)
    call(received, sent, group)
    num_wrong = 0
    for begin in range(0, len(received), CHECK_CHUNK_ELEMENTS):
        chunk = received[begin : begin + CHECK_CHUNK_ELEMENTS]
        num_wrong += int((chunk != _expected_values(case, rank, _index_elements(chunk, begin)).to(chunk.dtype)).sum())
    return num_wrong


def _index_elements(chunk: Tensor, begin: int) -> Tensor:
    return torch.arange(begin, begin + len(chunk), device=chunk.device)


def _test_values(indices: Tensor, rank: Tensor | int, ranks: int) -> Tensor:
    return torch.where(indices % ranks == rank, 1 + indices % NUM_TEST_VALUES, 0)


def _expected_values(case: BenchmarkCase, rank: int, indices: Tensor) -> Tensor:
    """Return the expected values of this rank's result at some indices."""
    n = case.ranks
    count = element_count(case)
    match case.kind.operation:
        case "all_reduce":
            return 1 + indices % NUM_TEST_VALUES
        case "reduce_scatter":
            return 1 + (indices + rank * count) % NUM_TEST_VALUES
        case "all_gather":
            return _test_values(indices % count, indices // count, n)
        case "all_to_all":
            return _test_values(indices % count + rank * count, indices // count, n)
        case "broadcast":
            return _test_values(indices, 0, n)
        case _:
            return _test_values(indices, (rank - 1) % n, n)
