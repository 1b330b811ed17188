"""Papers and documentation that the advice cites."""

from __future__ import annotations

BFLOAT16 = "a study of bfloat16, arXiv 1905.12322"
CHECKPOINTING = "activation checkpointing, arXiv 1604.06174"
DDP = "PyTorch DDP, arXiv 2006.15704"
EXPERTS = "GShard, arXiv 2006.16668"
GPIPE = "GPipe, arXiv 1811.06965"
LORA = "LoRA, arXiv 2106.09685; rank and factor of QLoRA, arXiv 2305.14314"
LONG_SEQUENCES = "Ring Attention, arXiv 2310.01889; DeepSpeed-Ulysses, arXiv 2309.14509"
MEGATRON = "Megatron-LM, arXiv 1909.08053"
MEGATRON_ON_CLUSTERS = "Megatron-LM on GPU clusters, arXiv 2104.04473"
MEGATRON_MOE = "Megatron-Core, megatron/core/transformer/moe/README.md"
OFFLOAD = "ZeRO-Offload, arXiv 2101.06840"
OFFLOAD_TO_FILES = "ZeRO-Infinity, arXiv 2104.07857"
QLORA = "QLoRA, arXiv 2305.14314"
SEQUENCE_PARALLELISM = "sequence parallelism and selective recomputation, arXiv 2205.05198"
ZERO = "ZeRO, arXiv 1910.02054"
ZERO_BUBBLE = "zero bubble pipelines, arXiv 2401.10241"

SERVERS = f"{MEGATRON_ON_CLUSTERS}, takeaway 1"
"""Tensor parallelism within a server, then pipelines across servers."""
SCALE_OUT = f"{MEGATRON_ON_CLUSTERS}, takeaway 2"
"""Model parallelism until the model fits, then data parallelism."""


def no_paper(method: str) -> str:
    """Return the source of a common rule that no paper states, with the paper of its method."""
    return f"a common rule that no paper states; the method: {method}"
