"""PyTorch work that dry runs leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard

from phalanx.verify import fake_tensors


class Operation:
    """An operation of DTensors, which counts how often its operands are read."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.num_reads = 0

    @property
    def args_spec(self) -> list[Any]:
        self.num_reads += 1
        return [SimpleNamespace(placements=(self.placement,))] * 100


@pytest.mark.parametrize(("placement", "is_propagated"), [(Shard(0), False), (_StridedShard(0, split_factor=2), True)])
def test_operands_without_strided_shards_are_read_once(placement: Placement, is_propagated: bool) -> None:
    operation = Operation(placement)
    with (
        mock.patch.object(sharding_prop, fake_tensors.STRIDED_SHARD_FLAG, create=True) as propagate,
        fake_tensors.shape_only_tensors(),
    ):
        for _ in range(100):
            sharding_prop._propagate_use_strided_shard_flag(None, operation)  # type: ignore[arg-type]
    assert propagate.call_count == (100 if is_propagated else 0)
    assert operation.num_reads == (100 if is_propagated else 1)
