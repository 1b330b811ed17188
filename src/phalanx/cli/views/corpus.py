"""Facts about text and tokens (`phalanx data inspect`) on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from phalanx.cli.common.text import print_line, text_table
from phalanx.data.corpus_facts import NUM_EXAMPLES, CorpusFacts, DocumentPart, Duplicates, SourceFacts
from phalanx.spec.formatting import UNKNOWN, plural
from phalanx.spec.terminal import Terminal

BAR_WIDTH = 40
MAX_PARTS = 10
"""Documents of a row that are printed."""
PREVIEW_CHARACTERS = 60
TURN_CHARACTERS = 400


def corpus_json(corpus: CorpusFacts) -> dict[str, Any]:
    """Return the facts as JSON values."""
    return {
        "sources": [asdict(facts) | {"longest": sorted(facts.longest, reverse=True)} for facts in corpus.sources],
        "duplicates": asdict(corpus.duplicates()),
    }


def print_corpus(console: Terminal, corpus: CorpusFacts) -> None:
    """Print the facts of all sources, duplicates between them, and rows as the model sees them."""
    table = text_table("source", numbers=("documents", "bytes", "tokens", "bad encodings", "broken records"))
    for facts in corpus.sources:
        counts = (facts.documents, facts.text_bytes, facts.tokens, len(facts.bad_encodings), len(facts.bad_records))
        table.add_row(facts.name, *(UNKNOWN if count is None else f"{count:,}" for count in counts))
    console.print(table)
    for facts in corpus.sources:
        _print_source(console, facts)
    _print_duplicates(console, corpus.duplicates())
    attention = "tokens attend only to their document" if corpus.mask else "attention is not masked between documents"
    for facts in corpus.sources:
        if facts.rows:
            has_answers = any(part.trained for row in facts.rows for part in row)
            marks = f"│ begins a document, {attention}{'; only text in «» is trained on' if has_answers else ''}"
            print_line(console, f"\n{facts.name}: rows as the model sees them ({marks})", "bold")
        for number, row in enumerate(facts.rows):
            parts = [Text(f"row {number}:"), *(_describe_part(part) for part in row[:MAX_PARTS])]
            if len(row) > MAX_PARTS:
                parts.append(Text(f"│ and {len(row) - MAX_PARTS} more documents", "dim"))
            print_line(console, Text(" ").join(parts))


def _print_source(console: Terminal, facts: SourceFacts) -> None:
    unit = "bytes" if facts.tokens is None else "tokens"
    print_line(console, f"\n{facts.name}: {unit} per document", "bold")
    largest = max((each.documents for each in facts.lengths), default=0)
    bars = text_table(numbers=("",) * 2)
    bars.show_header = False
    bars.add_column()
    for each in facts.lengths:
        bar = "█" * max(round(BAR_WIDTH * each.documents / largest), bool(each.documents))
        bars.add_row(f"{each.low:,} to {max(each.high - 1, each.low):,}", f"{each.documents:,}", bar)
    console.print(bars)
    longest = ", ".join(f"{name} ({length:,})" for length, name in sorted(facts.longest, reverse=True))
    print_line(console, f"longest: {longest or 'none'}")
    if facts.too_long:
        print_line(console, f"too long for a row: {plural(facts.too_long, 'conversation')} (data.too_long)")
    _print_examples(console, "not UTF-8, or with U+FFFD", facts.bad_encodings)
    _print_examples(console, "broken", [record.reason for record in facts.bad_records])


def _print_examples(console: Terminal, title: str, examples: Sequence[str]) -> None:
    for example in examples[:NUM_EXAMPLES]:
        print_line(console, f"{title}: {example}")
    if len(examples) > NUM_EXAMPLES:
        print_line(console, f"{title}: {len(examples) - NUM_EXAMPLES:,} more (--json has all)")


def _print_duplicates(console: Terminal, duplicates: Duplicates) -> None:
    print_line(console, f"\n{plural(duplicates.documents, 'exact duplicate')}", "bold")
    for names in duplicates.examples:
        print_line(console, f"equal: {', '.join(names)}")


def _describe_part(part: DocumentPart) -> Text:
    """Return the beginning of a document's part of a row; a line of text has no line breaks.

    Of a conversation, the text that is trained on is in «», and the rest is dim."""
    place = f"({len(part.tokens)} tokens from position {part.start})"
    if part.trained is None:
        text = "" if part.text is None else " ".join(part.text[:PREVIEW_CHARACTERS].split())
        return Text(f"│ {text or part.tokens[:8]} {place}")
    if not any(is_trained for is_trained, _ in part.trained):
        return Text(f"│ padding {place}", "dim")
    line = Text("│ ")
    for is_trained, text in part.trained:
        short = text if len(text) <= TURN_CHARACTERS else f"{text[:TURN_CHARACTERS]}…"
        visible = short.replace("\n", "⏎")
        line.append(f"«{visible}»" if is_trained else visible, "" if is_trained else "dim")
    return line.append(f" {place}")
