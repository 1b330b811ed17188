import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing
from phalanx.parallel.module_tensors import named_parameters

MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "num_shared_experts": 1, "num_leading_dense_layers": 1}


@pytest.fixture(params=[{}, {"moe": MOE}], ids=["dense", "experts"])
def model(request, build_model):
    model = build_model(**request.param).float()
    apply_activation_checkpointing(model, "norms")
    return model


def compute_loss(model, tokens, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, auxiliary = model(tokens)
    return logits.float().logsumexp(-1).sum() + auxiliary


def block_norms(model):
    return [norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm)]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_outputs_of_norms_are_freed_in_forward_pass(model, tokens, autocast):
    outputs = []
    for norm in block_norms(model):
        norm.register_forward_hook(lambda norm, args, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    loss = compute_loss(model, tokens, autocast)
    assert len(outputs) == 2 * len(model.blocks)
    assert all(output.expired() for output in outputs)
    loss.backward()


def test_each_norm_is_computed_once_more_in_backward_pass(model, tokens, monkeypatch):
    calls = []
    compute = torch.rsqrt

    def count(*args, **options):
        calls.append(args)
        return compute(*args, **options)

    monkeypatch.setattr(torch, "rsqrt", count)
    loss = compute_loss(model, tokens)
    in_forward = len(calls)
    loss.backward()
    assert len(calls) - in_forward == 2 * len(model.blocks)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_micro_batches_in_flight_have_their_own_outputs(model, tokens, autocast):
    """Two forward passes before two backward passes, as in a pipeline, and an evaluation between them."""
    batches = tokens, tokens.flip(1)
    losses = [compute_loss(model, batch, autocast) for batch in batches]
    with torch.no_grad():
        compute_loss(model, tokens, autocast)
    for loss in losses:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in named_parameters(model)}
    model.zero_grad()
    for batch in batches:
        compute_loss(model, batch, autocast).backward()
    for name, parameter in named_parameters(model):
        assert torch.equal(gradients[name], parameter.grad), name
