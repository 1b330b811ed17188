import pytest
import torch
from torch import Tensor

from phalanx.model import attention, sequence_context
from phalanx.model.attention import attend, document_mask, has_flash_kernel
from phalanx.model.sequence_context import Documents
from phalanx.spec.attention_backend import AttentionBackend
from tests.helpers.batches import locate_documents

MODEL_VARIANTS = {
    "rope": {},
    "learned": {
        "position_embedding": "learned",
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "bias": True,
        "tie_embeddings": True,
    },
    "gqa": {"num_kv_heads": 2, "qk_norm": "head"},
    "experts": {"moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}, "qk_norm": "full"},
}


@pytest.mark.parametrize("kind", MODEL_VARIANTS)
def test_attention_mask_makes_packed_documents_independent(build_model, tokens, kind):
    model = build_model(**MODEL_VARIANTS[kind])
    lengths = [[5, 1, 11, 7], [24]]
    starts = torch.tensor([[sum(row[:n]) for n, length in enumerate(row) for _ in range(length)] for row in lengths])
    packed, _ = model(tokens, locate_documents(starts))
    for row, sizes in enumerate(lengths):
        separate = [model(document[None])[0][0] for document in tokens[row].split(sizes)]
        torch.testing.assert_close(packed[row], torch.cat(separate), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODEL_VARIANTS)
def test_attention_with_single_document_mask_equals_unmasked(build_model, tokens, kind):
    model = build_model(**MODEL_VARIANTS[kind])
    masked, _ = model(tokens, locate_documents(torch.zeros_like(tokens)))
    torch.testing.assert_close(masked, model(tokens)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODEL_VARIANTS)
def test_attention_is_causal(build_model, tokens, kind):
    model = build_model(**MODEL_VARIANTS[kind])
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 53
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(after[:, :15], before[:, :15], rtol=0, atol=1e-12)
    assert ((after - before)[:, 15:].abs().amax(-1) > 1e-6).all()


def test_masked_gqa_repeats_kv_heads_when_kernel_lacks_gqa(build_model, tokens, monkeypatch):
    """Outputs and gradients of the code path for CUDA, computed on the CPU."""
    starts = torch.tensor([0, 9, 20]).repeat_interleave(torch.tensor([9, 11, 4])).expand(2, -1)

    def compute_logits_and_gradients():
        model = build_model(**MODEL_VARIANTS["gqa"])
        logits = model(tokens, locate_documents(starts))[0]
        logits.square().mean().backward()
        return logits, *(parameter.grad for parameter in model.parameters())

    by_document = compute_logits_and_gradients()
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention, "choose_backend", lambda *_, **__: AttentionBackend.SDPA_MASKED)
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: (
            calls.append((q.shape, k.shape, options["enable_gqa"])) or attend(q, k, v, **options)
        ),
    )
    torch.testing.assert_close(compute_logits_and_gradients(), by_document, rtol=0, atol=1e-12)
    assert calls
    assert all(query == key and not grouped for query, key, grouped in calls)


def test_gqa_equals_mha_with_repeated_kv_heads(build_model, tokens):
    grouped, repeated = build_model(num_kv_heads=2), build_model(num_kv_heads=4)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens)[0], repeated(tokens)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((6, 2), 10), ((4, 1), 64)])
@pytest.mark.parametrize(
    "lengths",
    [[[192]], [[1] * 70], [[5, 1, 11, 7], [24]], [[1, 191], [64, 128]]],
    ids=["whole", "ones", "mixed", "rows"],
)
def test_attention_by_document_equals_dense_mask_in_fp64(lengths, heads, head_dim, dtype):
    starts = torch.tensor([[sum(row[:n]) for n, length in enumerate(row) for _ in range(length)] for row in lengths])
    documents = locate_documents(starts)
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    qkv = [torch.randn(*starts.shape, count, head_dim, dtype=dtype) for count in (query_heads, kv_heads, kv_heads)]
    gradient = torch.randn(*starts.shape, query_heads, head_dim, dtype=dtype)

    def compute_output_and_gradients(mask: Tensor, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, mask)
        out.backward(gradient.to(dtype))
        return [out, *(leaf.grad for leaf in leaves)]

    exact = compute_output_and_gradients(document_mask(documents.starts), torch.float64)
    for ours, expected in zip(compute_output_and_gradients(documents.bounds, dtype), exact, strict=True):
        error = (ours.double() - expected).norm() / max(expected.norm(), gradient.double().norm())
        assert error < 4 * torch.finfo(dtype).eps


def test_model_does_not_wait_for_device_to_attend_within_documents(build_model, monkeypatch):
    """Meta tensors stand for a GPU's: reading a value of one raises an error."""
    monkeypatch.setattr(attention, "choose_backend", lambda *_, **__: AttentionBackend.VARLEN)
    monkeypatch.setattr(sequence_context, "compute_dtype", lambda x: x.dtype)
    model = build_model(**MODEL_VARIANTS["gqa"]).to("meta")
    starts = torch.empty(2, 24, dtype=torch.int32, device="meta")
    logits, _ = model(starts.long(), Documents(starts, starts.new_empty(4), []))
    assert logits.shape == (2, 24, 53)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 20, False),
        ("cuda", torch.bfloat16, 512, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_flash_kernel_is_for_half_precision_on_cuda(
    device: str, dtype: torch.dtype, head_dim: int, expected: bool
) -> None:
    assert has_flash_kernel(torch.device(device), dtype, head_dim) == expected
