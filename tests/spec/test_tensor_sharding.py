from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import (
    check_divisibility,
    data_parallel_axis,
    has_strided_shards,
    max_shard_elements,
)
from tests.helpers.small_runs import DENSE, MOE, Table

WIDE: Table = {**DENSE, "hidden_size": 64, "ffn_hidden_size": 96}
WIDE_MOE: Table = {**MOE, "hidden_size": 64, "moe": {**MOE["moe"], "expert_ffn_size": 32}}


def fp8_run(model: Table, **layout: object) -> RunSpec:
    training = {"precision": "fp8", "seq_len": 32, "tokens_per_step": 256}
    return run_from_table({"model": model, "training": training, "layout": layout})


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (WIDE, {}),
        (WIDE, {"tp": 2}),
        (WIDE_MOE, {"tp": 2}),
        (WIDE_MOE, {"ep": 2}),
        ({**WIDE, "num_kv_heads": 1}, {"tp": 2}),
    ],
)
def test_widths_of_16_per_rank_support_fp8(model: Table, layout: Table) -> None:
    check_divisibility(ResolvedRun(fp8_run(model, **layout), 2))


@pytest.mark.parametrize(
    ("model", "layout", "field"),
    [
        ({**WIDE, "hidden_size": 72, "head_dim": 16}, {}, "model.hidden_size is 72"),
        ({**WIDE, "ffn_hidden_size": 100}, {}, "model.ffn_hidden_size is 100"),
        (WIDE, {"tp": 4}, "model.ffn_hidden_size is 96"),
        ({**WIDE, "head_dim": 8}, {"tp": 2}, "model.num_kv_heads x head_dim is 16"),
        (WIDE_MOE, {"tp": 4}, "model.moe.expert_ffn_size is 32"),
    ],
)
def test_other_widths_are_rejected_in_fp8(model: Table, layout: Table, field: str) -> None:
    with pytest.raises(UserError, match=r"training\.precision = 'fp8'.*multiples of 16") as error_info:
        check_divisibility(ResolvedRun(fp8_run(model, **layout), 4))
    assert field in str(error_info.value)
    assert ("smaller layout.tp" in error_info.value.fix) == bool(layout)
    bf16 = fp8_run(model, **layout).training.replace(precision="bf16")
    check_divisibility(ResolvedRun(fp8_run(model, **layout).model_copy(update={"training": bf16}), 4))


def test_max_shard_elements_rounds_rows_up() -> None:
    assert [max_shard_elements((10, 3), ranks) for ranks in (1, 2, 3, 4, 10, 16)] == [30, 15, 12, 9, 3, 3]


@pytest.mark.parametrize(
    ("shape", "ranks", "axis", "strided"),
    [
        ((1, 14336, 4096), 16, 1, False),  # mixtral-8x7b with ep 8 on 128 ranks
        ((8, 14336, 4096), 64, 1, True),
        ((8, 14336, 4096), 8, 0, False),
        ((8, 14336, 4096), 9, 0, False),  # FSDP2 shards other axes than the first equally only
        ((8, 4096), 64, 0, False),  # a router
    ],
)
def test_rows_of_experts_are_sharded_if_experts_are_fewer_than_ranks(
    shape: tuple[int, ...], ranks: int, axis: int, strided: bool
) -> None:
    assert (data_parallel_axis(shape, ranks), has_strided_shards(shape, ranks)) == (axis, strided)


@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 5), st.integers(1, 12))
def test_shards_of_all_ranks_hold_stack(experts: int, rows: int, columns: int, ranks: int) -> None:
    total = experts * rows * columns
    largest = max_shard_elements((experts, rows, columns), ranks)
    assert largest * ranks >= total
    if experts % ranks == 0 or (rows % ranks == 0 and experts < ranks):
        assert largest * ranks == total
