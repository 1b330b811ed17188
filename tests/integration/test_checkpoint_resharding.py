"""One run trained in four layouts and exported to Hugging Face: parameters of every checkpoint are bit-exact, and
losses equal those of an uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from phalanx.data.prepare import prepare
from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.huggingface.export import export_hf
from phalanx.runs.checkpoints import checkpoints
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until, training_trajectory

MODEL = {**MOE, "num_layers": 4, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}}
LEGS: list[tuple[str, int, dict[str, Any]]] = [
    ("tp2 x pp2", 4, {"layout.tp": 2, "layout.pp": 2, "layout.micro_batch_size": 1}),
    ("zero3 x 4", 4, {"layout.data_parallel": "zero3"}),
    ("ep2 x dp2", 4, {"layout.ep": 2}),
    ("one process", 1, {}),
]


def train_leg(run: RunSpec, until: int, resaved: Path) -> list[tuple[float, float]]:
    """Resume from the newest checkpoint, if there is one, and save it in this layout to `resaved`; then continue
    training."""
    trainer = make_trainer(run)
    if trainer.resume()[0]:
        directory, trainer.checkpointer.directory = trainer.checkpointer.directory, resaved
        trainer.save()
        trainer.checkpointer.wait()
        trainer.checkpointer.directory = directory
    result = train_until(trainer, until)
    trainer.save()
    trainer.checkpointer.wait()
    return result


def load_checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of the newest checkpoint in a folder."""
    reader = HuggingFaceStorageReader(str(checkpoints(folder)[0]))
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_checkpoint_is_bit_exact_through_four_layouts_and_hf_export(tmp_path: Path) -> None:
    text = tmp_path / "text"
    shutil.copytree(Path(json.__file__).parent, text, ignore=shutil.ignore_patterns("__pycache__"))
    uninterrupted = training_trajectory(small_run(text, tmp_path / "whole", {"model": MODEL}))
    saved: dict[str, Tensor] = {}
    for number, (name, world_size, changes) in enumerate(LEGS):
        run = small_run(text, tmp_path, {"model": MODEL, **changes})
        resaved = tmp_path / f"resaved-{number}"
        resaved.mkdir()
        losses = rank_pool(world_size).run(train_leg, run, 5 * (number + 1), resaved)[0]
        assert losses == [pytest.approx(step, rel=1e-10) for step in uninterrupted[5 * number : 5 * (number + 1)]], name
        if saved:
            resaved_tensors = load_checkpoint_tensors(resaved)
            assert resaved_tensors.keys() == saved.keys(), name
            assert all(torch.equal(resaved_tensors[key], saved[key]) for key in saved), name
        saved = load_checkpoint_tensors(tmp_path / "parity" / "checkpoints")

    model = {key.removeprefix("model."): tensor for key, tensor in saved.items() if key.startswith("model.")}
    folder = tmp_path / "hf"
    export_hf(run.model, model, folder, Path(prepare(run.data).tokenizer), 0, "fp32")
    read_weight = open_hf_weights(folder, run.model)
    for key, tensor in model.items():
        assert torch.equal(read_weight(key, tensor.shape), tensor.float()), key
