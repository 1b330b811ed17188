"""Kernels by name: their families, and the collectives of NCCL's kernels."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, get_args

Family = Literal["matmul", "attention", "elementwise", "optimizer", "nccl", "memory", "other"]
FAMILIES: tuple[Family, ...] = get_args(Family)

FAMILY_PATTERNS: tuple[tuple[Family, str], ...] = (
    # NCCL: src/device/generate.py (ncclDevKernel_*, before 2.19 ncclKernel_*) and symmetric/generate.py (ncclSymk*).
    ("nccl", r"^nccl"),
    # Inductor: codegen/triton.py names kernels by the heuristic, then by all fused operators. A pointwise kernel may
    # therefore have "attention" or "mm" in its name. Templates (tem) are products or flex_attention.
    ("elementwise", r"^triton_(poi|red|per|for)_"),
    ("attention", r"^triton_tem_\w*attention"),
    ("matmul", r"^triton_tem_"),
    # ATen: native/cuda/MultiTensorApply.cuh, of foreach and fused optimizers, and of gradient clipping.
    ("optimizer", r"multi_tensor_apply"),
    # FlashAttention 2 and 3 (flash_fwd_kernel, flash::FlashAttnFwdSm90), ATen's memory-efficient attention
    # (fmha_cutlassF_*), cuDNN (cudnn_generated_fort_native_sdpa_*).
    ("attention", r"(?i)flash(_|::|attn)|fmha|_sdpa_"),
    # cuBLAS: *gemm*, from 12.8 on nvjet_*; splitKreduce_kernel, gemv*, dot_kernel. CUTLASS: cutlass::gemm::kernel.
    ("matmul", r"(?i)gemm|^nvjet_|splitKreduce|gemv|\bdot_kernel|^cutlass_\d+"),
    # ATen: native/cuda/Copy.cu, Shape.cu (CatArrayBatchedCopy), FillKernel.cu, and the copies of FSDP2 in
    # TensorShape.cu (chunk_cat, split_with_sizes_copy).
    ("memory", r"direct_copy_kernel|CatArrayBatchedCopy|split_with_sizes_copy|chunk_cat|FillFunctor"),
    # ATen: native/cuda/Loops.cuh, Reduce.cuh, layer_norm_kernel.cu, PersistentSoftmax.cuh.
    ("elementwise", r"elementwise_kernel|reduce_kernel|(?i:layer_?norm|rms_?norm|softmax)"),
)
"""Families by patterns of kernel names; the first match counts."""

COLLECTIVE_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_allv": "all_to_all",
    "sendrecv": "send_recv",
}
"""Names of ProcessGroupNCCL and of NCCL's kernels, in lower case, as the names of torch.distributed."""
NCCL_KERNEL_COLLECTIVE = re.compile(r"^nccl(?:Dev|Symk?(?:Dev)?)?Kernel_([A-Za-z]+)")


@cache
def kernel_family(name: str) -> Family:
    """Return the family of a kernel."""
    return next((family for family, pattern in FAMILY_PATTERNS if re.search(pattern, name)), "other")


def collective_name(recorded: str | None, kernel: str) -> str:
    """Return the collective of an NCCL kernel by the name that PyTorch recorded, or else by the kernel's name."""
    match = NCCL_KERNEL_COLLECTIVE.match(kernel)
    name = recorded or (match[1] if match else kernel)
    return COLLECTIVE_NAMES.get(name.lower(), name.lower())
