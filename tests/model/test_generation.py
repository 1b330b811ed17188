import pytest
import torch
import torch.nn.functional as F

from phalanx.model.generation import generate, generate_batch
from phalanx.model.init import initial_weight
from phalanx.model.sampling import Sampling
from phalanx.model.token_cache import TokenCache, can_cache
from phalanx.model.transformer import Transformer, row_positions
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import CONVOLUTIONS, DELTA, DENSE, INDEXERS, KIMI, KINDS, MAMBAS, MOE, SIDE_BY_SIDE

LATENT = {**INDEXERS, "mixer": {**INDEXERS["mixer"], "indexer": None}}
SOFTCAP = {**DENSE, "attention_softcap": 2.0, "logits_softcap": 3.0, "sliding_window": 8, "num_kv_heads": 1}
SCANS = {"delta": DELTA, "kimi": KIMI, "mamba": MAMBAS, "side_by_side": SIDE_BY_SIDE, "convolutions": CONVOLUTIONS}
TABLES = {"dense": DENSE, "moe": MOE, "kinds": KINDS, "latent": LATENT, "softcap": SOFTCAP, **SCANS}
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


def random_transformer(table):
    """Return a network with random weights, and selection biases of experts."""
    torch.manual_seed(0)
    model = Transformer(ModelSpec(**table)).double().eval()
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]
    for tensor in (*model.parameters(), *biases):
        torch.nn.init.normal_(tensor, std=0.3)
    return model


@pytest.mark.parametrize("table", TABLES)
def test_cached_rows_equal_whole_passes(table):
    """Prompts of several lengths, beyond windows and chunks, give the tokens of a pass of all tokens for each."""
    model = random_transformer(TABLES[table])
    assert can_cache(model)
    prompts = [torch.randint(0, model.spec.vocab_size, (length,)) for length in (3, 21, 9)]
    expected = [
        generate(lambda tokens: model(tokens), prompt, 24, temperature=0)[len(prompt) :].tolist() for prompt in prompts
    ]
    assert generate_batch(model, prompts, 24, Sampling(temperature=0)) == expected
    assert len({token for row in expected for token in row}) > 3
    assert generate(model, prompts[1], 24, temperature=0).tolist() == [*prompts[1].tolist(), *expected[1]]
    # Beyond the context, earlier tokens are dropped one by one, as without a cache.
    windowed = generate(lambda tokens: model(tokens), prompts[1], 12, temperature=0, context=25)
    assert torch.equal(generate(model, prompts[1], 12, temperature=0, context=25), windowed)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 5e-4)])
@pytest.mark.parametrize("table", SCANS)
def test_cached_logits_equal_those_of_a_whole_pass(table, dtype, tolerance):
    """The second prompt is longer than a chunk of each scan, and shorter than the first one."""
    model = random_transformer(TABLES[table]).to(dtype)
    texts = torch.randint(0, model.spec.vocab_size, (2, 100))
    lengths_B = torch.tensor([90, 67])
    expected = model(texts)[0]
    cache = TokenCache(model, lengths_B)
    prompts = torch.stack([F.pad(row[:length], (0, 90 - length)) for row, length in zip(texts, lengths_B, strict=True)])
    passes = [prompts, *(torch.stack([texts[0, 90 + n], texts[1, 67 + n]])[:, None] for n in range(10))]
    for number, tokens in enumerate(passes):
        last_B = cache.last_tokens
        with cache.extended():
            logits = model(tokens)[0][range(2), last_B]
        torch.testing.assert_close(logits, expected[range(2), lengths_B - 1 + number], rtol=0, atol=tolerance)


def test_training_continues_with_the_cores_of_the_layout():
    model = random_transformer(DENSE)
    cores = [block.attention.core for block in model.blocks]
    generate(model, PROMPT, 3)
    assert [block.attention.core for block in model.blocks] == cores
    assert model.local_positions is row_positions


def test_batch_ends_when_all_rows_have():
    model, calls = next_number_model()
    new = generate_batch(model, [torch.tensor([5]), torch.tensor([2])], 9, Sampling(temperature=0), ends={8})
    assert new == [[6, 7, 8], [3, 4, 5, 6, 7, 8]]
    assert len(calls) == 6


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
