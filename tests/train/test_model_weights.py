"""Weights of a run in training, which equal those of an export of the same step bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phalanx.model.huggingface.adapter import merge_adapters
from phalanx.model.huggingface.export import export_hf
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.checkpoint.stored_tensors import open_tensors
from tests.helpers.live_memory import PeakLiveBytes
from tests.helpers.small_runs import BIASED_EXPERTS, DENSE, Table, find_examples, make_trainer, small_run, train_until

EXPERTS: Table = {**DENSE, "num_layers": 4, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}}
MODELS: dict[str, Table] = {
    "dense": {"model": {**DENSE, "num_layers": 4, "tie_embeddings": True}},
    "experts": {"model": EXPERTS},
    "gpt-oss": {"model": BIASED_EXPERTS},
    "adapters": {"model": {**DENSE, "num_layers": 4}, "adapter": {"rank": 3, "alpha": 6.0}},
}
CASES: dict[str, tuple[int, str, Table]] = {
    "one": (1, "dense", {}),
    "tp": (2, "adapters", {"layout.tp": 2}),
    "pp": (2, "dense", {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "zero3": (2, "adapters", {"layout.data_parallel": "zero3"}),
    "ep": (2, "experts", {"layout.ep": 2}),
    "tp-pp": (4, "adapters", {"layout.tp": 2, "layout.pp": 2, "layout.micro_batch_size": 1}),
    "tp-with-copies-of-heads": (4, "dense", {"layout.tp": 4}),
    "ep-tp-zero3-bf16": (
        4,
        "gpt-oss",
        {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero3", "training.precision": "bf16"},
    ),
    "zero1-bf16": (2, "dense", {"layout.data_parallel": "zero1", "training.precision": "bf16"}),
    "offload": (2, "experts", {"layout.data_parallel": "zero2", "layout.offload": "cpu"}),
    "server": (2, "dense", {"layout.data_parallel": "parameter_server"}),
}


def weights_after_step(run: RunSpec) -> dict[str, Tensor]:
    """Train a step, save a checkpoint, and return the weights in fp32."""
    trainer = make_trainer(run)
    train_until(trainer, 1)
    trainer.save()
    trainer.checkpointer.wait()
    return dict(trainer.model_weights())


def exported_weights(run: RunSpec, folder: Path) -> dict[str, Tensor]:
    """Return the weights of an export of the checkpoint of step 1."""
    stored = open_tensors(Path(run.output_dir) / run.name / "checkpoints" / "step-00000001")
    tensors = {name.removeprefix("model."): x for name, x in stored.items() if name.startswith("model.")}
    export_hf(run.model.without_tuning, merge_adapters(run.model, tensors), folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_export_of_same_step(case: str, documents: Path, tmp_path: Path) -> None:
    ranks, model, layout = CASES[case]
    run = small_run(documents, tmp_path, {**MODELS[model], **layout})
    results = [weights_after_step(run)] if ranks == 1 else rank_pool(ranks).run(weights_after_step, run)
    expected = exported_weights(run, tmp_path / "exported")
    for rank, weights in enumerate(results):
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == weights[name].dtype
            assert torch.equal(tensor, weights[name]), f"rank {rank}: {name}"


def peak_of_weights(run: RunSpec) -> tuple[int, int, int]:
    """Return the peak bytes of tensors while weights are taken, the bytes of the largest one, and of all."""
    trainer = make_trainer(run)
    sizes = []
    with PeakLiveBytes() as memory:
        for _, tensor in trainer.model_weights():
            sizes.append(tensor.nbytes)
            del tensor
    return memory.peak, max(sizes), sum(sizes)


@pytest.mark.parametrize("layout", [{"layout.data_parallel": "zero3"}, {"layout.ep": 2, "layout.tp": 1}], ids=str)
def test_peak_memory_is_that_of_one_tensor_and_of_pieces(layout: Table, documents: Path, tmp_path: Path) -> None:
    model = {**EXPERTS, "hidden_size": 64, "num_layers": 8, "moe": {**EXPERTS["moe"], "num_experts": 16}}
    run = small_run(documents, tmp_path, {"model": model, "training.precision": "fp32", **layout})
    for peak, largest, total in rank_pool(2).run(peak_of_weights, run):
        # The yielded tensor, a piece of it, the message with a part of the piece, and tables of names.
        assert peak <= 3 * largest + 20_000
        assert peak < total / 10


def test_network_of_user_has_its_own_names(documents: Path, tmp_path: Path) -> None:
    find_examples()
    model: dict[str, Any] = {"implementation": "own_parts:Recurrent", "hidden_size": 16, "vocab_size": 257}
    changes = {"model": {**DENSE, **model}, "data.mask_documents": False, "layout.data_parallel": "zero3"}
    run = small_run(documents, tmp_path, changes)
    for weights in rank_pool(2).run(weights_after_step, run):
        assert weights["head.weight"].shape == (257, 16)
        assert "blocks.1.weight_hh_l0" in weights


def test_wrong_precision_and_shape_without_architecture_are_errors(documents: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(documents, tmp_path, {"model": {**DENSE, "value_scale": 0.7}}))
    with pytest.raises(UserError, match="dtype = 'fp8' is not supported"):
        next(trainer.model_weights("fp8"))
    with pytest.raises(UserError, match="is not used by any supported Hugging Face architecture"):
        next(trainer.model_weights())
