"""Families and collectives by names of kernels that PyTorch, cuBLAS, cuDNN, Inductor and NCCL launch."""

from __future__ import annotations

import pytest

from phalanx.report.gpu_profile.kernels import collective_name, kernel_family
from tests.helpers.gpu_traces import ADAM, ELEMENTWISE, FLASH, GEMM


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (GEMM, "matmul"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(int)", "matmul"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(int)", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(int)", "matmul"),
        ("triton_tem_fused_mm_3", "matmul"),
        (FLASH, "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<int>>(int)", "attention"),
        (
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<int>)",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("triton_tem_fused_flex_attention_backward_1", "attention"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mm_0", "elementwise"),
        ("triton_per_fused__to_copy_rms_norm_2", "elementwise"),
        (ELEMENTWISE, "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)", "elementwise"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", "elementwise"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 5, true, false>(int)", "elementwise"),
        (ADAM, "optimizer"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(int)>(int)", "memory"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", "memory"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char **)", "memory"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl"),
        ("ncclSymkDevKernel_ReduceScatter_LL_sum_bf16(ncclSymkDevWorkArgs4K)", "nccl"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(int)", "other"),
    ],
)
def test_kernel_family_of_name(name: str, family: str) -> None:
    assert kernel_family(name) == family


@pytest.mark.parametrize(
    ("recorded", "kernel", "collective"),
    [
        ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(int)", "all_gather"),
        ("allreduce", "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(int)", "all_reduce"),
        ("broadcast", "ncclDevKernel_Broadcast_RING_LL(int)", "broadcast"),
        (None, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(int)", "reduce_scatter"),
        (None, "ncclSymkDevKernel_AllGather_STMC(int)", "all_gather"),
        (None, "ncclKernel_AllReduce_RING_LL_Sum_float(int)", "all_reduce"),
        (None, "ncclDevKernel_SendRecv(int)", "send_recv"),
        (None, "ncclUnknown", "ncclunknown"),
    ],
)
def test_collective_name_prefers_recorded_name(recorded: str | None, kernel: str, collective: str) -> None:
    assert collective_name(recorded, kernel) == collective
