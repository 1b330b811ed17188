"""`phalanx generate`: text generation with a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from phalanx.cli.common.options import Step, TrainedRun, Trust

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer


def generate(
    run: TrainedRun,
    prompt: Annotated[str, Option(help="Text to continue; empty: begin a document.")] = "",
    tokens: Annotated[int, Option(help="Maximum number of new tokens.", min=1)] = 200,
    temperature: Annotated[float, Option(help="Sampling temperature; 0: the most likely token.", min=0)] = 0.8,
    top_k: Annotated[int, Option(help="Sample from this number of most likely tokens; 0: all.", min=0)] = 50,
    seed: Annotated[int, Option(help="Random seed; equal seeds give equal texts.", min=0)] = 0,
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
    from phalanx.model.sampling import stream_tokens
    from phalanx.train.checkpoint.load_model import load_trained_model

    trained = load_trained_model(run, step, trust=bool(trust))
    tokenizer = load_tokenizer(trained.tokenizer_file)
    start = torch.tensor(tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.end])
    generator = torch.Generator().manual_seed(seed)
    context = trained.run.training.seq_len
    stream = stream_tokens(trained.module, start, temperature, top_k, generator, context, tokenizer.vocab)
    new = islice(stream, tokens)
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
