"""Activation checkpointing of the transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from phalanx.model.dropout import checkpoint_dropping_alike
from phalanx.model.host_counts import checkpoint_with_saved_counts
from phalanx.model.part import modules_declaring
from phalanx.model.transformer import Transformer
from phalanx.parallel.activation_offload import BlockOffload, HostCopier
from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.parallel.recomputed_norms import RecomputedNorm
from phalanx.spec.parts.operations import Route

CPU = torch.device("cpu")


def apply_activation_checkpointing(
    module: Transformer,
    mode: str,
    num_blocks: int | None = None,
    saves_counts: bool = False,
    device: torch.device = CPU,
) -> None:
    """Wrap blocks so that their activations are recomputed in the backward pass.

    The wrapped modules draw no random numbers. `mode` is "full" for whole blocks (arXiv 1604.06174), "offload" for
    whole blocks whose inputs are in CPU memory, "selective" for attention (arXiv 2205.05198), "norms" for the outputs
    of norms, or "none". If `num_blocks` is given, only the first `num_blocks` blocks are wrapped. With `saves_counts`,
    blocks copy their token counts to the host once and not again in the recomputation
    (`checkpoint_with_saved_counts`)."""
    blocks = dict(list(module.blocks.named_children())[:num_blocks])
    if mode == "selective":
        for block in blocks.values():
            for name in ("attention", "side_mixer"):
                if isinstance(mixer := getattr(block, name), nn.Module):
                    setattr(block, name, checkpoint_wrapper(mixer, checkpoint_fn=checkpoint_dropping_alike))
    elif mode == "norms":
        for block in blocks.values():
            for name, norm in block.named_children():
                if name.endswith("_norm") and not isinstance(norm, nn.Identity):
                    readers = [name.removesuffix("_norm")]
                    if name == "attention_norm" and block.has_one_norm:
                        readers.append("mlp")
                    if name == "attention_norm" and block.side_mixer is not None:
                        readers.append("side_mixer")
                    RecomputedNorm(norm, *map(block.get_submodule, readers))
    elif mode != "none":
        recompute = checkpoint_with_saved_counts if saves_counts else checkpoint_dropping_alike
        functions = dict.fromkeys(blocks, recompute)
        if mode == "offload":
            functions |= _build_block_offloads(module, list(blocks), recompute, device)
        for name, block in blocks.items():
            for router in modules_declaring(block, Route):
                router.forward_passes = 2
            setattr(module.blocks, name, checkpoint_wrapper(block, checkpoint_fn=functions[name]))


def _build_block_offloads(
    module: Transformer, names: list[str], recompute: Callable[..., Any], device: torch.device
) -> dict[str, BlockOffload]:
    """Return the offload of each block by name, except blocks whose input another stage of a pipeline has sent.

    The pipeline keeps such an input on the device, because the backward pass sends its gradient back."""
    stages = module.layers if isinstance(module, StageModule) else {0: range(len(module.blocks))}
    received = {str(layers[0]) for stage, layers in stages.items() if stage > 0}
    copier = HostCopier(device)
    offloads = dict[str, BlockOffload]()
    for name in names:
        if name not in received:
            offloads[name] = BlockOffload(copier, recompute, previous=offloads.get(str(int(name) - 1)))
    return offloads
