import torch
from torch.testing import assert_close

from phalanx.model.init import initial_weight
from phalanx.model.sampling import generate, sample_token
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.testing import rank_pool

PROMPT = torch.tensor([3, 1, 4, 1, 5])


def seeded_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def next_number_model(vocab=10):
    """Return a model that predicts the next number with certainty, and a list of the shapes of its calls."""
    calls = []

    def model(tokens):
        calls.append(tokens.shape)
        return 100 * torch.nn.functional.one_hot((tokens + 1) % vocab, vocab).float(), torch.zeros(())

    return model, calls


def test_generate_is_greedy_at_temperature_0(build_model):
    model, tokens = build_model(), PROMPT
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens[None])[0][0, -1].argmax()[None]))
    assert torch.equal(generate(model, PROMPT, 6, temperature=0), tokens)
    assert torch.equal(generate(model, PROMPT, 6, top_k=1, generator=seeded_generator()), tokens)


def test_generate_is_reproducible_per_seed(build_model):
    model = build_model()
    first, repeated, other = (generate(model, PROMPT, 20, generator=seeded_generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)


def test_sample_token_frequencies_match_top_k_softmax():
    logits, generator = torch.tensor([0.0, 1.0, 2.0, -1.0]), seeded_generator()
    counts = torch.bincount(torch.tensor([sample_token(logits, 0.5, 3, generator) for _ in range(4000)]), minlength=4)
    expected = torch.cat(((logits[:3] / 0.5).softmax(0), torch.zeros(1)))
    assert_close(counts / 4000, expected, rtol=0, atol=0.02)


def test_generate_repeats_end_token_and_runs_every_forward_pass():
    model, calls = next_number_model()
    tokens = generate(model, torch.tensor([5]), 6, eos_id=8, generator=seeded_generator())
    assert tokens.tolist() == [5, 6, 7, 8, 8, 8, 8]
    assert len(calls) == 6


def test_generate_truncates_model_input_to_context_length():
    model, calls = next_number_model()
    assert generate(model, torch.tensor([7, 8]), 4, context=3, generator=seeded_generator()).tolist() == [
        7,
        8,
        9,
        0,
        1,
        2,
    ]
    assert calls == [(1, 2), (1, 3), (1, 3), (1, 3)]


SPEC = ModelSpec(vocab_size=53, hidden_size=32, num_layers=2, num_heads=4, ffn_hidden_size=48, max_seq_len=64)


def generate_with_layout(data, world_size):
    layout = Layout(data_parallel=data)
    mesh = build_mesh(layout, world_size, "cpu")

    def weights(name, shape):
        return initial_weight(SPEC, name, shape, 0)

    strategy = apply_layout(SPEC, layout, mesh, torch.device("cpu"), weights, "fp64")
    return generate(strategy.model, PROMPT, 8, generator=seeded_generator()).tolist()


def test_generate_with_zero3_equals_single_process():
    assert rank_pool(2).run(generate_with_layout, "zero3", 2) == [generate_with_layout("ddp", 1)] * 2


def test_generate_draws_only_tokens_that_the_tokenizer_has() -> None:
    """A model may have more: the byte tokenizer has 257 tokens, and vocabularies are often multiples of 64."""

    def uniform_model(tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(*tokens_BT.shape, 512), torch.zeros(())

    tokens = generate(uniform_model, torch.tensor([7]), 40, generator=seeded_generator(), vocab=9)
    assert max(tokens.tolist()) < 9
