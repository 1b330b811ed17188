"""`phalanx data`: token files from text, a tokenizer from text, and the content of token files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.common.progress import format_counts
from phalanx.cli.common.upload import Upload, check_upload, upload_files
from phalanx.spec.errors import UserError
from phalanx.spec.mixture import RecordKind
from phalanx.spec.run import BYTES_VOCAB, DataSpec
from phalanx.train.progress import SECONDS_BETWEEN_LINES

if TYPE_CHECKING:
    from phalanx.data.tokenize import Progress, TokenizationCounts
    from phalanx.data.tokenizer import Tokenizer

MAX_TEXT_WIDTH = 60
"""Characters of a document that `step` prints."""

app = typer.Typer(help="Tokenize text and inspect tokens.", no_args_is_help=True)

Sources = Annotated[
    list[str],
    Argument(
        help="Files, directories or globs of text, .json, .jsonl, .parquet, .arrow, .tar or .mds; "
        'hf:NAME_OR_DIR:CONFIG:SPLIT; or "stdlib".',
        metavar="SOURCE",
    ),
]
SEQ_LEN = 256
"""Tokens in a row of a sample without a run."""
MaxBadRecords = Annotated[int, Option(help="Broken records to skip; one more is an error.", min=0)]
EndToken = Annotated[str | None, Option(help="Token at the end of documents; default: that of the tokenizer.")]
TextKey = Annotated[str | None, Option(help='Field of records with the text (default "text") or the messages.')]
Format = Annotated[RecordKind, Option("--format", help="What records are: text, conversations, or prompts.")]
Template = Annotated[
    str | None, Option(help='Template of conversations: a Jinja file, "chatml" or "plain"; default: of the tokenizer.')
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Force = Annotated[bool, Option("--force", help="Overwrite existing files.")]


@app.command()
def prepare(
    sources: Sources,
    out: Annotated[Path, Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[str, Option(help='A Hugging Face tokenizer.json, a model on the hub (org/name), or "bytes".')],
    text_key: TextKey = None,
    format_: Format = "text",
    chat_template: Template = None,
    max_bad_records: MaxBadRecords = 0,
    workers: Annotated[int, Option(help="Processes, or threads for a small text; 0: one per core.", min=0)] = 0,
    nodes: Annotated[int, Option(help="Nodes that run this command on a shared disk, each a part of it.", min=1)] = 1,
    node_rank: Annotated[int, Option(help="Number of this node, from 0.", min=0)] = 0,
    end: Annotated[bool, Option("--end/--no-end", help="Append the end token to documents.")] = True,
    end_token: EndToken = None,
    upload: Upload = None,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Tokenize text into a .bin/.idx pair, which Megatron reads too.

    The pair does not depend on the number of processes and nodes. A command that was interrupted continues when it is
    repeated: PREFIX.shards/ has what is complete. With several nodes, the last one to finish writes the pair.

    Examples:

        phalanx data prepare corpus/ --out tokens/corpus --tokenizer tokenizer.json

        phalanx data prepare 'shards/*.jsonl' --text-key content --out tokens/web --tokenizer bytes

        phalanx data prepare web/ --out /shared/web --tokenizer tokenizer.json --nodes 4 --node-rank $SLURM_PROCID

        phalanx data prepare corpus/ --out corpus --tokenizer tokenizer.json --upload s3://bucket/tokens
    """
    from phalanx.data.pair_metadata import PAIR_SUFFIXES
    from phalanx.data.prepare_shards import prepare_shards
    from phalanx.data.source_checks import records_of
    from phalanx.data.tokenize import disk_error
    from phalanx.spec.base import require

    require(node_rank < nodes, "--node-rank", node_rank, f"is not below --nodes ({nodes})", "count nodes from 0")
    _refuse_existing([Path(f"{out}{suffix}") for suffix in PAIR_SUFFIXES], force)
    check_upload(upload)
    data = _describe_data(tokenizer, end_token, format_, text_key, chat_template)
    model = _load_tokenizer(data)
    workers = workers or len(os.sched_getaffinity(0))
    start = time.monotonic()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _show_progress(_sum_source_bytes(sources)) as progress:
            prepared = prepare_shards(
                sources,
                model,
                out,
                records=records_of(data),
                end=end,
                max_bad_records=max_bad_records,
                workers=workers,
                nodes=nodes,
                node_rank=node_rank,
                force=force,
                progress=progress,
            )
    except OSError as error:
        raise disk_error("--out", out, error) from None
    seconds = time.monotonic() - start
    if not prepared.num_missing:
        written = (Path(f"{out}{suffix}") for suffix in PAIR_SUFFIXES)
        upload_files([file for file in written if file.is_file()], upload)
    counts = prepared.counts
    facts: dict[str, Any] = {
        "prefix": str(out),
        "documents": counts.documents,
        "tokens": counts.tokens,
        "bad_records": len(prepared.bad_records),
        "text_bytes": counts.text_bytes,
        "bytes_per_token": round(counts.text_bytes / max(1, counts.tokens), 3),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(counts.tokens / seconds),
    }
    if prepared.num_missing:
        facts["missing_shards"] = f"{prepared.num_missing} of {prepared.num_shards}, which other nodes write"
    _print_facts(facts, json_)


@app.command()
def tokenizer(
    sources: Sources,
    out: Annotated[Path, Option(help="The tokenizer.json to write.")],
    vocab: Annotated[int, Option(help="Maximum vocabulary size.", min=BYTES_VOCAB)] = 2048,
    text_key: TextKey = None,
    format_: Format = "text",
    chat_template: Template = None,
    max_bad_records: MaxBadRecords = 0,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Train a byte-level BPE on text and write it as a Hugging Face tokenizer.json.

    Examples:

        phalanx data tokenizer stdlib --out tokenizer.json

        phalanx data tokenizer corpus/ --out tokenizer.json --vocab 32000
    """
    from phalanx.data.bad_records import BadRecords
    from phalanx.data.source_checks import records_of
    from phalanx.data.sources import documents
    from phalanx.data.tokenize import disk_error
    from phalanx.data.tokenizer import train_bpe

    _refuse_existing([out], force)
    data = _describe_data("bpe", None, format_, text_key, chat_template)
    start = time.monotonic()
    text = documents(sources, records_of(data), "SOURCE", BadRecords(max_bad_records, "--max-bad-records"))
    model = train_bpe((document.text for document in text), vocab)
    seconds = time.monotonic() - start
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        model.save(out)
    except OSError as error:
        raise disk_error("--out", out, error) from None
    _print_facts({"tokenizer": str(out), "vocab": model.vocab, "end": model.end, "seconds": round(seconds, 3)}, json_)


@app.command()
def inspect(
    sources: Annotated[
        list[str],
        Argument(help="A run file; or text as for `prepare`, or prefixes of .bin/.idx pairs.", metavar="SOURCE"),
    ],
    tokenizer: Annotated[
        str | None, Option(help='Tokenizer that counts tokens: a path or "bytes"; default: of the run.')
    ] = None,
    end_token: EndToken = None,
    text_key: TextKey = None,
    format_: Format = "text",
    chat_template: Template = None,
    rows: Annotated[int, Option(help="Number of rows to show as the model sees them.", min=0)] = 2,
    seq_len: Annotated[int | None, Option(help="Tokens in a row; default: of the run, or 256.", min=2)] = None,
    json_: Json = False,
) -> None:
    """Show documents, tokens and bytes by source, lengths, duplicates, broken text, and rows as the model sees them.

    All of the text is read. Broken records are listed, however many. Without a tokenizer, lengths are in bytes.

    Examples:

        phalanx data inspect run.toml

        phalanx data inspect 'shards/*.jsonl' --tokenizer tokenizer.json --rows 4 --seq-len 1024

        phalanx data inspect tokens/corpus --tokenizer tokenizer.json --json
    """
    from phalanx.cli.views.corpus import corpus_json, print_corpus
    from phalanx.data.corpus_facts import CorpusFacts, facts_of_run
    from phalanx.data.source_checks import TextField, records_of
    from phalanx.spec.base import require
    from phalanx.spec.files.load import load_run
    from phalanx.spec.local_paths import is_url
    from phalanx.spec.terminal import Terminal

    with _show_progress(None) as progress:
        if len(sources) == 1 and sources[0].endswith(".toml") and not is_url(sources[0]):
            given = {"--tokenizer": tokenizer, "--text-key": text_key, "--chat-template": chat_template}
            for option, value in given.items():
                require(value is None, option, value, "has no effect on a run file", "change the run file")
            run = load_run(sources[0])
            corpus = facts_of_run(run.data, rows, seq_len or run.training.seq_len, progress)
        else:
            data = _describe_data(tokenizer or "bytes", end_token, format_, text_key, chat_template)
            model = None if tokenizer is None else _load_tokenizer(data)
            corpus = CorpusFacts(model, rows, seq_len or SEQ_LEN)
            for source in sources:
                corpus.add_source(source, TextField("SOURCE", [source], records_of(data), max_bad_records=0), progress)
    if json_:
        print(json.dumps(corpus_json(corpus)))
    else:
        print_corpus(Terminal(), corpus)


@app.command()
def step(
    run: Annotated[Path, Argument(help="Run directory.", metavar="RUN_DIR")],
    step_: Annotated[int, Option("--step", help="Step, from 1, as in progress and metrics.", min=1, metavar="N")],
    json_: Json = False,
) -> None:
    """Show which documents were in a step of a run, such as one at which the loss jumped.

    For each row of the global batch: the documents with file and line, the tokens of them that the row has, and their
    first words. The rows follow from the step, so that nothing is trained; text is read again up to these documents.

    Examples:

        phalanx data step runs/first --step 120

        phalanx data step runs/first --step 120 --json
    """
    from phalanx.train.step_rows import rows_of_step

    rows = rows_of_step(run, step_)
    if json_:
        print(json.dumps({"step": step_, "rows": [asdict(row) for row in rows]}))
        return

    for row in rows:
        print(f"row {row.row}{f' of {row.source}' if row.source else ''}")
        for document in row.documents:
            last = document.first + document.tokens - 1
            location = document.location or f"document {document.document}"
            words = " ".join(document.text.split())
            text = words if len(words) <= MAX_TEXT_WIDTH else f"{words[:MAX_TEXT_WIDTH]}…"
            print(f"  {location}  tokens {document.first:,} to {last:,}  {text}")


def _refuse_existing(paths: list[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            fix = "choose another name, or overwrite it with --force"
            raise UserError("--out", str(path), "already exists", fix=fix)


def _describe_data(
    tokenizer: str, end_token: str | None, format_: RecordKind, text_key: str | None, chat_template: str | None
) -> DataSpec:
    """Return options as the table of a run file. Raises UserError if they contradict each other."""
    if tokenizer == "bytes" and end_token is not None:
        problem = "has no effect with --tokenizer bytes, which has its own"
        raise UserError("--end-token", end_token, problem, fix="remove it")
    if format_ == "text" and chat_template is not None:
        raise UserError(
            "--chat-template", chat_template, "has no effect on text", fix="add --format chat, or remove it"
        )
    return DataSpec(
        tokenizer=tokenizer, end_token=end_token, format=format_, text_key=text_key, chat_template=chat_template
    )


def _load_tokenizer(data: DataSpec) -> Tokenizer:
    from phalanx.data.tokenizer import load_tokenizer, tokenizer_without_training

    # The name of an option is never "bpe", which would be trained.
    return tokenizer_without_training(data) or load_tokenizer(data.tokenizer)


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
