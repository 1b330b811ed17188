"""The file and line of documents, which token files do not record: the text is read again up to them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from phalanx.data.bad_records import BadRecords
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.joined_tokens import JoinedTokens
from phalanx.data.source_checks import indexed_prefixes, records_of
from phalanx.data.sources import Document, is_held_out, list_source_files, read_documents
from phalanx.data.tokenize import tokenize_documents
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.run import DataSpec


def locate_documents(
    data: DataSpec, dataset: IndexedDataset, tokenizer: Tokenizer, numbers: Collection[int]
) -> dict[int, str]:
    """Return the file, and the line or number in it, of documents of the training tokens of `data.train`.

    `numbers` are those in the dataset. Of a .bin file, the number of the document in it is given. A document whose text
    has changed since it was tokenized is left out, and so are those after a file that is missing."""
    if indexed_prefixes(data.train, "data.train"):
        return {number: _locate_in_pair(dataset, number) for number in numbers}
    last = max(numbers, default=-1)
    locations = {}
    for number, (location, document) in enumerate(_training_documents(data, dataset)):
        if number in numbers and _has_tokens(document, dataset.document(number), tokenizer):
            locations[number] = location
        if number >= last:
            break
    return locations


def _training_documents(data: DataSpec, dataset: IndexedDataset) -> Iterator[tuple[str, Document]]:
    """Yield the documents of a dataset that `prepare` wrote, in order, with their locations."""
    # If names select no document, the end of all text is held out.
    splits_by_name = not data.has_held_out_text and not Path(dataset.prefix).with_name("all.idx").is_file()
    for file in list_source_files(data.train):
        bad_records = BadRecords(data.max_bad_records)
        for document in read_documents(file, records_of(data), bad_records=bad_records):
            if not document.is_empty and not (splits_by_name and is_held_out(document.name, data.held_out_fraction)):
                yield file.path + document.name.removeprefix(file.name), document


def _has_tokens(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> bool:
    """Return whether a document begins with these tokens, of which the last may be the end token."""
    ((_, expected),) = tokenize_documents([document], tokenizer)
    count = min(len(ids), len(expected))
    return len(ids) <= len(expected) + 1 and np.array_equal(ids[:count], expected[:count])


def _locate_in_pair(dataset: IndexedDataset, number: int) -> str:
    """Return the .bin file of a document, and the number of the document in it."""
    if isinstance(dataset.tokens, JoinedTokens):
        start = int(dataset.offsets[number])
        part = int(np.searchsorted(dataset.tokens.starts, start, side="right")) - 1
        first = int(np.searchsorted(dataset.offsets, dataset.tokens.starts[part]))
        return f"{dataset.tokens.files[part].path}: document {number - first}"
    return f"{os.path.realpath(f'{dataset.prefix}.bin')}: document {number}"
