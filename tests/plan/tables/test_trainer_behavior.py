"""Behavior of trainers, inferred from their names and published facts."""

from __future__ import annotations

from phalanx.cost.kinds import AttentionKernel
from phalanx.plan.tables.trainer_behavior import trainer_behavior


def test_trainer_behavior_follows_trainer_name_and_facts():
    old = trainer_behavior("1f1b", "fp16", 0, 0)
    assert (old["attention"], old["overlap_grad_reduce"], old["gradient_bytes"], old["fused_elementwise"]) == (
        AttentionKernel.FUSED,
        0,
        2,
        1,
    )
    fsdp = trainer_behavior("FSDP2; torch.compile", "bf16", 1, 3)
    assert (fsdp["attention"], fsdp["overlap_grad_reduce"], fsdp["parameter_bytes"], fsdp["compiled"]) == (
        AttentionKernel.FLASH_2,
        1,
        4,
        1,
    )
    megatron = trainer_behavior("interleaved-1f1b; distributed optimizer", "bf16", 1, 1)
    assert (megatron["attention"], megatron["overlap_grad_reduce"], megatron["gradient_bytes"]) == (
        AttentionKernel.FLASH_3,
        1,
        4,
    )
    behavior = trainer_behavior("1f1b; attention kernel=torch", "bf16", 0, 1)
    assert (behavior["attention"], behavior["fused_elementwise"], behavior["gathers_logits"]) == (
        AttentionKernel.SEPARATE,
        0,
        1,
    )
    assert trainer_behavior("comm overlap disabled", "bf16", 2, 1)["overlap_grad_reduce"] == 0
    nanotron = trainer_behavior("1f1b; nanotron", "bf16", 1, 1)
    assert (nanotron["scatter_gather_p2p"], nanotron["trainer"]) == (0, "nanotron")
    assert (megatron["scatter_gather_p2p"], megatron["trainer"]) == (1, "Megatron-LM")
    assert trainer_behavior("1f1b (DeepSpeed)", "fp16", 0, 1)["trainer"] == "DeepSpeed"
    assert trainer_behavior("1f1b; Megatron-DeepSpeed", "fp16", 0, 1)["trainer"] == "Megatron-LM"
