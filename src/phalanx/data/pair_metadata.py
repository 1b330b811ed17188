"""PREFIX.meta.json next to a .bin/.idx pair: the tokenizer of its tokens, and whether its documents may be cut."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_json
from phalanx.spec.mixture import RecordKind

METADATA_SUFFIX = ".meta.json"
PAIR_SUFFIXES = (".bin", ".idx", METADATA_SUFFIX)
TOKENIZER_KEY = "tokenizer_sha256"
VOCAB_KEY = "tokenizer_vocab"
TOKENS_KEY = "tokens_fingerprint"
WHOLE_KEY = "whole_documents"
PREFERENCE_KEY = "preference_pairs"


def write_pair_metadata(prefix: str | Path, tokenizer: Tokenizer, kind: RecordKind = "text") -> None:
    """Write the tokenizer of a pair's tokens to PREFIX.meta.json, and whether its documents are never cut.

    `kind` is that of the records whose documents they are."""
    metadata = {
        TOKENIZER_KEY: tokenizer.fingerprint(),
        VOCAB_KEY: tokenizer.vocab,
        TOKENS_KEY: IndexedDataset(prefix).fingerprint(),
        **({WHOLE_KEY: True} if kind != "text" else {}),
        **({PREFERENCE_KEY: True} if kind == "preference" else {}),
    }
    Path(f"{prefix}{METADATA_SUFFIX}").write_text(json.dumps(metadata, indent=1) + "\n")


def read_pair_metadata(dataset: IndexedDataset) -> dict[str, Any] | None:
    """Return the recorded tokenizer of a pair; None if no file records it, or if the tokens have changed."""
    with suppress(OSError, ValueError, TypeError):
        metadata = dict(parse_json(Path(f"{dataset.prefix}{METADATA_SUFFIX}").read_bytes()))
        if TOKENIZER_KEY in metadata and metadata.get(TOKENS_KEY) == dataset.fingerprint():
            return metadata
    return None


def has_whole_documents(dataset: IndexedDataset) -> bool:
    """Return whether the documents of a pair are conversations, which rows do not cut."""
    metadata = read_pair_metadata(dataset)
    return metadata is not None and bool(metadata.get(WHOLE_KEY))


def check_pair_tokenizer(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if the tokens of a pair are known to be of another tokenizer.

    Nothing is known of a pair without a metadata file. `field` or option names the pair."""
    metadata = read_pair_metadata(dataset)
    if metadata is None or metadata[TOKENIZER_KEY] == tokenizer.fingerprint():
        return
    expected = metadata[TOKENIZER_KEY][:12]
    actual = tokenizer.fingerprint()[:12]
    problem = (
        f"was tokenized with another tokenizer ({expected}, {metadata.get(VOCAB_KEY)} ids) than the configured one "
        f"({actual}, {tokenizer.vocab} ids)"
    )
    fix = (
        "use the tokenizer.json of these tokens, or prepare the text again; if both tokenizers have the same "
        f"ids, remove {dataset.prefix}{METADATA_SUFFIX}"
    )
    raise UserError(field, dataset.prefix, problem, fix)


def has_preference_pairs(dataset: IndexedDataset) -> bool:
    """Return whether two consecutive documents of a pair have a chosen and a rejected answer."""
    metadata = read_pair_metadata(dataset)
    return metadata is not None and bool(metadata.get(PREFERENCE_KEY))


def recorded_kind(dataset: IndexedDataset) -> RecordKind:
    """Return the kind of the records of a pair; "chat" for any conversations."""
    if has_preference_pairs(dataset):
        return "preference"
    return "chat" if has_whole_documents(dataset) else "text"
