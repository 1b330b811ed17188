"""Activation checkpointing of the transformer."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from phalanx.model.host_counts import checkpoint_with_saved_counts
from phalanx.model.moe import Router
from phalanx.model.transformer import Transformer


def apply_activation_checkpointing(
    module: Transformer, mode: str, num_blocks: int | None = None, saves_counts: bool = False
) -> None:
    """Wrap blocks so that their activations are recomputed in the backward pass.

    The wrapped modules draw no random numbers.

    Args:
        module: Model whose blocks are wrapped in place.
        mode: "full" for whole blocks (arXiv 1604.06174), "selective" for attention (arXiv 2205.05198), or "none".
        num_blocks: Number of blocks that are wrapped, the first ones; None for all.
        saves_counts: True if blocks read their counts of tokens on the host once (`checkpoint_with_saved_counts`).
    """
    for name, block in list(module.blocks.named_children())[:num_blocks]:
        if mode == "full":
            for router in block.modules():
                if isinstance(router, Router):
                    router.forward_passes = 2
            kind = {"checkpoint_fn": checkpoint_with_saved_counts} if saves_counts else {"preserve_rng_state": False}
            setattr(module.blocks, name, checkpoint_wrapper(block, **kind))
        elif mode == "selective":
            block.attention = checkpoint_wrapper(cast(nn.Module, block.attention), preserve_rng_state=False)
