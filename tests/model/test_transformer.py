import pytest
import torch

from phalanx.cost.exact.parameters import count_parameters
from phalanx.model.init import initial_weight
from phalanx.model.transformer import Transformer
from phalanx.spec.files.load import load_model_spec, preset_names


@pytest.mark.parametrize("preset", preset_names("models"))
def test_transformer_parameter_count_matches_cost_model(preset):
    spec = load_model_spec(preset)
    with torch.device("meta"):
        model = Transformer(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(spec).trained


def test_transformer_with_tied_head_uses_embedding_weights(build_model, tokens):
    tied, untied = build_model(tie_embeddings=True), build_model()
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embedding.weight})
    torch.testing.assert_close(tied(tokens)[0], untied(tokens)[0], rtol=0, atol=1e-12)


def test_initial_weight_depends_only_on_seed_and_name():
    spec = load_model_spec("tiny")
    shape = torch.Size([64, 192])
    first = initial_weight(spec, "blocks.0.attention.wq.weight", shape, 1)
    assert torch.equal(first, initial_weight(spec, "blocks.0.attention.wq.weight", shape, 1))
    assert not torch.equal(first, initial_weight(spec, "blocks.0.attention.wq.weight", shape, 2))
    assert not torch.equal(first, initial_weight(spec, "blocks.0.attention.wk.weight", shape, 1))
    into_stream = initial_weight(spec, "blocks.0.attention.wo.weight", shape, 1)
    assert first.std().item() == pytest.approx((2 / (5 * spec.hidden_size)) ** 0.5, rel=0.02)
    assert (first.std() / into_stream.std()).item() == pytest.approx((2 * spec.num_layers) ** 0.5, rel=0.03)


def test_initialized_transformer_loss_is_near_log_vocab_size():
    spec = load_model_spec("tiny")
    model = Transformer(spec)
    for name, parameter in model.named_parameters():
        parameter.data = initial_weight(spec, name, parameter.shape, 0)
    logits, _ = model(torch.arange(64)[None])
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], torch.arange(1, 64))
    assert loss.item() == pytest.approx(torch.tensor(spec.vocab_size).log().item(), rel=0.05)
