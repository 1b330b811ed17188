"""One run through four layouts and out to Hugging Face: the parameters of each checkpoint bit for bit, and the losses
of the run that never stopped."""

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


def train_leg(run: RunSpec, until: int, again: Path) -> list[tuple[float, float]]:
    """Return from the newest checkpoint, if there is one, and save it in this layout; then continue training."""
    under_way = make_trainer(run)
    if under_way.resume()[0]:
        there, under_way.checkpointer.directory = under_way.checkpointer.directory, again
        under_way.save()
        under_way.checkpointer.wait()
        under_way.checkpointer.directory = there
    result = train_until(under_way, until)
    under_way.save()
    under_way.checkpointer.wait()
    return result


def load_checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """All of the newest checkpoint in a folder."""
    reader = HuggingFaceStorageReader(str(checkpoints(folder)[0]))
    entries = reader.read_metadata().state_dict_metadata.items()
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries}
    load(whole, storage_reader=reader, no_dist=True)
    return whole


def test_checkpoint_is_bit_exact_through_four_layouts_and_hf_export(tmp_path: Path) -> None:
    text = tmp_path / "text"
    shutil.copytree(Path(json.__file__).parent, text, ignore=shutil.ignore_patterns("__pycache__"))
    whole = training_trajectory(small_run(text, tmp_path / "whole", {"model": MODEL}))
    kept: dict[str, Tensor] = {}
    for number, (name, world_size, changes) in enumerate(LEGS):
        run = small_run(text, tmp_path, {"model": MODEL, **changes})
        again = tmp_path / f"again-{number}"
        again.mkdir()
        got = rank_pool(world_size).run(train_leg, run, 5 * (number + 1), again)[0]
        assert got == [pytest.approx(step, rel=1e-10) for step in whole[5 * number : 5 * (number + 1)]], name
        if kept:
            held = load_checkpoint_tensors(again)
            assert held.keys() == kept.keys(), name
            assert all(torch.equal(held[key], kept[key]) for key in kept), name
        kept = load_checkpoint_tensors(tmp_path / "parity" / "checkpoints")

    model = {key.removeprefix("model."): tensor for key, tensor in kept.items() if key.startswith("model.")}
    folder = tmp_path / "hf"
    export_hf(run.model, model, folder, Path(prepare(run.data).tokenizer), 0, "fp32")
    read = open_hf_weights(folder, run.model)
    for key, tensor in model.items():
        assert torch.equal(read(key, tensor.shape), tensor.float()), key
