import pytest
import torch
import torch.nn.functional as F

from phalanx.model import moe as moe_file
from phalanx.model.moe import Experts, MoE, Router, balance_loss, z_loss
from phalanx.spec.model import ModelSpec, MoESpec
from phalanx.spec.parts.block import blocks


def build_part(**changes):
    moe = MoESpec(**{"num_experts": 8, "top_k": 3, "expert_ffn_size": 16, **changes})
    spec = ModelSpec(
        vocab_size=9, hidden_size=32, num_layers=1, num_heads=4, ffn_hidden_size=16, max_seq_len=8, moe=moe
    )
    return blocks(spec)[0][-1].part, moe


def build_layer(**changes):
    part, moe = build_part(**changes)
    return MoE(moe, part)


def randomize_parameters(module, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    module = module.to(dtype)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (noise / parameter.shape[-1] ** 0.5).to(dtype)
    return module


def random_inputs(*shape):
    return torch.randn(*shape, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


VARIANTS = [
    {},
    {"normalize_top_k": False},
    {"router_score": "sigmoid", "num_shared_experts": 2},
    {"router_score": "sigmoid", "normalize_top_k": False},
    {"num_shared_experts": 1, "top_k": 1},
    {"top_k": 8, "bias_update_rate": 0.1},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_moe_output_equals_weighted_sum_of_expert_outputs(variant):
    part, moe = build_part(**variant)
    layer, x = randomize_parameters(MoE(moe, part)), random_inputs(2, 7)
    out, _ = layer(x)
    expected = torch.zeros_like(x)
    for index in [(b, t) for b in range(2) for t in range(7)]:
        logits = layer.router.gate.weight @ x[index]
        score = logits.softmax(0) if moe.router_score == "softmax" else logits.sigmoid()
        chosen = sorted(range(8), key=lambda e: -score[e].item())[: moe.top_k]
        total = sum(score[e] for e in chosen) if moe.normalize_top_k else 1.0
        for e in chosen:
            gate, up, down = layer.experts.gate[e], layer.experts.up[e], layer.experts.down[e]
            expected[index] += score[e] / total * (down @ (F.silu(gate @ x[index]) * (up @ x[index])))
        if moe.num_shared_experts:
            expected[index] += layer.shared(x[index])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1, 0, 0, 9, 2], [0, 0, 0, 20, 0, 0, 0, 0]], ids=str)
def test_experts_grouped_mm_equals_per_expert_loop(monkeypatch, dtype, tolerance, sizes):
    part, _ = build_part()
    x, ends = random_inputs(20).to(dtype), torch.tensor(sizes).cumsum(0)
    results = []
    for grouped in (True, False):
        experts = randomize_parameters(Experts(part.within("experts")), dtype)
        if not grouped:
            monkeypatch.setattr(moe_file, "supports_grouped_mm", lambda x, weight: False)
        assert moe_file.supports_grouped_mm(x, experts.gate) is grouped
        rows = x.clone().requires_grad_()
        out = experts(rows, ends)
        out.square().sum().backward()
        results.append([out, rows.grad, *(parameter.grad for parameter in experts.parameters())])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)


def test_router_bias_changes_selection_but_not_weights():
    part, moe = build_part(bias_update_rate=0.1, normalize_top_k=False)
    router, x = randomize_parameters(Router(moe, part.within("router"))), random_inputs(2, 7)
    _, before, _ = router(x)
    router.bias[5] = 10.0
    weights, chosen, _ = router(x)
    assert not (before == 5).any(-1).all()
    assert (chosen[..., 0] == 5).all()
    torch.testing.assert_close(weights, (x @ router.gate.weight.T).softmax(-1).gather(-1, chosen))


def test_router_update_bias_raises_idle_and_lowers_busy_experts():
    part, moe = build_part(num_experts=4, bias_update_rate=0.1)
    router = Router(moe, part.within("router"))
    router.load.copy_(torch.tensor([10.0, 0.0, 5.0, 5.0]))
    router.update_bias()
    assert router.bias.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert router.load.tolist() == [0.0] * 4
    router.load.copy_(torch.tensor([10.0, 0.0, 5.0, 5.0]))
    router.update_bias(apply=False)
    assert router.bias.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert router.load.tolist() == [0.0] * 4


def test_router_update_bias_evens_expert_load():
    part, moe = build_part(bias_update_rate=0.004)
    router, x = randomize_parameters(Router(moe, part.within("router"))), random_inputs(4, 64) + 0.5

    def max_load_ratio():
        router.load.zero_()
        router(x)
        return (router.load.max() / router.load.mean()).item()

    first = max_load_ratio()
    for _ in range(150):
        router(x)
        router.update_bias()
    assert first > 1.5
    assert max_load_ratio() < 1.2


def test_router_load_counts_training_tokens_only():
    part, moe = build_part()
    router = randomize_parameters(Router(moe, part.within("router")))
    router(random_inputs(2, 7))
    with torch.no_grad():
        router(random_inputs(2, 7))
    assert router.load.sum() == 2 * 7 * 3


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_balance_loss_is_minimal_and_equals_coefficient_when_load_is_even(scope):
    _, moe = build_part(balance_loss_coef=0.02, balance_loss_scope=scope)

    def loss(logits_E):
        share = logits_E.softmax(0).expand(3, 16, 8)
        load = share.detach().sum(1) * moe.top_k
        return balance_loss(moe, share, load)

    even = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    loss(even).backward()
    assert loss(even).item() == pytest.approx(0.02 * 3 * 16)
    assert even.grad.abs().max() < 1e-12
    for seed in range(5):
        uneven = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert loss(uneven) > loss(even)


def test_z_loss_equals_scaled_squared_logsumexp():
    _, moe = build_part(z_loss_coef=0.001)
    logits = random_inputs(2, 7)[..., :8]
    expected = sum(0.001 * torch.log(torch.exp(row).sum()) ** 2 for row in logits.flatten(0, 1))
    torch.testing.assert_close(z_loss(moe, logits), expected)


def test_sequence_balance_loss_is_independent_of_micro_batch_split(build_model):
    tokens = torch.randint(0, 53, (4, 16), generator=torch.Generator().manual_seed(0))

    def difference(scope):
        moe = {
            "num_experts": 4,
            "top_k": 2,
            "expert_ffn_size": 24,
            "balance_loss_scope": scope,
            "balance_loss_coef": 1.0,
        }
        model = build_model(moe=moe)
        full_batch_loss = model(tokens)[1]
        sum_of_parts = sum(model(part)[1] for part in tokens.split([1, 2, 1]))
        return (full_batch_loss - sum_of_parts).abs().item() / full_batch_loss.item()

    assert difference("sequence") < 1e-14
    assert difference("micro_batch") > 1e-3


def test_expert_capacity_drops_latest_tokens_of_each_sequence():
    """Each expert keeps its first ceil(factor x T k / E) choices of every sequence. Dropped choices add nothing, and
    the others keep their weights."""
    part, moe = build_part(capacity_factor=0.5, top_k=2, num_shared_experts=0)
    layer, x = randomize_parameters(MoE(moe, part)), random_inputs(3, 16)
    unlimited = randomize_parameters(build_layer(top_k=2))
    weights, chosen, _ = unlimited.router(x)
    capacity = 2  # ceil(0.5 x 16 x 2 / 8)
    expected, dropped = torch.zeros_like(x), 0
    for b in range(3):
        num_choices = [0] * 8
        for t in range(16):
            for weight, e in zip(weights[b, t], chosen[b, t].tolist(), strict=True):
                num_choices[e] += 1
                if num_choices[e] > capacity:
                    dropped += 1
                    continue
                hidden = F.silu(layer.experts.gate[e] @ x[b, t]) * (layer.experts.up[e] @ x[b, t])
                expected[b, t] += weight * (layer.experts.down[e] @ hidden)
    out, _ = layer(x)
    assert dropped
    assert layer.router.dropped == dropped
    assert torch.allclose(out, expected)


def test_expert_capacity_drops_no_tokens_when_large():
    part, moe = build_part(capacity_factor=8.0)
    layer, unlimited = randomize_parameters(MoE(moe, part)), randomize_parameters(build_layer())
    assert torch.equal(layer(random_inputs(2, 16))[0], unlimited(random_inputs(2, 16))[0])
    assert layer.router.dropped == 0
