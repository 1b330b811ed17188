"""`phalanx chat`: a conversation with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

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
    from phalanx.data.chat_template import ChatTemplate
    from phalanx.data.tokenizer import Tokenizer

DAY_SECONDS = 24 * 3600.0
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def chat(
    run: TrainedRun,
    system: Annotated[str | None, Option(help="First message, of the system.")] = None,
    tokens: Annotated[int, Option(help="Maximum number of tokens of an answer.", min=1)] = 512,
    temperature: Temperature = 0.7,
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
    """Talk to a checkpoint of a run that was trained on conversations.

    Each line is a message; /new begins another conversation, and Ctrl-D or /quit ends. The tokenizer's chat template
    renders the conversation, as in training. With --nproc or under torchrun, ranks share the model: by ZeRO-3, or the
    layout that --set names.

    Examples:

        phalanx chat runs/tuned

        phalanx chat runs/tuned --system "Answer in one word." --temperature 0

        echo "What is 2 + 2?" | phalanx chat runs/tuned

        phalanx chat runs/large --nproc 8 --set layout.tp=8
    """
    from itertools import islice

    import torch

    from phalanx.data.chat_template import ConversationError
    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.launch.process import init_distributed
    from phalanx.model.generation import stream_tokens
    from phalanx.model.sampling import Sampling
    from phalanx.parallel.comm.objects import broadcast_from_rank0
    from phalanx.spec.errors import UserError
    from phalanx.train.checkpoint.load_in_ranks import load_in_ranks
    from phalanx.train.checkpoint.load_model import find_trained_weights

    found = find_trained_weights(run, step, trust=bool(trust))
    tokenizer = load_tokenizer(found.tokenizer_file)
    template = tokenizer.chat
    if template is None:
        fix = 'train with data.format = "chat", or use phalanx generate'
        raise UserError("RUN_DIR", str(run), "has a tokenizer without a chat template", fix)
    try:
        ending = ending_of_answers(template, tokenizer.end_text)
    except ConversationError:
        ending = ""
    layout = layout_of_ranks(found, nproc, set_)
    # The other ranks wait while a person thinks.
    device = torch.device("cpu") if layout is None else init_distributed(timeout_seconds=DAY_SECONDS)
    model = found.load_module() if layout is None else load_in_ranks(found, layout, device)[0]
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    generator = torch.Generator().manual_seed(seed)
    first: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    while (text := broadcast_from_rank0(_read_message)) is not None:
        if text == "/new":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": text})
        try:
            rendered = template.render(messages, add_generation_prompt=True)
        except ConversationError as error:
            raise UserError("RUN_DIR", str(run), f"has a conversation that {error}", "change the messages") from None
        ((ids, _),) = tokenizer.encode_with_offsets([rendered], has_special=True)
        context = found.run.training.seq_len
        prompt = torch.from_numpy(ids).to(device)
        stream = stream_tokens(model, [prompt], sampling, generator, context, tokenizer.vocab)
        new = (int(tokens_B[0]) for tokens_B in islice(stream, tokens))
        answer = ""
        for piece in answer_pieces(tokenizer, ending, new):
            answer += piece
            _print(piece)
        _print("\n")
        messages.append({"role": "assistant", "content": answer})


def ending_of_answers(template: ChatTemplate, end_text: str) -> str:
    """Return the text with which a template ends answers, without the end token; "" if it has none.

    Raises ConversationError if the template refuses a short conversation."""
    text, spans = template.render_answers([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    return text[spans[0][0] :].partition("b")[2].replace(end_text, "").strip()


def answer_pieces(tokenizer: Tokenizer, ending: str, new: Iterable[int]) -> Iterator[str]:
    """Yield what each token adds to an answer, up to its end.

    A character is complete only with its last byte, and what may become the ending of answers is held back."""
    tokens: list[int] = []
    printed = 0
    for token in new:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        is_end = token == tokenizer.end or (ending != "" and text.endswith(ending))
        held_back = next((size for size in range(len(ending), 0, -1) if text.endswith(ending[:size])), 0)
        visible = text[: len(text) - held_back].rstrip(REPLACEMENT) if not is_end else text.removesuffix(ending)
        yield visible[printed:]
        printed = len(visible)
        if is_end:
            return


def _print(text: str) -> None:
    if is_first_rank():
        print(text, end="", flush=True)


def _read_message() -> str | None:
    """Return the next line of the user; None at the end."""
    if sys.stdin.isatty():
        try:
            line = input("> ")
        except EOFError:
            return None
    else:
        line = sys.stdin.readline()
        if not line:
            return None
    line = line.strip()
    return None if line == "/quit" else line
