"""RMSNorm on a CPU, in chunks of rows, compared with PyTorch's in fp64."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.model import chunks
from phalanx.model.norm import RMSNorm


@pytest.mark.parametrize("chunk", [1, 40, 2**18], ids=["row", "rows", "whole"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 7, 12), (3, 5, 4, 12)], ids=["residual", "heads"])
def test_rms_norm_equals_fp64(shape, dtype, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    layer = RMSNorm(12, 1e-5)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(shape, dtype=dtype).transpose(0, 1)  # not contiguous
    gradient = torch.randn(x.shape, dtype=dtype)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    exact = F.rms_norm(exact_x, (12,), exact_weight, 1e-5)
    exact.backward(gradient.double())
    layer.to(dtype if dtype != torch.bfloat16 else torch.float32)  # as under autocast
    leaf = x.detach().requires_grad_()
    out = layer(leaf)
    out.backward(gradient)
    tolerance = 32 * torch.finfo(dtype).eps
    for ours, expected in ((out, exact), (leaf.grad, exact_x.grad), (layer.weight.grad, exact_weight.grad)):
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
