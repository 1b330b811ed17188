"""Reordering of the experts in a checkpoint.

A mixture computes the same function if its experts and the router are permuted together, unless tokens choose groups of
experts. The permutation changes which
experts are neighbors, and therefore which of them share a rank.

Why: `docs/design/decisions/renumbered-experts.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from phalanx.runs.checkpoints import PREVIOUS_SUFFIX, checkpoints, read_manifest
from phalanx.spec.run import KeepSpec
from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.state import load_full_tensors, restore_rng_state

_EXPERT_TENSOR = re.compile(r"blocks\.(\d+)\.mlp\.(experts\.\w+|router\.(gate\.weight|gate\.bias|bias|expert_scale))$")


def reorder_experts(checkpoint: Path, orders: Mapping[int, Sequence[int]]) -> Path:
    """Rewrite a checkpoint so that expert i of a layer is the previous expert `orders[layer][i]`.

    Weights, router, optimizer state and expert counts are permuted. The previous checkpoint is kept next to it; returns
    its path. Raises UserError if the checkpoint cannot be written; then it is unchanged."""
    tensors = load_full_tensors(checkpoint)
    manifest = read_manifest(checkpoint)
    for name, tensor in tensors.items():
        match = _EXPERT_TENSOR.search(name)
        if match and tensor.ndim and int(match[1]) in orders:
            tensors[name] = tensor[torch.tensor(orders[int(match[1])])]
    manifest["expert_tokens"] = [
        [[tokens[i] for i in order] for tokens, order in zip(layer_tokens, orders.values(), strict=True)]
        for layer_tokens in manifest["expert_tokens"]
    ]
    # The new checkpoint contains the random state of this process.
    restore_rng_state(checkpoint, 0)
    checkpointer = Checkpointer(checkpoint.parent, KeepSpec(last=len(checkpoints(checkpoint.parent))))
    checkpointer.save(manifest["step"], tensors, manifest, on_disk=True)
    return checkpoint.with_suffix(PREVIOUS_SUFFIX)
