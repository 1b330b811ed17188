from __future__ import annotations

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import check_divisibility
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
    check_divisibility(fp8_run(model, **layout), 2)


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
    with pytest.raises(UserError, match=r"training\.precision = 'fp8'.*multiples of 16") as refused:
        check_divisibility(fp8_run(model, **layout), 4)
    assert field in str(refused.value)
    assert ("smaller layout.tp" in refused.value.fix) == bool(layout)
    bf16 = fp8_run(model, **layout).training.replace(precision="bf16")
    check_divisibility(fp8_run(model, **layout).model_copy(update={"training": bf16}), 4)
