"""Predicted allocated and reserved memory of ranks on a GPU, compared with rows recorded on the null GPU.

`cuda_memory.json` was written by `python -m benchmarks.gpu_memory --python PYTHON --null OUT`."""

import pytest

from benchmarks.gpu_memory import KNOWN_LIMITS, LIMITS, planned_memory, recorded_rows
from phalanx.cost.exact.cuda_process import COLLECTIVE_BYTES, PEER_BYTES, PEER_CHANNELS, nccl_bytes
from phalanx.cost.exact.memory_peaks import optimizer_step_bytes
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.program.rank_tensors import rank_tensors
from phalanx.spec.communication_groups import MAX_PIPELINE_CHANNELS
from phalanx.spec.files.load import load_model_spec, run_from_table
from phalanx.spec.layout import Layout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from tests.helpers.activations import activation_bytes

ROWS = recorded_rows()
TRAINING = {"seq_len": 8192, "tokens_per_step": 64 * 8192}


def make_run(machine: str, **layout: object) -> RunSpec:
    model = {"preset": "llama3-8b"}
    cluster = {"preset": machine, "nproc_per_node": 8}
    return run_from_table({"model": model, "training": TRAINING, "cluster": cluster, "layout": layout})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model} {row.layout} {row.world_size}")
def test_planned_memory_of_cuda_rank_matches_recorded_allocator(row):
    memory = planned_memory(row)
    limits = KNOWN_LIMITS.get((row.model, row.layout), LIMITS)
    assert memory.total == pytest.approx(row.allocated, rel=limits["allocated"])
    assert memory.reserved == pytest.approx(row.reserved, rel=limits["reserved"])


def test_recorded_rows_cover_models_and_kinds_of_activation_checkpointing():
    assert {row.model for row in ROWS} == {"llama3-8b", "llama3-70b", "qwen3-30b-a3b", "mixtral-8x7b"}
    assert not [row for row in ROWS if row.problem]
    for model in {row.model for row in ROWS}:
        for kind in ("none", "selective", "full"):
            assert any(row.model == model and row.layout.split(" pp")[0].endswith(kind) for row in ROWS)


def test_rms_norm_saves_its_input_and_a_number_for_each_token():
    """The input has 64 MiB, and each of 8,192 tokens adds 4 bytes."""
    spec, layout = load_model_spec("llama3-8b"), Layout(data_parallel="zero3")
    on_cpu, on_cuda = (activation_bytes(spec, 1, 8192, "bf16", layout, on_cuda=on_cuda) for on_cuda in (False, True))
    assert on_cuda.norms == on_cpu.norms == 65 * (2**26 + 4 * 8192)
    assert on_cuda.attention == on_cpu.attention


def test_cuda_saves_no_mask_where_rows_are_packed():
    spec = load_model_spec("llama3-8b")
    masked, plain = (activation_bytes(spec, 1, 8192, "bf16", masked=masked, on_cuda=True) for masked in (True, False))
    assert masked.attention == plain.attention
    fp32 = [activation_bytes(spec, 1, 8192, "fp32", masked=masked, on_cuda=True).attention for masked in (True, False)]
    assert fp32[0] - fp32[1] >= 32 * 4 * 8192**2, "no kernel for packed rows computes in fp32"


def test_only_cuda_ranks_have_unused_and_nccl_memory():
    on_cpu, on_gpu = (
        rank_memory(ResolvedRun(make_run(machine, data_parallel="zero3"), 8))["rank"] for machine in ("cpu", "h100")
    )
    assert (on_cpu.unused, on_cpu.nccl, on_cpu.device) == (0, 0, on_cpu.total)
    assert on_gpu.device == on_gpu.total + on_gpu.unused + on_gpu.nccl > on_gpu.total


def test_nccl_bytes_count_groups_and_peers_within_a_node():
    assert nccl_bytes(ResolvedRun(make_run("h100"), 1)) == 0
    assert nccl_bytes(ResolvedRun(make_run("h100", data_parallel="zero3"), 8)) == COLLECTIVE_BYTES
    ulysses = make_run("h100", data_parallel="zero3", cp=16, cp_method="ulysses")
    assert nccl_bytes(ResolvedRun(ulysses, 64)) == COLLECTIVE_BYTES + 7 * PEER_BYTES, "8 of 16 ranks are on other nodes"


def test_nccl_bytes_count_channels_of_pipeline_groups():
    """Eight peers with NCCL's 32 channels would need 4 x 469 MB more."""
    pipeline_bytes = nccl_bytes(ResolvedRun(make_run("h100", pp=4), 8)) - 2 * COLLECTIVE_BYTES
    assert pipeline_bytes == 4 * (PEER_BYTES * MAX_PIPELINE_CHANNELS // PEER_CHANNELS)


@pytest.mark.parametrize(
    ("optimizer", "precision", "layout", "groups", "peers"),
    [
        ("adamw", "bf16", {"data_parallel": "zero1"}, 1, 7),
        ("adamw", "bf16", {"data_parallel": "zero2"}, 1, 7),
        ("adamw", "fp32", {"data_parallel": "zero2"}, 1, 0),
        ("adamw", "bf16", {"data_parallel": "zero3"}, 1, 0),
        ("muon", "bf16", {"data_parallel": "zero3"}, 1, 7),
        ("muon", "fp32", {"data_parallel": "zero2"}, 1, 7),
        ("muon", "bf16", {"data_parallel": "ddp"}, 1, 0),
        ("adamw", "bf16", {"data_parallel": "zero1", "tp": 2}, 3, 3 + 1),
        ("adamw", "bf16", {"data_parallel": "zero3", "tp": 2}, 3, 1),
        ("adamw", "bf16", {"data_parallel": "zero3", "tp": 2, "sequence_parallel": False}, 3, 0),
        ("muon", "fp32", {"data_parallel": "ddp", "tp": 2}, 3, 1),
    ],
)
def test_nccl_bytes_count_peers_of_all_to_alls(optimizer, precision, layout, groups, peers):
    """Reduce-scatters of bf16 and the exchanges of Muon are all-to-alls in
    the data-parallel and tensor-parallel groups."""
    run = make_run("h100", **layout)
    training = run.training.model_copy(update={"precision": precision})
    optimizer_spec = run.optimizer.model_copy(update={"name": optimizer})
    run = run.model_copy(update={"training": training, "optimizer": optimizer_spec})
    assert nccl_bytes(ResolvedRun(run, 8)) == groups * COLLECTIVE_BYTES + peers * PEER_BYTES


def test_nccl_bytes_count_only_data_parallel_peers_of_one_node():
    """Of 32 data-parallel ranks, 4 are on one node, where each of them has a tensor-parallel peer."""
    run = make_run("h100", data_parallel="zero1", tp=2, sequence_parallel=False)
    assert nccl_bytes(ResolvedRun(run, 64)) == 3 * COLLECTIVE_BYTES + 3 * PEER_BYTES


def test_step_of_muon_is_planned_as_on_cpu_when_device_is_auto():
    """Everything else in a run with a CPU preset and `cluster.device = "auto"` is planned for a CPU."""
    run = make_run("cpu", data_parallel="zero1")
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"name": "muon"})})
    resolved = [ResolvedRun(run.on_device(device), 8) for device in ("auto", "cpu", "cuda")]
    steps = [optimizer_step_bytes(each, rank_tensors(each)[0]) for each in resolved]
    assert steps[0] == steps[1] != steps[2]
