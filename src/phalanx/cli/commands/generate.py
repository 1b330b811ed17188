"""`phalanx generate`: text generation with a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from phalanx.cli.common.options import (
    MinP,
    RepetitionPenalty,
    Seed,
    Step,
    Temperature,
    TopK,
    TopP,
    TrainedRun,
    Trust,
)

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer


def generate(
    run: TrainedRun,
    prompt: Annotated[str, Option(help="Text to continue; empty: begin a document.")] = "",
    tokens: Annotated[int, Option(help="Maximum number of new tokens.", min=1)] = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    step: Step = None,
    trust: Trust = None,
) -> None:
    """Print a prompt and its continuation by a run's checkpoint, or by a swarm's current model.

    Examples:

        phalanx generate runs/demo --prompt "def "

        phalanx generate runs/demo --prompt "import " --tokens 50 --temperature 0

        phalanx generate runs/demo --seed 7 --top-k 0

        phalanx generate runs/demo --step 100 --prompt "def "
    """
    from itertools import islice, takewhile

    import torch

    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.model.generation import stream_tokens
    from phalanx.model.sampling import Sampling
    from phalanx.train.checkpoint.load_model import load_trained_model

    trained = load_trained_model(run, step, trust=bool(trust))
    tokenizer = load_tokenizer(trained.tokenizer_file)
    start = torch.tensor(tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.end])
    generator = torch.Generator().manual_seed(seed)
    context = trained.run.training.seq_len
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    stream = stream_tokens(trained.module, [start], sampling, generator, context, tokenizer.vocab)
    new = (int(tokens_B[0]) for tokens_B in islice(stream, tokens))
    print(prompt, end="", flush=True)
    for text in pieces(tokenizer, start.tolist(), takewhile(lambda token: token != tokenizer.end, new)):
        print(text, end="", flush=True)
    print()


def pieces(tokenizer: Tokenizer, before: list[int], new: Iterable[int]) -> Iterator[str]:
    """Yield the text that each new token adds after the tokens of the prompt, as they are sampled.

    A character is complete only with its last byte.
    """
    printed_text = tokenizer.decode(before)
    for token in new:
        before = [*before, token]
        text = tokenizer.decode(before)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(printed_text) :]
            printed_text = text
