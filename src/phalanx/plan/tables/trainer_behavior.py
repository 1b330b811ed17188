"""Columns of a job table that are the default behavior of a trainer, from the description of a run."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.kinds import AttentionKernel, OffloadTarget
from phalanx.plan.tables.job_columns import JobRow


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    """Facts of a trainer that the description of a run states or implies."""

    text: str
    """Description in lower case."""
    precision: str
    era: int
    zero: int
    xla: bool

    def mentions(self, *phrases: str) -> bool:
        """Return whether the description contains any of these phrases."""
        return any(phrase in self.text for phrase in phrases)

    @property
    def is_sharded(self) -> bool:
        """True if ranks share the parameters, as with FSDP."""
        return self.zero >= 3 or self.mentions("fsdp")

    @property
    def is_deepspeed(self) -> bool:
        """True for DeepSpeed itself."""
        return self.mentions("deepspeed") and not self.mentions("megatron-deepspeed")

    @property
    def is_nanotron(self) -> bool:
        """True for nanotron."""
        return self.mentions("nanotron")

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
        if self.era > 0:
            return AttentionKernel.FLASH_3
        return AttentionKernel.FUSED if self.precision == "fp16" or self.is_deepspeed else AttentionKernel.FLASH_2


def trainer_behavior(text: str, precision: str, era: int, zero: int, xla: bool = False) -> JobRow:
    """Return the default behavior of a trainer, from its description: schedule name and known facts.

    The defaults are facts of software, not fitted. Trainers that name their attention kernel are those of arXiv
    2311.05610.

    Args:
        text: Description of the run.
        era: Hardware generation.
        zero: ZeRO stage.
        xla: The trainer compiles with XLA.
    """
    trainer = _Trainer(text=text.lower(), precision=precision, era=era, zero=zero, xla=xla)
    return {
        **_state_columns(trainer),
        **_kernel_columns(trainer),
        **_overlap_columns(trainer),
        **_communication_columns(trainer),
        "deepspeed": float(trainer.is_deepspeed),
    }


def _state_columns(trainer: _Trainer) -> JobRow:
    """Return the bytes of parameters, gradients and optimizer state.

    From Hopper on, Megatron-Core keeps fp32 gradients, except in fp16.
    """
    parameters, gradients, state = (4, 4, 8) if trainer.is_sharded else (2, 2, 12)
    has_fp32_gradients = trainer.era > 0 or trainer.mentions("fp32 grad")
    if not trainer.is_sharded and trainer.precision != "fp16" and has_fp32_gradients:
        gradients = 6 if trainer.is_deepspeed else 4
    if trainer.mentions("grad accumulation in fp32"):
        gradients = 6
    return {
        "compute_dtype_bytes": 2,
        "low_precision": float(is_low_precision(trainer.precision)),
        "casts_to_fp8": 0,
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "gradient_wire_bytes": 2 if trainer.is_sharded or gradients == 2 else 4,
        "state_bytes": 16 if trainer.is_deepspeed and not trainer.is_sharded else state,
        "offload": OffloadTarget.CPU if trainer.mentions("offload=true") else OffloadTarget.NONE,
    }


def _kernel_columns(trainer: _Trainer) -> JobRow:
    """Return the kernels of attention, and those of norms and activations.

    Megatron-LM and DeepSpeed of the fp16 era fuse softmax. bf16 came with Flash Attention. From Hopper on,
    Megatron-Core fuses norms. XLA compiles. Trainers that name their attention kernel run RMSNorm by operations unless
    they name its kernel too.
    """
    by_operations = trainer.is_sharded or trainer.names_attention or trainer.is_compiled or trainer.is_nanotron
    return {
        "attention": trainer.attention,
        "compiled": float(trainer.is_compiled),
        "fused_elementwise": float(trainer.mentions("rms kernel") or not by_operations),
        "lean_activations": 0,
        "chunks_loss": 0,
    }


def _overlap_columns(trainer: _Trainer) -> JobRow:
    """Return the communication that runs during compute.

    Megatron-LM and DeepSpeed of the fp16 era do not overlap data-parallel communication. From Hopper on, Megatron-Core
    does. FSDP gathers during compute. ZeRO-1 and 2 of DeepSpeed and nanotron wait for gathered parameters;
    Megatron-Core does not have to (overlap_param_gather).
    """
    is_modern = (
        trainer.attention >= AttentionKernel.FLASH_2 and not trainer.names_attention and not trainer.is_deepspeed
    )
    is_disabled = trainer.mentions("not overlapped", "overlap disabled")
    overlaps = trainer.mentions("overlap") and not is_disabled
    overlaps_by_default = (trainer.is_sharded or trainer.era > 0 or is_modern) and not is_disabled
    overlaps_experts = trainer.era == 2 and not trainer.mentions("overlap disabled")
    return {
        "overlap_grad_reduce": float(overlaps or overlaps_by_default),
        "overlap_param_gather": float(not (trainer.is_deepspeed or trainer.is_nanotron)),
        "overlap_tp": float((overlaps and trainer.mentions("tp", "comm overlap")) or trainer.mentions("async")),
        "overlap_tp_with_weight_grads": float(
            not (trainer.names_attention or trainer.is_deepspeed or trainer.is_nanotron)
        ),
        "overlap_ep": float(overlaps_experts or trainer.mentions("a2a overlap", "1f1b overlap", "dualpipe")),
    }


def _communication_columns(trainer: _Trainer) -> JobRow:
    """Return what ranks send to each other.

    Trainers that name their attention kernel gather the logits. These and nanotron do not split pipeline messages over
    tensor-parallel ranks. All trainers have pipelines outermost.
    """
    has_parallel_layers = trainer.mentions("parallel transformer block", "parallel layers")
    return {
        "grad_reductions_per_step": 1,
        "ulysses": 0,
        "ring_gradient_bytes": 2,
        "dedup_node_dispatch": float(trainer.mentions("deepep", "hybridep")),
        "tp_reductions_per_block": 1 if has_parallel_layers else 2,
        "scatter_gather_p2p": float(not (trainer.names_attention or trainer.is_nanotron)),
        "gathers_logits": float(trainer.names_attention),
        "optimizer_post_validation": float(trainer.mentions("zb-")),
        "pipeline_outermost": 1,
    }


def trainer_name(text: str, zero: int) -> str:
    """Return the trainer that a description and a ZeRO stage select: Megatron-LM, unless they name another."""
    trainer = _Trainer(text=text.lower(), precision="", era=0, zero=zero, xla=False)
    if trainer.is_deepspeed:
        return "DeepSpeed"
    if trainer.is_nanotron:
        return "nanotron"
    return "FSDP" if trainer.is_sharded else "Megatron-LM"


def is_low_precision(precision: str) -> bool:
    """Return whether linear layers run in 8 bits or fewer."""
    return "fp8" in precision or "fp4" in precision
