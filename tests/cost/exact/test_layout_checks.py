import json
import re
from contextlib import nullcontext
from typing import Any

import pytest

from phalanx.cost.exact.layout_checks import assume_no_recomputation, check_divisibility, check_layout
from phalanx.spec.errors import UserError, UserErrorGroup
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.tables import set_path
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from tests.helpers.small_runs import BRANCHES, DENSE, MAMBAS, SHARED_KEYS, Table
from tests.helpers.small_runs import MOE as SMALL_MOE

FULL = {"activation_checkpointing": "full"}


def make_run(**layout):
    model = {"preset": "tiny", "num_layers": 5}
    return run_from_table({"model": model, "layout": {"micro_batch_size": 1, **layout}})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"recomputed_blocks": 2}, r'= 2 cannot be combined with layout\.activation_checkpointing = "none"'),
        ({**FULL, "recomputed_blocks": 6}, "= 6 exceeds the 5 blocks of the model"),
        ({**FULL, "recomputed_blocks": 4, "pp": 2}, "= 4 exceeds the 3 blocks of a pipeline rank"),
        ({**FULL, "recomputed_blocks": [3, 3], "pp": 2}, "exceeds the 2 blocks of a pipeline rank"),
        ({**FULL, "recomputed_blocks": [1, 1, 1], "pp": 2}, "not one number for each of the 2 pipeline ranks"),
        (
            {**FULL, "recomputed_blocks": 1, "data_parallel": "zero3", "fsdp_unit": "sublayer"},
            r'layout\.fsdp_unit = "sublayer"',
        ),
    ],
)
def test_check_layout_rejects_number_of_recomputed_blocks(layout, message):
    run = make_run(**layout)
    with pytest.raises(UserError, match=message) as error:
        check_layout(ResolvedRun(run, 2))
    assert error.value.field == "layout.recomputed_blocks"
    assert error.value.fix


def test_check_layout_rejects_recomputed_norms_that_are_fsdp_units():
    run = make_run(activation_checkpointing="norms", data_parallel="zero3", fsdp_unit="sublayer")
    with pytest.raises(UserError, match=r'layout\.fsdp_unit = "sublayer"') as error:
        check_layout(ResolvedRun(run, 2))
    assert error.value.field == "layout.activation_checkpointing"


@pytest.mark.parametrize("blocks", [1, 3, [3, 0], [0, 2]])
def test_check_layout_accepts_recomputed_blocks_of_pipeline_ranks(blocks):
    check_layout(ResolvedRun(make_run(**FULL, pp=2, recomputed_blocks=blocks), 2))


def test_check_layout_rejects_unresolved_activation_checkpointing():
    run = make_run(activation_checkpointing="auto")
    with pytest.raises(UserError, match=r"layout\.activation_checkpointing = 'auto' is chosen by the planner"):
        check_layout(ResolvedRun(run, 1))
    check_layout(ResolvedRun(assume_no_recomputation(run), 1))


@pytest.mark.parametrize("layout", [{"pp": 2, "schedule": "zb-v"}, {"cp": 2}])
def test_check_layout_accepts_compilation_of_every_layout(layout):
    run = make_run(**layout)
    run = run.model_copy(update={"training": run.training.model_copy(update={"compile": True})})
    check_layout(ResolvedRun(run, 2))


MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 8}
STEP = {"seq_len": 64, "tokens_per_step": 64 * 10}


@pytest.mark.parametrize(
    ("tables", "world_size", "fields"),
    [
        ({"model": {"moe": {**MOE, "top_k": 5}}}, 1, ["model.moe.top_k"]),
        ({"model": {"moe": {**MOE, "num_leading_dense_layers": 7}}}, 1, ["model.moe.num_leading_dense_layers"]),
        ({"model": {"position_embedding": "learned", "max_seq_len": 32}}, 1, ["training.seq_len"]),
        ({"training": {"tokens_per_step": 650}}, 1, ["training.tokens_per_step"]),
        ({"training": {"tokens_per_step": 20}}, 1, ["training.tokens_per_step"]),
        ({"layout": {"data_parallel": "parameter_server", "num_servers": 4}}, 3, ["layout.num_servers"]),
        ({"layout": {"data_parallel": "zero2"}}, 4, ["training.tokens_per_step"]),
        ({"layout": {"data_parallel": "ddp"}}, 32, ["training.tokens_per_step"]),
        ({"layout": {"micro_batch_size": 3}}, 2, ["layout.micro_batch_size"]),
        ({"layout": {"ddp_static_graph": True, "micro_batch_size": 1}}, 2, ["layout.ddp_static_graph"]),
        ({"layout": {"cp": 3}}, 3, ["layout.cp", "training.tokens_per_step"]),
        ({"layout": {"cp": 40}}, 40, ["layout.cp"]),
        ({"layout": {**FULL, "recomputed_blocks": 9}}, 1, ["layout.recomputed_blocks"]),
        ({"swarm": {"method": "diloco", "every": 10, "fragments": 2, "delay": 7}}, 1, ["swarm.delay"]),
    ],
    ids=str,
)
def test_proposed_fixes_make_the_run_valid(tables: dict[str, Any], world_size: int, fields: list[str]) -> None:
    """The numbers of a fix are computed; each is set as a user would, until nothing is wrong."""
    table: dict[str, Any] = {"model": {"preset": "tiny", "num_layers": 5}, "training": {**STEP}}
    for name, values in json.loads(json.dumps(tables)).items():
        table.setdefault(name, {}).update(values)
    refused = []
    for _ in range(len(fields) + 1):
        try:
            check_layout(ResolvedRun(run_from_table(table), world_size))
        except UserError as error:
            first = error.errors[0] if isinstance(error, UserErrorGroup) else error
            refused.append(first.field)
            apply_fix(table, first)
    assert refused == fields


def apply_fix(table: dict[str, Any], error: UserError) -> None:
    """Set the number that the fix proposes for a field: by default that of the error."""
    proposed = re.search(r"(?:use|set) (?:at most |one of )?(?:([a-z_.]+) = )?(\d+)", error.fix or "")
    assert proposed is not None, str(error)
    set_path(table, (proposed[1] or error.field).split("."), proposed[2], "--set")


WIDE: Table = {**DENSE, "hidden_size": 64, "ffn_hidden_size": 96}
WIDE_MOE: Table = {**SMALL_MOE, "hidden_size": 64, "moe": {**SMALL_MOE["moe"], "expert_ffn_size": 32}}


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


@pytest.mark.parametrize(("tp", "is_refused"), [(2, False), (4, True)])
def test_ranks_share_whole_blocks_of_quantized_matrices(tp: int, is_refused: bool) -> None:
    model = {**DENSE, "hidden_size": 256, "num_kv_heads": 4, "ffn_hidden_size": 128}
    adapter = {"rank": 2, "alpha": 4.0, "base_dtype": "nf4"}
    run = run_from_table({"model": model, "adapter": adapter, "layout": {"tp": tp, "micro_batch_size": 1}})
    message = r"blocks of 64 numbers, but blocks\.0\.mlp\.down\.weight has 128 columns for 4 ranks"
    with pytest.raises(UserError, match=message) if is_refused else nullcontext():
        check_layout(ResolvedRun(run, tp))


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


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (BRANCHES, {"tp": 4}, r"layout\.tp = 4 does not divide model\.mixer\.num_groups \(2\)"),
        (
            MAMBAS,
            {"tp": 8, "sequence_parallel": False},
            r"layout\.tp = 8 does not divide model\.mixer\.num_heads \(4\)",
        ),
        (BRANCHES, {"cp": 2}, r"layout\.cp_method = 'ring' exchanges keys and values"),
        (BRANCHES, {"cp": 4, "cp_method": "ulysses"}, r"layout\.cp = 4 does not divide the 2 units"),
    ],
)
def test_groups_and_heads_of_mamba_are_never_divided(model: Table, layout: Table, message: str) -> None:
    run = run_from_table({"model": model, "training": {"seq_len": 32}, "layout": layout | {"micro_batch_size": 1}})
    with pytest.raises(UserError, match=message):
        check_divisibility(ResolvedRun(run, 8))


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ({}, {"pp": 2}, r"model\.num_shared_kv_layers = 2 is not supported in a pipeline \(layout\.pp = 2\)"),
        (
            {"num_shared_kv_layers": 0},
            {"pp": 2},
            r"model\.per_layer_input_size = 6 is not supported in a pipeline \(layout\.pp = 2\)",
        ),
        (
            {"num_kv_heads": 4, "kinds": [], "value_norm": False},
            {"tp": 2, "tp_attention": "gathered"},
            r"layout\.tp_attention = 'gathered' is not supported with model\.num_shared_kv_layers",
        ),
    ],
)
def test_tensors_that_later_layers_read_stay_on_their_rank(model: Table, layout: Table, message: str) -> None:
    table = {**SHARED_KEYS, **model}
    if not table["num_shared_kv_layers"]:
        del table["shared_kv_ffn_size"]
    run = run_from_table({"model": table, "training": {"seq_len": 32}, "layout": layout | {"micro_batch_size": 1}})
    with pytest.raises(UserError, match=message) as error:
        check_layout(ResolvedRun(run, 2))
    assert error.value.fix
