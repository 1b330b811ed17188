"""`phalanx data`: token files from text, a tokenizer from text, and the content of token files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.common.progress import format_counts
from phalanx.spec.errors import UserError
from phalanx.spec.run import BYTES_VOCAB
from phalanx.train.progress import SECONDS_BETWEEN_LINES

if TYPE_CHECKING:
    from phalanx.data.tokenize import Progress, TokenizationCounts
    from phalanx.data.tokenizer import Tokenizer

app = typer.Typer(help="Tokenize text and inspect tokens.", no_args_is_help=True)

Sources = Annotated[
    list[str],
    Argument(
        help="Files, directories or globs of text, .json, .jsonl or .parquet, also compressed; hf:NAME_OR_DIR; or "
        '"stdlib".',
        metavar="SOURCE",
    ),
]
TextKey = Annotated[str, Option(help="Field of a JSONL line or Parquet row that holds the text.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Force = Annotated[bool, Option("--force", help="Overwrite existing files.")]


@app.command()
def prepare(
    sources: Sources,
    out: Annotated[Path, Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[str, Option(help='A Hugging Face tokenizer.json, or "bytes".')],
    text_key: TextKey = "text",
    workers: Annotated[int, Option(help="Tokenizer threads; 0: one per core.", min=0)] = 0,
    end: Annotated[bool, Option("--end/--no-end", help="Append the end token to documents.")] = True,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Tokenize text into a .bin/.idx pair, which Megatron reads too.

    Examples:

        phalanx data prepare corpus/ --out tokens/corpus --tokenizer tokenizer.json

        phalanx data prepare 'shards/*.jsonl' --text-key content --out tokens/web --tokenizer bytes

        phalanx data prepare stdlib --out tokens/stdlib --tokenizer bytes --json
    """
    from phalanx.data.pair_metadata import PAIR_SUFFIXES
    from phalanx.data.sources import documents
    from phalanx.data.tokenize import disk_error, limit_threads, write_indexed_pairs

    _refuse_existing([Path(f"{out}{suffix}") for suffix in PAIR_SUFFIXES], force)
    model = _load_tokenizer(tokenizer)
    limit_threads(workers)
    start = time.monotonic()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _show_progress(_sum_source_bytes(sources)) as progress:
            text = documents(sources, text_key, "SOURCE")
            (counts,) = write_indexed_pairs(text, model, [out], end=end, progress=progress)
    except OSError as error:
        raise disk_error("--out", out, error) from None
    seconds = time.monotonic() - start
    facts = {
        "prefix": str(out),
        "documents": counts.documents,
        "tokens": counts.tokens,
        "text_bytes": counts.text_bytes,
        "bytes_per_token": round(counts.text_bytes / max(1, counts.tokens), 3),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(counts.tokens / seconds),
    }
    _print_facts(facts, json_)


@app.command()
def tokenizer(
    sources: Sources,
    out: Annotated[Path, Option(help="The tokenizer.json to write.")],
    vocab: Annotated[int, Option(help="Maximum vocabulary size.", min=BYTES_VOCAB)] = 2048,
    text_key: TextKey = "text",
    force: Force = False,
    json_: Json = False,
) -> None:
    """Train a byte-level BPE on text and write it as a Hugging Face tokenizer.json.

    Examples:

        phalanx data tokenizer stdlib --out tokenizer.json

        phalanx data tokenizer corpus/ --out tokenizer.json --vocab 32000
    """
    from phalanx.data.sources import documents
    from phalanx.data.tokenize import disk_error
    from phalanx.data.tokenizer import train_bpe

    _refuse_existing([out], force)
    start = time.monotonic()
    model = train_bpe((document.text for document in documents(sources, text_key, "SOURCE")), vocab)
    seconds = time.monotonic() - start
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        model.save(out)
    except OSError as error:
        raise disk_error("--out", out, error) from None
    _print_facts({"tokenizer": str(out), "vocab": model.vocab, "end": model.end, "seconds": round(seconds, 3)}, json_)


@app.command()
def inspect(
    prefix: Annotated[str, Argument(help="Prefix of a .bin/.idx pair.")],
    tokenizer: Annotated[str | None, Option(help='Tokenizer that decodes the first tokens: a path or "bytes".')] = None,
    tokens: Annotated[int, Option(help="Number of tokens to show from the start.", min=0)] = 32,
    json_: Json = False,
) -> None:
    """Show the contents of a .bin/.idx pair.

    Examples:

        phalanx data inspect tokens/corpus --tokenizer tokenizer.json
    """
    import numpy as np

    from phalanx.data.indexed_dataset import IndexedDataset, prefix_of
    from phalanx.data.source_checks import check_tokens

    dataset = IndexedDataset(prefix_of(prefix) or prefix, "PREFIX")
    lengths = np.diff(dataset.offsets)
    start = int(dataset.offsets[0])
    first = dataset.tokens[start : start + min(tokens, dataset.size)]
    facts: dict[str, Any] = {
        "prefix": dataset.prefix,
        "documents": len(dataset),
        "tokens": dataset.size,
        "dtype": str(dataset.tokens.dtype),
        "bytes": dataset.size * dataset.tokens.dtype.itemsize,
        "tokens_per_document": round(dataset.size / max(1, len(dataset)), 1),
        "longest_document": int(lengths.max(initial=0)),
        "fingerprint": dataset.fingerprint(),
        "first_tokens": first.tolist(),
    }
    if tokenizer is not None:
        model = _load_tokenizer(tokenizer)
        check_tokens(dataset, model, "PREFIX")
        facts["first_text"] = model.decode(first)
    _print_facts(facts, json_)


def _refuse_existing(paths: list[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            fix = "choose another name, or overwrite it with --force"
            raise UserError("--out", str(path), "already exists", fix=fix)


def _load_tokenizer(name: str) -> Tokenizer:
    from phalanx.data.tokenizer import byte_tokenizer, load_tokenizer

    return byte_tokenizer() if name == "bytes" else load_tokenizer(name)


def _sum_source_bytes(sources: list[str]) -> int | None:
    """Return the bytes of text to read if the files' sizes are known."""
    from phalanx.data.compression import COMPRESSED_SUFFIXES
    from phalanx.data.sources import list_source_files

    files = list_source_files(sources, "SOURCE")
    has_plain_text = all(file.kind == "text" and not file.path.endswith(COMPRESSED_SUFFIXES) for file in files)
    return sum(file.size for file in files) if has_plain_text else None


@contextmanager
def _show_progress(total_bytes: int | None) -> Iterator[Progress]:
    """Show a progress bar on a terminal, else occasional lines: on stderr, so that stdout has only the result."""
    from rich import progress as bar

    from phalanx.spec.terminal import Terminal

    console = Terminal(stderr=True)
    if not console.is_terminal:
        yield _print_periodically(console.print)
        return
    columns = (bar.BarColumn(), bar.TextColumn("{task.description}"), bar.FileSizeColumn(), bar.TimeElapsedColumn())
    with bar.Progress(*columns, console=console, transient=True) as progress_bar:
        task = progress_bar.add_task("", total=total_bytes)
        yield lambda counts: progress_bar.update(task, completed=counts.text_bytes, description=format_counts(counts))


def _print_periodically(print_line: Callable[[str], object]) -> Progress:
    """Return a callback that prints the counts every SECONDS_BETWEEN_LINES."""
    next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES

    def print_counts(counts: TokenizationCounts) -> None:
        nonlocal next_line_at
        if time.monotonic() >= next_line_at:
            print_line(format_counts(counts))
            next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES

    return print_counts


def _print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        value_text = f"{value:,}" if isinstance(value, int | float) else str(value)
        print(f"{name.replace('_', ' '):<{width}}  {value_text}")
