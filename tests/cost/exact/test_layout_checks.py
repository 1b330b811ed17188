import pytest

from phalanx.cost.exact.layout_checks import assume_no_recomputation, check_layout
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table

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
        check_layout(run, 2)
    assert error.value.field == "layout.recomputed_blocks"
    assert error.value.fix


def test_check_layout_rejects_recomputed_norms_that_are_fsdp_units():
    run = make_run(activation_checkpointing="norms", data_parallel="zero3", fsdp_unit="sublayer")
    with pytest.raises(UserError, match=r'layout\.fsdp_unit = "sublayer"') as error:
        check_layout(run, 2)
    assert error.value.field == "layout.activation_checkpointing"


@pytest.mark.parametrize("blocks", [1, 3, [3, 0], [0, 2]])
def test_check_layout_accepts_recomputed_blocks_of_pipeline_ranks(blocks):
    check_layout(make_run(**FULL, pp=2, recomputed_blocks=blocks), 2)


def test_check_layout_rejects_unresolved_activation_checkpointing():
    run = make_run(activation_checkpointing="auto")
    with pytest.raises(UserError, match=r"layout\.activation_checkpointing = 'auto' is chosen by the planner"):
        check_layout(run, 1)
    check_layout(assume_no_recomputation(run), 1)


@pytest.mark.parametrize("layout", [{"pp": 2, "schedule": "zb-v"}, {"cp": 2}])
def test_check_layout_accepts_compilation_of_every_layout(layout):
    run = make_run(**layout)
    run = run.model_copy(update={"training": run.training.model_copy(update={"compile": True})})
    check_layout(run, 2)
