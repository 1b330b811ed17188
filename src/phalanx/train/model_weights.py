"""The weights of a run in training, one full tensor at a time, on all ranks and in every layout.

This is what a program needs that generates with the weights of a run, such as the inference engine of reinforcement
learning. The tensors are those of an export of this step. Their parts are those that ranks write into a checkpoint: one
of the ranks that have a part sends it to all. All ranks walk through the same names, hence call the same collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.model.huggingface.adapter import merge_adapters
from phalanx.model.huggingface.checkpoint import read_json
from phalanx.model.huggingface.export import check_precision, checkpoint_form
from phalanx.model.huggingface.safetensors_file import FileTensor
from phalanx.parallel.comm.objects import all_gather_objects, broadcast_from_rank0
from phalanx.parallel.dtensor_shards import local_shape_and_offset, local_tensor
from phalanx.parallel.strategy import Strategy
from phalanx.runs.create import FROM_HF_DIR
from phalanx.train.checkpoint.chunked_tensor import Chunk, ChunkedTensor
from phalanx.train.checkpoint.state import checkpoint_tensors

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

EVERY_RANK = -1
"""Place of a chunk that all ranks have."""


@dataclass(frozen=True)
class RankTensor(ChunkedTensor[int]):
    """A full tensor whose chunks are on ranks. An index is a collective that returns a part on all of them."""

    shard: Tensor | None
    """The chunk of this rank, if it has one."""
    to_device: torch.device

    @property
    def device(self) -> torch.device:
        """Device of the parts that are read."""
        return self.to_device

    def read_chunk(self, chunk: Chunk[int], index: tuple[slice, ...]) -> Tensor:
        """Return a part of a chunk, which its rank sends to the others."""
        if chunk.place in (EVERY_RANK, dist.get_rank() if dist.is_initialized() else 0):
            assert self.shard is not None
            part = self.shard[index].to(self.device)
        else:
            part = torch.empty([each.stop - each.start for each in index], dtype=self.dtype, device=self.device)
        if chunk.place != EVERY_RANK:
            part = part.contiguous()
            dist.broadcast(part, src=chunk.place)
        return part


def model_weights(trainer: Trainer, dtype: str = "fp32") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `phalanx export` would write, with their names, on the device of each rank.

    Adapters are merged. A network of the user has its own names. A collective: every rank takes all tensors, before the
    next step. In memory are the yielded tensor and parts of at most `export.PIECE_NUMBERS` values, or of a parameter
    that the checkpoint has in another order.

    Args:
        dtype: "fp32" or "bf16".

    Raises:
        UserError: no Hugging Face architecture has the model's shape.
    """
    check_precision(dtype)
    trainer.strategy.drain_pending_updates()
    spec = trainer.run.model
    tensors = rank_tensors(trainer.strategy, trainer.device)
    if spec.implementation is not None:
        for name, tensor in tensors.items():
            yield name, tensor[...].to(TORCH_DTYPES[dtype] if tensor.dtype.is_floating_point else tensor.dtype)
        return
    source_config = broadcast_from_rank0(partial(_read_source_config, trainer.directory))
    form = checkpoint_form(spec.without_tuning, source_config)
    for name, stored in form.tensors(merge_adapters(spec, tensors), dtype).items():
        yield name, _assemble(stored, trainer.device)


def rank_tensors(strategy: Strategy, device: torch.device) -> dict[str, RankTensor]:
    """Return the full parameters and buffers of a model by name, equal on all ranks (a collective)."""
    own = {name.removeprefix("model."): tensor for name, tensor in checkpoint_tensors(strategy, []).items()}
    table = {name: (tensor.shape, tensor.dtype, *local_shape_and_offset(tensor)) for name, tensor in own.items()}
    tables = all_gather_objects(table)
    shapes = {name: entry[:2] for table in tables for name, entry in table.items()}
    ranks_of_chunk: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, table in enumerate(tables):
        for name, (_, _, sizes, offsets) in table.items():
            ranks_of_chunk[name][offsets, sizes].append(rank)
    tensors = {}
    for name, (shape, dtype) in shapes.items():
        chunks = tuple(
            Chunk(EVERY_RANK if len(ranks) == len(tables) else ranks[0], offsets, sizes)
            for (offsets, sizes), ranks in ranks_of_chunk[name].items()
        )
        shard = local_tensor(own[name]) if name in own else None
        tensors[name] = RankTensor(name, shape, dtype, chunks, shard, device)
    return tensors


def _read_source_config(directory: Path) -> dict[str, Any] | None:
    """Return the config.json of the model that a run started from."""
    file = directory / FROM_HF_DIR / "config.json"
    return read_json(file) if file.exists() else None


def _assemble(stored: FileTensor, device: torch.device) -> Tensor:
    """Return a tensor of a checkpoint from its pieces."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    start = 0
    for piece in stored.pieces():
        tensor.view(-1)[start : start + piece.numel()].copy_(piece.flatten())
        start += piece.numel()
    return tensor
