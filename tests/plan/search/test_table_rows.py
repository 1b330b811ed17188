import pytest

from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.enumerate_layouts import enumerate_layouts, smaller_variants
from phalanx.plan.search.evaluate import evaluate_layout_text
from phalanx.plan.search.table_rows import layout_of_row
from phalanx.spec.errors import UserError
from phalanx.spec.layout import CheckpointingName
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.planned_runs import make_run

SLOW_NETWORK = {"nodes": 2, "network_bytes_per_second": 4e9}


def without_directory(candidate: CandidateLayout) -> CandidateLayout:
    return candidate._replace(offload_directory=None)


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_row_of_every_candidate_is_read_as_its_layout(model: str) -> None:
    run = make_run(model, cluster=SLOW_NETWORK, layout={"offload_directory": "/local", "offload": "nvme"})
    enumerated = enumerate_layouts(ResolvedRun(run, 16))
    candidates = [*enumerated, *(variant for larger in enumerated[::7] for variant in smaller_variants(run, larger))]
    texts = {str(candidate): candidate for candidate in candidates}
    for text, candidate in texts.items():
        assert layout_of_row(text) == without_directory(candidate).layout(), text
    words = {word for text in texts for word in text.replace(",", "").split()}
    assert words >= {"zero3", "hsdp", "ulysses", "ring", "interleaved", "norms", "inputs", "cpu", "nvme"}


@pytest.mark.parametrize("counts", [3, (3, 0)])
@pytest.mark.parametrize("method", ["full", "norms", "offload"])
def test_row_with_partial_recomputation_is_read_as_its_layout(
    counts: int | tuple[int, ...], method: CheckpointingName
) -> None:
    run = make_run(cluster=SLOW_NETWORK)
    pipeline = next(candidate for candidate in enumerate_layouts(ResolvedRun(run, 16)) if candidate.pp == 2)
    candidate = pipeline._replace(activation_checkpointing=method, recomputed_blocks=counts)
    assert layout_of_row(str(candidate)) == candidate.layout()


def test_row_is_read_with_its_number_figures_and_line_breaks() -> None:
    pasted = """\
    3*  zero1 dp 4, tp 2, pp 2 (outer) 1f1b,      15.580   14.3 to 16.9   538,438  47.7%  69.5 + 12    0.0%     3.0%
        micro-batch 1 x 16, recompute full in 3
        blocks a rank
    """
    layout = layout_of_row(pasted)
    assert layout is not None
    assert layout.model_dump(exclude_defaults=True) == {
        "data_parallel": "zero1",
        "tp": 2,
        "pp": 2,
        "rank_order": "pipeline_outer",
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "recomputed_blocks": 3,
    }


def test_row_is_read_wherever_a_terminal_breaks_it() -> None:
    row = "zero1 dp 4, cp 2 ring, pp 2 1f1b, micro-batch 8 x 16, recompute full in 4 blocks a rank"
    words = row.split(" ")
    broken = ["3*  " + " ".join(words[:end]) + "\n        " + " ".join(words[end:]) for end in range(1, len(words))]
    assert {text for text in broken if layout_of_row(text) != layout_of_row(row)} == set()
    assert layout_of_row(row) is not None


def test_row_of_a_plan_with_other_ranks_or_batch_is_rejected() -> None:
    run = make_run(cluster=SLOW_NETWORK)
    row = "zero3 dp 16, micro-batch 2 x 2, recompute full"
    assert str(evaluate_layout_text(ResolvedRun(run, 16), row).candidate) == row
    for other in (row.replace("dp 16", "dp 64"), row.replace("2 x 2", "2 x 4")):
        with pytest.raises(UserError, match="other ranks or another batch: here, the layout is " + row):
            evaluate_layout_text(ResolvedRun(run, 16), other)
    with pytest.raises(UserError, match="is not of the form KEY=VALUE"):
        evaluate_layout_text(ResolvedRun(run, 16), "zero3 on all")


def test_row_with_offload_to_files_uses_directory_of_the_run() -> None:
    run = make_run(cluster=SLOW_NETWORK, layout={"offload_directory": "/local", "offload": "nvme"})
    row = "zero3 dp 16, micro-batch 2 x 2, recompute full, offload nvme"
    assert evaluate_layout_text(ResolvedRun(run, 16), row).candidate.offload_directory == "/local"
