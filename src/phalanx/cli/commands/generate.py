"""`phalanx generate`: text generation with a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from phalanx.cli.common.options import (
    MinP,
    Overrides,
    RepetitionPenalty,
    Seed,
    Step,
    Temperature,
    TopK,
    TopP,
    TrainedRun,
    Trust,
)
from phalanx.cli.common.ranks import Ranks, is_first_rank, layout_of_ranks

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
    nproc: Ranks = None,
    set_: Overrides = None,
    step: Step = None,
    trust: Trust = None,
) -> None:
    """Print a prompt and its continuation by a run's checkpoint, or by a swarm's current model.

    With --nproc or under torchrun, ranks share the model: by ZeRO-3, or the layout that --set names.

    Examples:

        phalanx generate runs/demo --prompt "def "

        phalanx generate runs/demo --prompt "import " --tokens 50 --temperature 0

        phalanx generate runs/demo --seed 7 --top-k 0

        phalanx generate runs/demo --step 100 --prompt "def "

        phalanx generate runs/large --prompt "def " --nproc 8 --set layout.tp=4 --set layout.pp=2
    """
    from itertools import chain, islice, takewhile

    import torch

    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.launch.process import init_distributed
    from phalanx.model.generation import stream_tokens
    from phalanx.model.sampling import Sampling
    from phalanx.train.checkpoint.load_in_ranks import load_in_ranks
    from phalanx.train.checkpoint.load_model import find_trained_weights

    found = find_trained_weights(run, step, trust=bool(trust))
    layout = layout_of_ranks(found, nproc, set_)
    device = torch.device("cpu") if layout is None else init_distributed()
    model = found.load_module() if layout is None else load_in_ranks(found, layout, device)[0]
    tokenizer = load_tokenizer(found.tokenizer_file)
    start = torch.tensor(tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.end], device=device)
    generator = torch.Generator().manual_seed(seed)
    context = found.run.training.seq_len
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    stream = stream_tokens(model, [start], sampling, generator, context, tokenizer.vocab)
    new = (int(tokens_B[0]) for tokens_B in islice(stream, tokens))
    texts = pieces(tokenizer, start.tolist(), takewhile(lambda token: token != tokenizer.end, new))
    for text in chain([prompt], texts, ["\n"]):
        if is_first_rank():
            print(text, end="", flush=True)


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
