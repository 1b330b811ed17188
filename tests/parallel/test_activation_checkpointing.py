import pytest
import torch

from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing
from phalanx.parallel.module_tensors import named_parameters

MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "num_shared_experts": 1, "num_leading_dense_layers": 1}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "changes",
    [{"num_kv_heads": 2, "qk_norm": "head"}, {"norm": "layernorm"}, {"moe": MOE}],
    ids=["dense", "layernorm", "experts"],
)
def test_activation_checkpointing_gradients_are_bitwise_identical(build_model, tokens, changes, autocast):
    def gradients(mode):
        model = build_model(**changes).to(torch.float32 if autocast else torch.float64)
        apply_activation_checkpointing(model, mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits, auxiliary = model(tokens)
        (logits.logsumexp(-1).sum() + auxiliary).backward()
        return {name: parameter.grad for name, parameter in named_parameters(model)}

    expected = gradients("none")
    for mode in ("norms", "selective", "full", "offload"):
        recomputed = gradients(mode)
        assert recomputed.keys() == expected.keys()
        assert all(torch.equal(recomputed[name], gradient) for name, gradient in expected.items())
