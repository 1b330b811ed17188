import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.cost.exact.model_state import sharded_state_bytes, state_bytes
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.rank_memory import RankMemory, disk_offload_bytes, rank_memory, rank_model_states
from phalanx.program import buckets
from phalanx.program.buckets import MAX_BUCKETS_IN_FLIGHT
from phalanx.program.rank_tensors import rank_tensors
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec, run_from_table
from phalanx.spec.layout import MAX_BF16_SUMS, Layout
from phalanx.spec.parameter_shapes import num_elements, parameter_shapes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from tests.helpers.activations import activation_bytes
from tests.helpers.model_specs import model_specs

ZERO_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "sgd": {"name": "sgd", "momentum": 0.0},
    "momentum": {"name": "sgd"},
    "muon": {"name": "muon"},
}
STATE_PARTS = ("parameters", "gradients", "optimizer", "offloaded")
ODD_SHAPES_MODEL = {
    "vocab_size": 601,
    "hidden_size": 34,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 18,
    "ffn_hidden_size": 99,
    "max_seq_len": 64,
}
ODD_SHAPES_MOE = {
    **ODD_SHAPES_MODEL,
    "moe": {
        "num_experts": 3,
        "top_k": 2,
        # Four ranks can share the rows of the first matrices of an expert, but not those of the last.
        "expert_ffn_size": 24,
        "num_shared_experts": 1,
        "num_leading_dense_layers": 1,
    },
    "num_kv_heads": 2,
    "mixer": {
        "kind": "latent_attention",
        "query_rank": 14,
        "latent_rank": 10,
        "rope_dim": 4,
        "value_dim": 6,
        "indexer": {"num_heads": 3, "head_dim": 5, "top_k": 256},
    },
}
"""A model with tensors that are not trained: those of indexers."""


def make_run(data: str = "ddp", precision: str = "bf16", model: Any = None, **tables: Any) -> RunSpec:
    layout = {"data_parallel": data, **tables.pop("layout", {})}
    training = {"precision": precision, "tokens_per_step": 16_384, **tables.pop("training", {})}
    return run_from_table({"model": model or {"preset": "tiny"}, "layout": layout, "training": training, **tables})


def predict_rank_memory(data: str, ranks: int, precision: str = "bf16", **tables: Any) -> RankMemory:
    return rank_memory(ResolvedRun(make_run(data, precision, **tables), ranks))["rank"]


# -- the worked examples --------------------------------------------------------------------------------


def test_rank_memory_matches_resnet18_worked_example_with_ten_workers():
    m, activations = 11_700_000, 20_850_000_000  # the activations are given
    centralized = state_bytes("adamw", "fp32") * m
    worker = sharded_state_bytes("parameter_server", "fp32", m, m, states=0)
    assert (centralized.total, worker.total) == (187_200_000, 93_600_000)
    memory = RankMemory(**asdict(centralized), activations=activations)
    tenth = RankMemory(**asdict(worker), activations=activations // 10)
    assert tenth.activations == 2.085e9
    assert memory.total / 1e9 == pytest.approx(21.037, abs=0.02)
    assert tenth.total / 1e9 == pytest.approx(2.179, abs=0.02)
    assert memory.total / tenth.total == pytest.approx(9.656, abs=0.001)


def test_parameter_server_worker_state_is_twice_the_model_for_any_optimizer():
    for optimizer in OPTIMIZERS.values():
        run = make_run("parameter_server", "fp32", optimizer=optimizer)
        worker = rank_memory(ResolvedRun(run, 5))["worker"]
        assert worker.state == 2 * 4 * count_parameters(run.model).total
        assert worker.communication == 0


@pytest.mark.parametrize(("stage", "gigabytes"), list(zip(ZERO_STRATEGIES, (120, 31.4, 16.6, 1.88), strict=True)))
def test_sharded_state_bytes_match_zero_paper_for_7_5b_on_64_ranks(stage, gigabytes):
    total, shard = 7_500_000_000, 7_500_000_000 // 64
    states = 2 * (total if stage == "ddp" else shard)
    assert sharded_state_bytes(stage, "bf16", total, shard, states).total / 1e9 == pytest.approx(gigabytes, abs=0.05)


@given(st.integers(1, 10_000))
def test_sharded_state_bytes_per_parameter_match_zero_formulas(n):
    """The formulas are 16, 4 + 12/N, 2 + 14/N and 16/N, each times N."""
    assert sharded_state_bytes("ddp", "bf16", n, n, 2 * n).total == 16 * n
    assert sharded_state_bytes("zero1", "bf16", n, 1, 2).total == 4 * n + 12
    assert sharded_state_bytes("zero2", "bf16", n, 1, 2).total == 2 * n + 14
    assert (
        sharded_state_bytes("zero3", "bf16", n, 1, 2).total == sharded_state_bytes("hsdp", "bf16", n, 1, 2).total == 16
    )
    assert sharded_state_bytes("zero1", "bf16", n, 1, 2, MAX_BF16_SUMS + 1).total == 6 * n + 12
    assert sharded_state_bytes("zero2", "bf16", n, 1, 2, MAX_BF16_SUMS + 1).total == 2 * n + 16
    assert sharded_state_bytes("zero1", "fp32", n, 1, 2).total == 8 * n + 8
    assert sharded_state_bytes("zero2", "fp32", n, 1, 2).total == 4 * n + 12
    assert sharded_state_bytes("zero1", "fp64", n, 1, 2).total == 2 * (8 * n + 8)


def test_rank_memory_state_of_llama3_8b_matches_zero_formulas():
    model = {"preset": "llama3-8b"}
    training = {"seq_len": 1024, "tokens_per_step": 64 * 1024}
    count = count_parameters(load_model_spec("llama3-8b")).total
    for stage, bytes_per_parameter in zip(ZERO_STRATEGIES, (16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64), strict=True):
        assert predict_rank_memory(stage, 64, model=model, training=training).state == pytest.approx(
            bytes_per_parameter * count, rel=1e-4
        )


# -- against the strategies themselves --------------------------------------------------------------------------------


def measure_allocated_state(run: RunSpec) -> dict[str, int]:
    """Return the bytes of each part that this rank's strategy holds between a backward pass and its update in its
    second step, and those of the copy for a checkpoint after it, without AdamW's step count and buffers."""
    from phalanx.data.loader import prefetch
    from phalanx.train.checkpoint.host_copies import HostCopies
    from phalanx.train.checkpoint.state import checkpoint_tensors
    from tests.helpers.small_runs import make_trainer

    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, 2)
    trainer.train_step(batches)
    strategy, state_bytes = trainer.strategy, {}

    def reduce(*arguments: Any) -> Any:
        reduced = type(strategy).reduce(strategy, *arguments)
        state_bytes.update(
            {part: storage_bytes(tensors) for part, tensors in strategy.resident_tensors(trainer.optimizers).items()}
        )
        return reduced

    strategy.reduce = reduce  # type: ignore[method-assign]
    trainer.train_step(batches)
    copies = HostCopies().copy(checkpoint_tensors(strategy, trainer.optimizers))
    carried = {*map(id, strategy.carried_tensors)}
    buffers = {f"model.{name}" for name, buffer in strategy.module.named_buffers() if id(buffer) not in carried}
    copied = [copy for name, copy in copies.items() if copy.ndim and name not in buffers]
    return {**state_bytes, "checkpoint_copy": storage_bytes(copied)}


def storage_bytes(tensors: Iterable[Any]) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


MUON, CPU_OFFLOAD, TWO_SERVERS = {"optimizer.name": "muon"}, {"layout.offload": "cpu"}, {"layout.num_servers": 2}
DATA_PARALLEL_CASES = [
    *[(data, 2, precision, {}) for data in ZERO_STRATEGIES for precision in ("bf16", "fp32", "fp64")],
    *[(data, 2, "bf16", MUON) for data in ("zero1", "zero3")],
    *[(data, 2, precision, CPU_OFFLOAD) for data in ("zero1", "zero2", "zero3") for precision in ("bf16", "fp32")],
    ("hsdp", 4, "bf16", {"layout.dp_shard": 2}),
    ("zero2", 1, "bf16", {}),
    ("zero3", 1, "bf16", {}),
    ("zero3", 1, "bf16", CPU_OFFLOAD),
    ("parameter_server", 4, "bf16", TWO_SERVERS),
    ("parameter_server", 4, "fp32", TWO_SERVERS | MUON),
    ("parameter_server", 3, "fp32", {"layout.max_staleness": 1}),
]


@pytest.mark.parametrize(("data", "world_size", "precision", "changes"), DATA_PARALLEL_CASES)
def test_rank_memory_equals_allocated_state_of_data_parallel_strategies(data, world_size, precision, changes, tmp_path):
    pytest.importorskip("torch")
    from phalanx.testing import rank_pool
    from tests.helpers.small_runs import small_run

    common = {
        "model": ODD_SHAPES_MOE,
        "layout.data_parallel": data,
        "training.precision": precision,
        "training.steps": 4,
    }
    run = small_run(Path(json.__file__).parent, tmp_path, {**common, **changes})
    allocated = rank_pool(world_size).run(measure_allocated_state, run)
    copies = [state.pop("checkpoint_copy") for state in allocated]
    servers = run.layout.num_servers if data == "parameter_server" else 0
    on_gpus = rank_memory(ResolvedRun(run.on_device("cuda"), world_size))
    assert max(copies[servers:]) == on_gpus["worker" if servers else "rank"].checkpoint_copy
    for role, predicted in rank_memory(ResolvedRun(run, world_size)).items():
        fullest = max(
            allocated[:servers] if role == "server" else allocated[servers:], key=lambda state: sum(state.values())
        )
        assert {part: fullest.get(part, 0) for part in STATE_PARTS} == {
            part: getattr(predicted, part) for part in STATE_PARTS
        }
        assert role == "rank" or fullest.get("communication", 0) <= predicted.communication


TWO_KV_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": "full"}
MODEL_PARALLEL_CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"layout.tp": 2}),
    (4, {"layout.tp": 4, "layout.sequence_parallel": False}),
    (4, {"layout.tp": 2, "layout.data_parallel": "zero1"}),
    (4, {"layout.tp": 2, "layout.data_parallel": "zero2"}),
    (4, {"layout.tp": 2, "layout.data_parallel": "zero3"}),
    (4, {"layout.cp": 2, "layout.data_parallel": "zero3"}),
    (2, {"layout.ep": 2}),
    (4, {"layout.ep": 2, "layout.data_parallel": "zero1"}),
    (4, {"layout.ep": 2, "layout.data_parallel": "zero3"}),
    (4, {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero2"}),
    (2, {"layout.pp": 2}),
    (2, {"layout.pp": 2, "model.tie_embeddings": True}),
    (2, {"layout.pp": 2, "layout.schedule": "zb-v"}),
    (4, {"layout.pp": 2, "layout.data_parallel": "zero1"}),
    (4, {"layout.pp": 2, "layout.tp": 2}),
    (4, {"layout.pp": 2, "layout.ep": 2, "layout.data_parallel": "zero3"}),
]


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize(("world_size", "changes"), MODEL_PARALLEL_CASES, ids=str)
def test_rank_model_states_equal_allocated_state_with_tp_cp_ep_and_pp(world_size, changes, precision, tmp_path):
    """Parameters are split over tp x pp and experts over ep, and both over the ranks that share them.
    Compared for the fullest rank of each pipeline stage."""
    pytest.importorskip("torch")
    from phalanx.testing import rank_pool
    from tests.helpers.small_runs import DENSE, small_run

    moe = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "num_shared_experts": 1}
    model = {
        **DENSE,
        **TWO_KV_HEADS,
        "num_layers": 4,
        "vocab_size": 263,
        "moe": moe,
        "tie_embeddings": changes.get("model.tie_embeddings", False),
    }
    common = {"model": model, "training.precision": precision, "training.steps": 4, "layout.micro_batch_size": 1}
    layout = {key: value for key, value in changes.items() if key != "model.tie_embeddings"}
    run = small_run(Path(json.__file__).parent, tmp_path, {**common, **layout})
    allocated = rank_pool(world_size).run(measure_allocated_state, run)
    copies = [state.pop("checkpoint_copy") for state in allocated]
    inner = changes.get("layout.tp", 1) * changes.get("layout.cp", 1)
    pp = changes.get("layout.pp", 1)
    for stage, on_gpu in enumerate(rank_memory(ResolvedRun(run.on_device("cuda"), world_size)).values()):
        assert max(size for rank, size in enumerate(copies) if rank // inner % pp == stage) == on_gpu.checkpoint_copy
    for stage, predicted in enumerate(rank_model_states(ResolvedRun(run, world_size))):
        stage_states = [state for rank, state in enumerate(allocated) if rank // inner % pp == stage]
        fullest = max(stage_states, key=lambda state: sum(state.values()))
        parts = ("parameters", "gradients", "optimizer")
        assert {part: fullest.get(part, 0) for part in parts} == {part: getattr(predicted, part) for part in parts}


# -- the other parts --------------------------------------------------------------------------------


def test_rank_memory_activations_equal_micro_batch_peak():
    run = make_run("zero2", layout={"micro_batch_size": 2, "activation_checkpointing": "full"})
    autocast, pure = (
        activation_bytes(run.model, 2, 256, "bf16", Layout(activation_checkpointing="full"), autocast, masked=True).peak
        for autocast in (True, False)
    )
    for data in ("zero1", "zero2", "zero3"):
        assert (
            predict_rank_memory(data, 2, layout={"micro_batch_size": 2, "activation_checkpointing": "full"}).activations
            == pure
        )
    assert (
        predict_rank_memory("ddp", 2, layout={"micro_batch_size": 2, "activation_checkpointing": "full"}).activations
        == autocast
        > pure
    )
    assert rank_memory(ResolvedRun(make_run("parameter_server"), 3))["server"].activations == 0


def test_communication_buffers_match_formulas_for_ddp_and_servers():
    run = make_run("parameter_server", "fp32", layout={"max_staleness": 2})
    size = 4 * count_parameters(run.model).total
    assert rank_memory(ResolvedRun(run, 5))["server"].communication == (4 + 1) * 3 * size
    assert rank_memory(ResolvedRun(make_run("parameter_server", "fp32"), 5))["server"].communication == size
    assert predict_rank_memory("ddp", 4).communication == 0
    # The model is smaller than a bucket.
    assert predict_rank_memory("ddp", 4, layout={"gradient_compression": "bf16"}).communication == size / 2
    assert predict_rank_memory("ddp", 4, layout={"gradient_compression": "powersgd"}).communication == 2 * size
    for precision in ("bf16", "fp32"):
        alone = predict_rank_memory("ddp", 1, precision, layout={"gradient_compression": "powersgd"})
        assert (alone.communication, alone.unused) == (0, 0)


def test_zero_communication_buffers_match_bucket_formula():
    # All parameters split evenly over two ranks.
    model = {**ODD_SHAPES_MODEL, "vocab_size": 600, "hidden_size": 36, "ffn_hidden_size": 100}
    spec = make_run(model=model).model
    size = 4 * count_parameters(spec).total
    # The model is one bucket: its sent and received copies, and half of it.
    assert predict_rank_memory("zero1", 2, "fp32", model=model).communication == 2.5 * size
    assert predict_rank_memory("zero1", 2, "fp32", model=model, cluster={"device": "cuda"}).communication == 1.5 * size
    small = {"bucket_mb": 1e-6}  # one bucket per parameter
    sizes = [4 * num_elements(shape) for shape in parameter_shapes(spec).values()]
    in_flight = max(sum(sizes[start : start + MAX_BUCKETS_IN_FLIGHT]) for start in range(len(sizes)))
    assert predict_rank_memory("zero1", 2, "fp32", model=model, layout=small).communication == 2.5 * in_flight
    with patch.object(buckets, "LARGE_MESSAGE_BYTES", 1000):  # of two large buckets, one is sent at a time
        one_bucket = predict_rank_memory("zero1", 2, "fp32", model=model, layout=small).communication
    assert one_bucket == 2.5 * max(sizes) + 2.5 * min(sizes)
    assert (
        predict_rank_memory("zero2", 2, "fp32", model=model, layout=small).communication
        < predict_rank_memory("zero2", 2, "fp32", model=model).communication
    )


def test_zero3_communication_buffers_shrink_with_smaller_fsdp_units():
    wraps = [
        predict_rank_memory("zero3", 4, layout={"fsdp_unit": wrap}, model={"preset": "gpt2-124m"})
        for wrap in ("sublayer", "block", "model")
    ]
    sizes = [memory.communication for memory in wraps]
    assert sizes == sorted(sizes)
    predicted = predict_rank_memory(
        "zero3", 4, layout={"reshard_after_forward": False}, model={"preset": "gpt2-124m"}
    ).communication
    assert sizes[1] < predicted


# -- properties ------------------------------------------------------------------------------------------------------

PRECISIONS = st.sampled_from(["bf16", "fp32", "fp64"])


def predict_model_memory(
    spec: Any, stage: str, ranks: int, precision: str, optimizer: str, **layout: Any
) -> RankMemory:
    tables = {"training": {"tokens_per_step": 64 * 27_720, "seq_len": 64}, "optimizer": OPTIMIZERS[optimizer]}
    return predict_rank_memory(stage, ranks, precision, model=spec, layout=layout, **tables)


@settings(max_examples=40, deadline=None)
@given(model_specs(), st.integers(1, 12), PRECISIONS, st.sampled_from(list(OPTIMIZERS)))
def test_rank_memory_state_never_grows_with_zero_stage(spec, n, precision, optimizer):
    table = spec.model_dump(mode="json") | {"max_seq_len": 64}
    states = [
        predict_model_memory(table, stage, n, precision, optimizer, micro_batch_size=27_720 // n).state
        for stage in ZERO_STRATEGIES
    ]
    # Without optimizer state to share, ZeRO-1's trained copy of rows of several matrices can exceed what it saves.
    compared = states[1:] if spec.moe and optimizer == "sgd" else states
    assert compared == sorted(compared, reverse=True)
    if n == 1:
        assert len(set(states)) == 1


@settings(max_examples=40, deadline=None)
@given(model_specs(), st.integers(1, 6), st.integers(1, 2), PRECISIONS, st.sampled_from(ZERO_STRATEGIES[1:]))
def test_sharded_state_never_grows_with_ranks_and_covers_the_model(spec, n, extra_factor, precision, stage):
    # More ranks own whole experts again if they do not divide the rows of each expert.
    assume(spec.moe is None or spec.moe.num_experts >= n * (1 + extra_factor))
    table = spec.model_dump(mode="json") | {"max_seq_len": 64}
    few_ranks, many_ranks = (
        predict_model_memory(table, stage, n, precision, "adamw"),
        predict_model_memory(table, stage, n * (1 + extra_factor), precision, "adamw"),
    )
    assert many_ranks.state <= few_ranks.state
    one_rank = predict_model_memory(table, stage, 1, precision, "adamw")
    # The fp32 copy of a bf16 model is part of the optimizer state, except for zero3, whose parameters are fp32.
    masters = few_ranks.parameters if stage == "zero3" and precision == "bf16" and n > 1 else 0
    assert n * (few_ranks.optimizer + masters) >= one_rank.optimizer


@settings(max_examples=30, deadline=None)
@given(model_specs(), st.integers(1, 4), PRECISIONS, st.sampled_from(ZERO_STRATEGIES[1:]))
def test_offload_reduces_device_memory_and_preserves_state(spec, n, precision, stage):
    table = spec.model_dump(mode="json") | {"max_seq_len": 64}
    resident, offloaded = (
        predict_model_memory(table, stage, n, precision, "adamw", offload=offload) for offload in ("none", "cpu")
    )
    assert resident.offloaded == offloaded.optimizer == 0
    assert offloaded.total < resident.total
    assert offloaded.state + offloaded.offloaded >= resident.state


def test_bf16_state_on_one_rank_is_16_bytes_per_parameter():
    count = count_parameters(make_run().model).total
    assert [predict_rank_memory(stage, 1).state for stage in ZERO_STRATEGIES] == [16 * count] * 4


def test_checkpoint_copy_is_cpu_memory_of_gpu_ranks_unless_files_are_saved_from():
    """AdamW has 12 bytes per parameter. Ranks of ddp copy all of them, and other strategies copy their shard."""
    count = count_parameters(make_run().model).total
    sizes = {}
    for stage in ZERO_STRATEGIES:
        memory = rank_memory(ResolvedRun(make_run(stage, cluster={"device": "cuda"}), 4))["rank"]
        assert memory.host == memory.checkpoint_copy
        sizes[stage] = memory.checkpoint_copy / count
    assert sizes["ddp"] == 12
    assert [sizes[stage] for stage in ZERO_STRATEGIES[1:]] == pytest.approx([3, 3, 3], rel=0.01)
    assert predict_rank_memory("ddp", 4).host == 0
    offloaded = {"offload": "nvme", "offload_directory": "/tmp"}
    for layout, copies in (({"offload": "cpu"}, 1), (offloaded, 0)):
        memory = rank_memory(ResolvedRun(make_run("zero1", layout=layout, cluster={"device": "cuda"}), 4))["rank"]
        assert memory.host == (memory.offloaded + memory.checkpoint_copy if copies else 0)
        assert (memory.checkpoint_copy > 0) == bool(copies)


def test_rank_memory_rejects_invalid_rank_count():
    with pytest.raises(UserError, match="leaves no worker"):
        rank_memory(ResolvedRun(make_run("parameter_server"), 1))
    with pytest.raises(UserError, match="ranks cannot divide"):
        rank_memory(ResolvedRun(make_run("zero2"), 5))


@pytest.mark.parametrize("model", [ODD_SHAPES_MODEL, ODD_SHAPES_MOE], ids=["dense", "moe"])
def test_pipeline_ranks_that_differ_in_block_indices_only_have_one_signature(model):
    """The memory of ranks with one signature is counted once; the first and the last stage have other tensors."""
    run = make_run(model={**model, "num_layers": 8, "vocab_size": 64}, layout={"pp": 4, "micro_batch_size": 1})
    ranks = rank_tensors(ResolvedRun(run, 4))
    assert [len({name.split(".")[1] for name in rank.names if name.startswith("blocks.")}) for rank in ranks] == [2] * 4
    signatures = [rank.signature for rank in ranks]
    assert [signatures.index(signature) for signature in signatures] == [0, 1, 1, 3]


def test_pipeline_activations_match_micro_batches_in_flight_of_schedule():
    """GPipe holds all 8 micro-batches; 1F1B on rank r of 4 holds 4 - r (arXiv 2104.04473, section 2.2.1)."""
    model = {**ODD_SHAPES_MODEL, "num_layers": 8, "vocab_size": 64}
    memory_by_schedule = {
        schedule: rank_memory(
            ResolvedRun(
                make_run(
                    "ddp",
                    "fp32",
                    model=model,
                    layout={"pp": 4, "schedule": schedule, "micro_batch_size": 1},
                    training={"seq_len": 64, "tokens_per_step": 8 * 64},
                ),
                4,
            ),
        )
        for schedule in ("gpipe", "1f1b")
    }
    in_flight = [1, 2]  # inner stages, which have neither embedding nor head
    gpipe, one_f_one_b = (
        [memory_by_schedule[schedule][f"pp{stage}"].activations for stage in in_flight]
        for schedule in ("gpipe", "1f1b")
    )
    assert gpipe[0] == gpipe[1]
    spec = make_run(model=model).model
    # The gradients of both inputs of the activation, for 64 tokens, and of the last product's matrix.
    backward_bytes = (2 * 64 + spec.hidden_size) * spec.ffn_hidden_size * 4
    per_micro_batch = (gpipe[0] - backward_bytes) / 8
    assert one_f_one_b == [3 * per_micro_batch + backward_bytes, 2 * per_micro_batch + backward_bytes]


def test_disk_offload_bytes_equal_rank_memory_on_disk_with_pp_and_tp() -> None:
    """The disk is checked against these bytes before a run starts."""
    files = {"offload": "nvme", "offload_directory": "/tmp"}
    model = {"preset": "tiny", "num_heads": 4, "num_kv_heads": 4, "num_layers": 4}
    staged = make_run("zero1", model=model, layout={"pp": 2, **files})
    assert (
        disk_offload_bytes(ResolvedRun(staged, 2))
        == max(memory.on_disk for memory in rank_memory(ResolvedRun(staged, 2)).values())
        > 0
    )
    split = make_run("zero1", model=model, layout={"tp": 2, **files})
    gathered = make_run("zero1", model=model, layout={"tp": 2, "tp_attention": "gathered", **files})
    assert (
        disk_offload_bytes(ResolvedRun(gathered, 2))
        == disk_offload_bytes(ResolvedRun(split, 2))
        == rank_memory(ResolvedRun(split, 2))["rank"].on_disk
    )


@pytest.mark.parametrize(
    ("model", "layout", "field"),
    [
        ({"preset": "tiny"}, {"tp": 2}, "layout.tp"),
        ({"preset": "tiny"}, {"ep": 2}, "layout.ep"),
        ({"preset": "tiny", "tie_embeddings": True}, {"pp": 2}, "model.tie_embeddings"),
    ],
)
def test_rank_memory_rejects_layouts_that_the_model_cannot_run(
    model: dict[str, Any], layout: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as error_info:
        rank_memory(ResolvedRun(make_run("zero3", model=model, layout=layout), 2))
    assert error_info.value.field == field
