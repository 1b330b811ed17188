"""Columns of a job table that are the default behavior of a trainer, from the description of a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from phalanx.cost.estimate.job_table import JobRow
from phalanx.cost.kinds import AttentionKernel, Trainer


@dataclass(frozen=True, kw_only=True)
class _Description:
    """Description of a run, and the facts of its trainer that it states or implies."""

    text: str
    """Description in lower case."""
    precision: str
    generation: int
    zero: int
    xla: bool

    def mentions(self, *phrases: str) -> bool:
        return any(phrase in self.text for phrase in phrases)

    @property
    def is_sharded(self) -> bool:
        """True if ranks share the parameters, as with FSDP."""
        return self.zero >= 3 or self.mentions("fsdp")

    @property
    def trainer(self) -> Trainer:
        """Megatron-LM, unless the description selects another."""
        if self.mentions("deepspeed") and not self.mentions("megatron-deepspeed"):
            return "DeepSpeed"
        if self.mentions("nanotron"):
            return "nanotron"
        return "FSDP" if self.is_sharded else "Megatron-LM"

    @property
    def names_attention(self) -> bool:
        """True if the description names the attention kernel."""
        return self.mentions("attention kernel=")

    @property
    def is_compiled(self) -> bool:
        """True if torch.compile or XLA compiles the model."""
        return self.mentions("compile") or self.xla

    @property
    def attention(self) -> AttentionKernel:
        """Implementation of attention."""
        if self.mentions("kernel=torch"):
            return AttentionKernel.SEPARATE
        if self.mentions("kernel=fused"):
            return AttentionKernel.FUSED
        if self.mentions("flash_attentionv1"):
            return AttentionKernel.FLASH_1
        if self.mentions("flash") or self.is_sharded:
            return AttentionKernel.FLASH_2
        if self.generation > 0:
            return AttentionKernel.FLASH_3
        fuses_softmax = self.precision == "fp16" or self.trainer == "DeepSpeed"
        return AttentionKernel.FUSED if fuses_softmax else AttentionKernel.FLASH_2


def trainer_behavior(text: str, precision: str, generation: int, zero: int, xla: bool = False) -> JobRow:
    """Return the default behavior of a trainer, from the description of a run: schedule name and known facts.

    `generation` is that of the hardware, and `zero` the ZeRO stage. The defaults are facts of software, not fitted.
    Trainers that name their attention kernel are those of arXiv 2311.05610.
    """
    run = _Description(text=text.lower(), precision=precision, generation=generation, zero=zero, xla=xla)
    return {"trainer": run.trainer, **_state_columns(run), **_kernel_columns(run), **_communication_columns(run)}


def _state_columns(run: _Description) -> JobRow:
    """Return the bytes of parameters, gradients and optimizer state.

    From Hopper on, Megatron-Core keeps fp32 gradients, except in fp16.
    """
    parameters, gradients, state = (4, 4, 8) if run.is_sharded else (2, 2, 12)
    has_fp32_gradients = run.generation > 0 or run.mentions("fp32 grad")
    if not run.is_sharded and run.precision != "fp16" and has_fp32_gradients:
        gradients = 6 if run.trainer == "DeepSpeed" else 4
    if run.mentions("grad accumulation in fp32"):
        gradients = 6
    return {
        "compute_dtype_bytes": 2,
        "low_precision": float(is_low_precision(run.precision)),
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "gradient_wire_bytes": 2 if run.is_sharded or gradients == 2 else 4,
        "state_bytes": 16 if run.trainer == "DeepSpeed" and not run.is_sharded else state,
        "offload": "cpu" if run.mentions("offload=true") else "none",
    }


def _kernel_columns(run: _Description) -> JobRow:
    """Return the kernels of attention, and those of norms and activations.

    Megatron-LM and DeepSpeed of the fp16 era fuse softmax. bf16 came with Flash Attention. From Hopper on,
    Megatron-Core fuses norms. XLA compiles. Trainers that name their attention kernel run RMSNorm by operations unless
    they name its kernel too.
    """
    by_operations = run.is_sharded or run.names_attention or run.is_compiled or run.trainer == "nanotron"
    return {
        "attention": run.attention,
        "compiled": float(run.is_compiled),
        "fused_elementwise": float(run.mentions("rms kernel") or not by_operations),
        "loss_chunk_bytes": inf,
    }


def _communication_columns(run: _Description) -> JobRow:
    """Return what ranks send to each other, and what of it runs during compute.

    Megatron-LM and DeepSpeed of the fp16 era do not overlap data-parallel communication. From Hopper on, Megatron-Core
    does. FSDP gathers during compute. Trainers that name their attention kernel gather the logits. These and nanotron
    do not split pipeline messages over tensor-parallel ranks. All trainers have pipelines outermost.
    """
    is_deepspeed = run.trainer == "DeepSpeed"
    is_nanotron = run.trainer == "nanotron"
    is_modern = run.attention >= AttentionKernel.FLASH_2 and not run.names_attention and not is_deepspeed
    is_disabled = run.mentions("not overlapped", "overlap disabled")
    overlaps = run.mentions("overlap") and not is_disabled
    overlaps_by_default = (run.is_sharded or run.generation > 0 or is_modern) and not is_disabled
    overlaps_experts = run.generation >= 2 and not run.mentions("overlap disabled")
    return {
        "overlap_grad_reduce": float(overlaps or overlaps_by_default),
        "overlap_tp": float((overlaps and run.mentions("tp", "comm overlap")) or run.mentions("async")),
        "overlap_tp_with_weight_grads": float(not (run.names_attention or is_deepspeed or is_nanotron)),
        "overlap_ep": float(overlaps_experts or run.mentions("a2a overlap", "1f1b overlap", "dualpipe")),
        "ulysses": 0,
        "dedup_node_dispatch": float(run.mentions("deepep", "hybridep")),
        "tp_reductions_per_block": 1 if run.mentions("parallel transformer block", "parallel layers") else 2,
        "scatter_gather_p2p": float(not (run.names_attention or is_nanotron)),
        "gathers_logits": float(run.names_attention),
        "optimizer_post_validation": float(run.mentions("zb-")),
        "pipeline_outermost": 1,
    }


def is_low_precision(precision: str) -> bool:
    """Return whether linear layers run in 8 bits or fewer."""
    return "fp8" in precision or "fp4" in precision
